"""Hugging Face directories: what is read exactly, what is refused and how the refusal reads."""

import dataclasses
import json
import math
import os
import struct
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from spot_jax import (
    convert,
    families,
    family_rows,
    hf_config,
    hf_rope,
    hf_weights,
    hf_write,
    orbax_io,
    safetensors_io,
    tokenizer_files,
)
from spot_jax.checkpoint import CheckpointError
from spot_jax.config import RopeScaling
from spot_jax.models import target
from tests import fixtures

INDEX = "model.safetensors.index.json"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q1, DOWN1 = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
LEAVES = {
    "model.layers.{}.input_layernorm.weight": "layers_attention_norm",
    "model.layers.{}.self_attn.k_norm.weight": "layers_k_norm",
    "model.layers.{}.mlp.up_proj.weight": "layers_up",
}


def bits(array):
    """The bits of an array, so that equality is exact and NaN equals itself."""
    array = np.asarray(array)
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def assert_same_model(left, right):
    assert left.config == right.config
    assert left.params.keys() == right.params.keys()
    for name, leaf in left.params.items():
        np.testing.assert_array_equal(bits(leaf), bits(right.params[name]), err_msg=name)


def edit_config(directory, **changes):
    path = directory / "config.json"
    fixtures.write_json(path, json.loads(path.read_text()) | changes)


def edit_header(path, change):
    """Rewrites the header of a safetensors file by `change(header)`, the data as they are."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_of_every_tensor_arrives(tmp_path, dtype):
    tensors = fixtures.write_hf(tmp_path, dtype=dtype)
    model = convert.load_target(tmp_path, dtype=None)
    assert {str(leaf.dtype) for leaf in model.params.values()} == {dtype}
    np.testing.assert_array_equal(bits(model.params["embed"]), bits(tensors[EMBED]))
    np.testing.assert_array_equal(bits(model.params["head"]), bits(tensors[HEAD]))
    for pattern, leaf in LEAVES.items():
        stacked = np.stack([tensors[pattern.format(layer)] for layer in range(2)])
        np.testing.assert_array_equal(bits(model.params[leaf]), bits(stacked))
    shapes = {name: leaf.shape for name, leaf in model.params.items()}
    assert shapes == target.param_shapes(model.config)


def test_configuration(tmp_path):
    fixtures.write_hf(tmp_path)
    config = convert.load_target(tmp_path).config
    assert config.num_token_ids == 300 and config.vocab_size == 320
    assert (config.mask_id, config.eos_ids, config.pad_id) == (299, (298, 296), 296)
    assert (config.head_dim, config.num_heads, config.num_kv_heads) == (16, 4, 2)
    assert (config.block_length, config.rope_theta, config.max_position) == (8, 10000.0, 512)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float32"])
def test_dtypes_are_cast_by_value(tmp_path, stored, wanted):
    tensors = fixtures.write_hf(tmp_path, dtype=stored)
    head = convert.load_target(tmp_path, dtype=wanted).params["head"]
    kind = ml_dtypes.bfloat16 if wanted == "bfloat16" else np.float32
    np.testing.assert_array_equal(bits(head), bits(tensors[HEAD].astype(kind)))


def test_shards_equal_one_file(tmp_path):
    fixtures.write_hf(tmp_path / "one", dtype="bfloat16")
    fixtures.write_hf(tmp_path / "three", dtype="bfloat16", shards=3)
    assert_same_model(*(convert.load_target(tmp_path / name) for name in ("one", "three")))


def test_orbax_checkpoint_equals_its_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fixtures.write_hf("hf", dtype="bfloat16")
    result = convert.convert("hf", "deep/out")
    assert (result.dtype, result.num_tensors) == ("bfloat16", 25)
    assert result.num_params == target.num_params(result.config)
    for dtype in (None, "float32", "bfloat16"):
        assert_same_model(
            convert.load_target("deep/out", dtype=dtype), convert.load_target("hf", dtype=dtype)
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "deep/out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


@pytest.mark.parametrize("limit", [1000, 5000, 40000])
def test_conversion_in_pieces(tmp_path, monkeypatch, limit):
    """Leaves larger than a chunk arrive by matrices, or by rows, and never more than a chunk."""
    fixtures.write_hf(tmp_path / "hf", dtype="bfloat16", shards=2)
    expected = convert.load_target(tmp_path / "hf", dtype=None).params
    monkeypatch.setattr(orbax_io, "CHUNK_BYTES", limit)
    sizes, files = [], 0
    read = hf_weights.read_pieces

    def watch(name, shape, *rest):
        nonlocal files
        chunk = orbax_io.chunk_shape(shape, 2)
        files += math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
        for index, piece in read(name, shape, *rest):
            sizes.append((piece.nbytes, shape[-1] * 2))
            yield index, piece

    monkeypatch.setattr(hf_weights, "read_pieces", watch)
    convert.convert(tmp_path / "hf", tmp_path / "out")
    assert all(size <= max(limit, row) for size, row in sizes)
    written = [p for p in (tmp_path / "out" / "params").glob("*/*") if p.name[0] != "."]
    assert len(written) == files
    params = convert.load_target(tmp_path / "out", dtype=None).params
    for name, value in expected.items():
        np.testing.assert_array_equal(bits(params[name]), bits(value))


def test_a_conversion_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    fixtures.write_hf(tmp_path / "hf")
    read = hf_weights.read_pieces

    def fail(name, *rest):
        if name == "layers_q":
            raise OSError("the disk went away")
        return read(name, *rest)

    monkeypatch.setattr(hf_weights, "read_pieces", fail)
    with pytest.raises(CheckpointError, match="cannot write .*: the disk went away"):
        convert.convert(tmp_path / "hf", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_conversion_casts_when_asked(tmp_path):
    fixtures.write_hf(tmp_path / "hf")
    convert.convert(tmp_path / "hf", tmp_path / "out", dtype="bfloat16")
    assert_same_model(
        convert.load_target(tmp_path / "out", dtype=None),
        convert.load_target(tmp_path / "hf", dtype="bfloat16"),
    )


@pytest.mark.parametrize("form", ["hf", "out"])
def test_the_caller_goes_before_the_checkpoint(tmp_path, form):
    fixtures.write_hf(tmp_path / "hf")
    convert.convert(tmp_path / "hf", tmp_path / "out")
    model = convert.load_target(tmp_path / form, block_length=4, mask_token_id=10)
    assert (model.config.block_length, model.config.mask_id) == (4, 10)


def test_dry_run_checks_and_writes_nothing(tmp_path):
    fixtures.write_hf(tmp_path / "hf")
    result = convert.convert(tmp_path / "hf", tmp_path / "out", dry_run=True)
    assert result == convert.convert(tmp_path / "hf", tmp_path / "out2")
    assert not (tmp_path / "out").exists()
    (tmp_path / "hf" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no model.safetensors"):
        convert.convert(tmp_path / "hf", tmp_path / "out", dry_run=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_save_hf_round_trip(tmp_path, dtype, tied):
    fixtures.write_hf(tmp_path / "hf", dtype=dtype, config={"tie_word_embeddings": tied})
    model = convert.load_target(tmp_path / "hf", dtype=None)
    convert.to_hf(tmp_path / "hf", tmp_path / "copy")
    assert_same_model(convert.load_target(tmp_path / "copy", dtype=None), model)
    hf_write.save_hf(model.params, model.config, tmp_path / "bare", dtype=dtype)
    assert_same_model(convert.load_target(tmp_path / "bare", dtype=None), model)
    # The reference library reads the same bits.
    theirs, source = (
        safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        for name in ("bare", "hf")
    )
    assert theirs.keys() == source.keys()
    for name, tensor in source.items():
        np.testing.assert_array_equal(bits(theirs[name]), bits(tensor))


def test_save_hf_checks_before_it_writes(tmp_path):
    fixtures.write_hf(tmp_path / "hf")
    model = convert.load_target(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="dtype must be one of float32, bfloat16"):
        convert.to_hf(tmp_path / "hf", tmp_path / "half", dtype="float16")
    params = dict(model.params, embed=model.params["embed"][:-1], more=model.params["norm"])
    del params["head"]
    with pytest.raises(CheckpointError) as error:
        hf_write.save_hf(params, model.config, tmp_path / "bad")
    assert "3 problems" in str(error.value)
    for part in ("embed has shape", "head is missing", "more has no place"):
        assert part in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def contents(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


def test_only_a_model_of_one_file_is_replaced(tmp_path):
    fixtures.write_hf(tmp_path / "hf", seed=1)
    model = convert.load_target(tmp_path / "hf")
    out = tmp_path / "out"
    fixtures.write_hf(out)
    (out / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match="out already exists: pass --overwrite"):
        convert.to_hf(tmp_path / "hf", out)
    convert.to_hf(tmp_path / "hf", out, overwrite=True)
    assert_same_model(convert.load_target(out), model)
    assert (out / "README.md").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    convert.to_hf(tmp_path / "hf", tmp_path / "empty")
    assert_same_model(convert.load_target(tmp_path / "empty"), model)


def drafter_like(directory):
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights of something else")


NO_MODELS = {
    "notes": (lambda d: (d.mkdir(), (d / "thesis.tex").write_text("")), "without config.json"),
    "a drafter": (drafter_like, "without config.json"),
    "a converted target": (
        lambda d: convert.convert(d.parent / "hf", d),
        "is a converted checkpoint, no Hugging Face model: refusing",
    ),
    "shards": (lambda d: fixtures.write_hf(d, shards=2), "weights in model-00001-of-00002"),
    "a file": (lambda d: d.write_text(""), "is not a directory"),
}


@pytest.mark.parametrize("case", NO_MODELS)
def test_what_is_no_model_of_one_file_is_never_written_to(tmp_path, case):
    make, message = NO_MODELS[case]
    fixtures.write_hf(tmp_path / "hf")
    convert.convert(tmp_path / "hf", tmp_path / "orbax")
    out = tmp_path / "out"
    make(out)
    before = contents(out) if out.is_dir() else None
    for source in (tmp_path / "hf", tmp_path / "orbax"):
        with pytest.raises(CheckpointError, match=message):
            convert.to_hf(source, out, overwrite=True)
    assert before is None or contents(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "orbax", "out"]


@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_a_source_is_not_written_onto_itself(tmp_path, form):
    fixtures.write_hf(tmp_path / "hf")
    convert.convert(tmp_path / "hf", tmp_path / "orbax")
    before = contents(tmp_path / form)
    (tmp_path / "link").symlink_to(tmp_path / form)
    for out in (tmp_path / form, tmp_path / "link"):
        with pytest.raises(CheckpointError, match="is what is to be read|refusing to write"):
            convert.to_hf(tmp_path / form, out, overwrite=True)
    assert contents(tmp_path / form) == before


def test_writing_back_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    fixtures.write_hf(tmp_path / "hf")
    fixtures.write_hf(tmp_path / "old", seed=1)
    read = hf_weights.read_leaf

    def fail(name, *rest):
        if name == "layers_q":
            raise OSError("the disk went away")
        return read(name, *rest)

    monkeypatch.setattr(hf_weights, "read_leaf", fail)
    before = contents(tmp_path / "old")
    for out in ("new", "old"):
        with pytest.raises(CheckpointError, match="cannot write .*: the disk went away"):
            convert.to_hf(tmp_path / "hf", tmp_path / out, overwrite=True)
    assert contents(tmp_path / "old") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "old"]


@pytest.mark.parametrize("form", ["hf", "orbax", "saved"])
def test_writing_back_reads_one_leaf_at_a_time(tmp_path, monkeypatch, form):
    """Each leaf once, and none before the last is gone."""
    fixtures.write_hf(tmp_path / "hf", dtype="bfloat16")
    model = convert.load_target(tmp_path / "hf", dtype=None)
    convert.convert(tmp_path / "hf", tmp_path / "orbax")
    convert.save_target(
        tmp_path / "saved", model.params, model.config, source="x", tokenizer_from=tmp_path / "hf"
    )
    seen, alive = [], []
    tensors = hf_write._tensors

    def watch(read, places):
        def reading(name):
            seen.append(name)
            alive.append(sum(1 for ref in references if ref() is not None))
            leaf = np.array(read(name))
            references.append(weakref.ref(leaf))
            return leaf

        references = []
        return tensors(reading, places)

    monkeypatch.setattr(hf_write, "_tensors", watch)
    done = convert.to_hf(tmp_path / form, tmp_path / "again")
    assert (done.dtype, done.num_params) == ("bfloat16", target.num_params(model.config))
    assert sorted(seen) == sorted(target.param_shapes(model.config)) and max(alive) <= 1
    assert_same_model(convert.load_target(tmp_path / "again", dtype=None), model)


# Heads: tied or not, stored or not. (Stored, tied and different is in test_parity.py.)


def test_tied_and_absent_head(tmp_path):
    tensors = fixtures.write_hf(tmp_path, config={"tie_word_embeddings": True})
    model = convert.load_target(tmp_path)
    assert model.config.tie_embeddings and "head" not in model.params
    np.testing.assert_array_equal(target.head_weight(model.params), tensors[EMBED])


def test_tied_and_equal_head(tmp_path):
    tensors = fixtures.random_tensors(fixtures.CONFIG_JSON)
    fixtures.write_hf(tmp_path, config={"tie_word_embeddings": True}, extra={HEAD: tensors[EMBED]})
    model = convert.load_target(tmp_path)
    assert model.config.tie_embeddings and "head" not in model.params


def test_tied_and_different_head(tmp_path):
    tensors = fixtures.random_tensors(fixtures.CONFIG_JSON, seed=1)
    fixtures.write_hf(tmp_path, config={"tie_word_embeddings": True}, extra={HEAD: tensors[HEAD]})
    with pytest.warns(UserWarning, match=f"{HEAD} differs from {EMBED}: the stored"):
        model = convert.load_target(tmp_path)
    assert not model.config.tie_embeddings
    np.testing.assert_array_equal(model.params["head"], tensors[HEAD])


def test_untied_and_absent_head(tmp_path):
    fixtures.write_hf(tmp_path, without=[HEAD])
    with pytest.raises(CheckpointError, match=f"{HEAD} is missing and the embedding is not tied"):
        convert.load_target(tmp_path)


# Files that are wrong: each case edits good ones, and says what the error names.


def cut_shard(path, size):
    os.truncate(path, path.stat().st_size - size)


def index_names(directory, tensor, file):
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"][tensor] = file
    fixtures.write_json(directory / INDEX, index)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
BAD_SHARDS = {
    "shard absent": (lambda d: (d / SECOND).unlink(), [f"names {SECOND}, which is absent", Q1]),
    "shard cut": (
        lambda d: cut_shard(d / SECOND, 100),
        [SECOND, "is cut at", "tensors beyond its end: model.norm.weight"],
    ),
    "shard cut in header": (
        lambda d: os.truncate(d / SECOND, 300),
        [SECOND, "cut inside its header"],
    ),
    "shard empty": (lambda d: os.truncate(d / SECOND, 0), [SECOND, "not a safetensors file"]),
    "both shards absent": (
        lambda d: ((d / FIRST).unlink(), (d / SECOND).unlink()),
        ["2 problems", FIRST, SECOND],
    ),
    "index absent": (lambda d: (d / INDEX).unlink(), [INDEX, FIRST, SECOND]),
    "index names another file": (
        lambda d: index_names(d, Q1, "model-00003-of-00003.safetensors"),
        ["names model-00003-of-00003.safetensors, which is absent", Q1],
    ),
    "index names a file elsewhere": (
        lambda d: index_names(d, Q1, "../elsewhere.safetensors"),
        ["../elsewhere.safetensors, which is absent", Q1],
    ),
    "tensor not in its shard": (
        lambda d: index_names(d, "model.extra.weight", FIRST),
        [f"{FIRST} lacks tensors that {INDEX} puts there: model.extra.weight"],
    ),
    "tensor in another shard": (
        lambda d: index_names(d, EMBED, SECOND),
        [f"{SECOND} lacks", f"{FIRST} holds tensors that {INDEX} does not put there: {EMBED}"],
    ),
    "index is not JSON": (lambda d: (d / INDEX).write_text("{"), [INDEX, "not readable JSON"]),
    "index is empty": (lambda d: (d / INDEX).write_text("{}"), [INDEX, "has no weight_map"]),
    "single file beside an index": (
        lambda d: fixtures.save_tensors(d / "model.safetensors", {"x": np.zeros(1, np.float32)}),
        ["holds model.safetensors beside"],
    ),
    "no weights": (
        lambda d: [p.unlink() for p in d.glob("*.safetensors*")],
        ["has no model.safetensors and no"],
    ),
    "torch weights only": (
        lambda d: [p.rename(d / f"{p.name}.bin") for p in d.glob("*.safetensors*")],
        ["only safetensors are read"],
    ),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_bad_shards(tmp_path, case):
    spoil, expected = BAD_SHARDS[case]
    directory = tmp_path / "hf"
    fixtures.write_hf(directory, shards=2)
    spoil(directory)
    with pytest.raises(CheckpointError) as error:
        convert.convert(directory, tmp_path / "out")
    for part in expected:
        assert part in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def set_field(tensor, field, value):
    return lambda header: header[tensor].update({field: value})


def shift(header):
    """Moves every tensor one byte on."""
    for name, fields in header.items():
        if name != "__metadata__":
            fields["data_offsets"] = [n + 1 for n in fields["data_offsets"]]


BAD_HEADERS = {
    "unknown dtype": (set_field(Q1, "dtype", "F4"), f"tensor {Q1}: unknown dtype 'F4'"),
    "shape against bytes": (set_field(Q1, "shape", [64, 31]), f"tensor {Q1}: F32 .* needs 7936"),
    "negative shape": (set_field(Q1, "shape", [-64, -32]), "non-negative integers"),
    "backward offsets": (set_field(Q1, "data_offsets", [9, 1]), "are not a range"),
    "overlap": (set_field(Q1, "data_offsets", [0, 8192]), "of the data, not at"),
    "beyond the end": (shift, "is cut at"),
    "field missing": (lambda header: header[Q1].pop("shape"), "must have dtype, shape"),
    "tensor forgotten": (lambda header: header.pop(Q1), "of the data, not at"),
    "last tensor forgotten": (lambda header: header.popitem(), "belong to none"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers(tmp_path, case):
    change, expected = BAD_HEADERS[case]
    fixtures.write_hf(tmp_path)
    edit_header(tmp_path / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=expected) as error:
        convert.load_target(tmp_path)
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"[]", "not a JSON object"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": {}, "a": {}}', "a name occurs twice"),
    ],
)
def test_bad_header_text(tmp_path, header, expected):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=expected):
        safetensors_io.read_header(path)


def test_all_misfits_are_listed_at_once(tmp_path):
    zeros = np.zeros((3, 3), np.float32)
    extra = {"model.layers.2.mlp.up_proj.weight": zeros, "model.bias": zeros, DOWN1: zeros}
    fixtures.write_hf(tmp_path, without=[Q1], extra=extra)
    with pytest.raises(CheckpointError) as error:
        convert.load_target(tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{tmp_path}: 4 problems"
    assert sorted(line.removeprefix("  - ") for line in lines[1:]) == [
        "model.bias [3, 3] has no place in the model",
        f"{DOWN1} has shape [3, 3], expected [32, 48]",
        f"{Q1} is missing",
        "model.layers.2.mlp.up_proj.weight [3, 3] has no place in the model",
    ]


def test_harmless_buffers_are_ignored(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    fixtures.write_hf(tmp_path / "a", extra={name: np.zeros(8, np.float32)})
    fixtures.write_hf(tmp_path / "b")
    assert_same_model(convert.load_target(tmp_path / "a"), convert.load_target(tmp_path / "b"))


def test_integer_weights_are_refused(tmp_path):
    fixtures.write_hf(tmp_path, extra={Q1: np.zeros((64, 32), np.int8)})
    with pytest.raises(CheckpointError, match=f"{Q1} has dtype I8"):
        convert.load_target(tmp_path)


def test_directories_that_are_none(tmp_path):
    with pytest.raises(CheckpointError, match="absent is not a directory"):
        convert.load_target(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="config.json is missing"):
        convert.load_target(tmp_path)
    with pytest.raises(CheckpointError, match="dtype must be one of"):
        convert.load_target(tmp_path, dtype="float16")


def test_output_that_holds_the_source_is_never_replaced(tmp_path):
    fixtures.write_hf(tmp_path / "first")
    convert.convert(tmp_path / "first", tmp_path / "out")
    fixtures.write_hf(tmp_path / "out" / "hf")
    with pytest.raises(CheckpointError, match="contains .* refusing"):
        convert.convert(tmp_path / "out" / "hf", tmp_path / "out", overwrite=True)
    with pytest.raises(CheckpointError, match="not a spot-jax checkpoint: refusing"):
        convert.convert(tmp_path / "first", tmp_path / "first", overwrite=True)


# Configurations.


def test_family_by_architecture_then_by_model_type():
    sdar = {"architectures": ["SDARForCausalLM"], "model_type": "qwen3"}
    assert families.find(sdar) is family_rows.SDAR
    assert families.find({"model_type": "sdar"}) is family_rows.SDAR
    for other in (
        {"architectures": ["OtherForCausalLM"], "model_type": "sdar"},
        {"model_type": "qwen3"},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {},
    ):
        with pytest.raises(CheckpointError, match=r"supported are sdar \(SDARForCausalLM\)"):
            families.find(other)


BAD_CONFIGS = {
    "attention bias": ({"attention_bias": True}, "attention_bias True is not supported"),
    "sliding window": ({"use_sliding_window": True}, "use_sliding_window True is not"),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "odd layer types": ({"layer_types": [["full_attention"], 1, {}]}, "layer_types .* are not all"),
    "no list of layer types": ({"layer_types": 2}, "layer_types must be a list, found 2"),
    "no base": ({"rope_theta": math.nan}, "rope_theta must be a finite number, found nan"),
    "endless base": ({"rope_theta": math.inf}, "rope_theta must be a finite number, found inf"),
    "huge base": ({"rope_theta": 10**400}, "rope_theta must be a finite number, found 1000"),
    "no epsilon": ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number, found nan"),
    "negative epsilon": ({"rms_norm_eps": -1.0}, "rms_eps -1.0 0 or more"),
    "rotary nonsense": ({"partial_rotary_factor": math.nan}, "partial_rotary_factor must be in"),
    "endless scaling": (
        {"rope_scaling": {"type": "linear", "factor": math.inf}},
        "rope_scaling: factor inf: a number is needed",
    ),
    "no frequency factor": (
        {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": math.nan}},
        "rope_scaling: low_freq_factor nan: a number is needed",
    ),
    "frequency factors": (
        {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}},
        "low_freq_factor 4.0 must be 0 or more and below high_freq_factor 4.0",
    ),
    "yarn without turns": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 0.0}},
        "beta_fast and beta_slow must be above 0",
    ),
    "text for known ids": ({"num_token_ids": "300"}, "num_token_ids must be of type int"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "rope scaling": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "type 'dynamic' is not"),
    "rope factor": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        "rope_parameters: has no factor",
    ),
    "rope options": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}},
        "type 'yarn' with mscale is not supported",
    ),
    "rope number": ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor '4': a number"),
    "rotary share": ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be in"),
    "rope nonsense": ({"rope_parameters": "default"}, "rope_parameters must be an object"),
    "no rope base": ({"rope_theta": ...}, "has no rope_theta"),
    "no head width": ({"head_dim": ...}, "has no head_dim"),
    "text for a number": ({"hidden_size": "32"}, "hidden_size must be of type int, found '32'"),
    "truth for a number": ({"num_hidden_layers": True}, "num_hidden_layers must be of type int"),
    "number for a truth": ({"tie_word_embeddings": 1}, "tie_word_embeddings must be of type bool"),
    "groups": ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    "no block length": ({"block_size": ...}, "says no block length: pass --block-length"),
    "block lengths differ": ({"block_length": 4}, "block_size says 8, block_length says 4"),
    "no mask id": ({"mask_token_id": ...}, "has no mask_token_id: pass --mask-token-id"),
    "mask ends text": ({"mask_token_id": 298}, "298 is also an end-of-text id"),
    "mask outside": ({"mask_token_id": 320}, "mask token id 320 is outside the vocabulary of 320"),
    "end outside": ({"eos_token_id": 999}, "eos token id 999 is outside"),
    "end nonsense": ({"eos_token_id": "298"}, "eos_token_id '298' is not an integer or a list"),
    "pad outside": ({"pad_token_id": -1}, "pad token id -1 is outside"),
    "tokenizer larger": ({"vocab_size": 299, "mask_token_id": 1}, "ids up to 299, the vocab"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configurations(tmp_path, case):
    changes, expected = BAD_CONFIGS[case]
    fixtures.write_hf(tmp_path)
    config_json = {**fixtures.CONFIG_JSON, **changes}
    config_json = {name: value for name, value in config_json.items() if value is not ...}
    fixtures.write_json(tmp_path / "config.json", config_json)
    with pytest.raises(CheckpointError, match=expected) as error:
        convert.load_target(tmp_path)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(rope_type="linear", factor=2.0),
        RopeScaling(rope_type="linear", factor=2.0, original_max_position=512),
        RopeScaling(rope_type="llama3", factor=8.0, original_max_position=64, low_freq_factor=0.0),
        RopeScaling(rope_type="yarn", factor=4.0, original_max_position=64, attention_factor=1.5),
        RopeScaling(rope_type="yarn", factor=4.0, original_max_position=64),
    ],
)
def test_zeros_of_rope_scaling_are_written(tmp_path, scaling):
    fixtures.write_hf(tmp_path / "hf")
    model = convert.load_target(tmp_path / "hf")
    config = dataclasses.replace(model.config, rope_scaling=scaling)
    hf_write.save_hf(model.params, config, tmp_path / "out", tokenizer_from=tmp_path / "hf")
    assert convert.load_target(tmp_path / "out").config == config
    written = json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]
    assert written["attention_factor"] == (scaling.attention_factor or None), "0 means 0 to others"


def test_every_rotary_share_is_read_back(tmp_path):
    """Products that are no integer in floating point too; the share is read as others read it."""
    for head_dim in (6, 44, 46, 98):
        for rotary_dim in range(2, head_dim, 2):
            config = dataclasses.replace(
                hf_config.target_config(fixtures.CONFIG_JSON),
                head_dim=head_dim,
                rotary_dim=rotary_dim,
            )
            written = hf_rope.rope_json(config, 1.0)
            assert int(head_dim * written["partial_rotary_factor"]) == rotary_dim
            share = rotary_dim / head_dim  # What another writer would have written.
            for said in (written, written | {"partial_rotary_factor": share}):
                assert hf_rope.read_rope(said, head_dim, 1.0, [])["rotary_dim"] == rotary_dim


def test_all_problems_of_a_configuration_are_listed_at_once():
    changes = {"attention_bias": True, "head_dim": None, "block_size": None, "eos_token_id": None}
    with pytest.raises(CheckpointError) as error:
        hf_config.target_config(fixtures.CONFIG_JSON | changes)
    assert len(str(error.value).splitlines()) == 5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 500000},
    ],
)
def test_spellings_of_the_rotary_base(rope):
    config_json = {k: v for k, v in (fixtures.CONFIG_JSON | rope).items() if v is not ...}
    assert hf_config.target_config(config_json).rope_theta == 5e5


@pytest.mark.parametrize(
    ("directory", "block_length"),
    [
        ("SDAR-8B-Chat-b32", 32),
        ("x/SDAR-1.7B-Chat-b8/", 8),
        ("models--JetLM--SDAR-8B-Chat-b16/snapshots/0123abcd", 16),
    ],
)
def test_block_length_from_the_name(directory, block_length):
    unsaid = fixtures.CONFIG_JSON | {"block_size": None}
    config = hf_config.target_config(unsaid, directory=directory)
    assert config.block_length == block_length
    assert hf_config.target_config(unsaid, directory=directory, block_length=5).block_length == 5
    with pytest.raises(CheckpointError, match="block_size says 64, the name .* says"):
        hf_config.target_config(unsaid | {"block_size": 64}, directory=directory)


def test_ids_of_the_real_vocabulary_come_from_the_family():
    real = fixtures.CONFIG_JSON | {
        "vocab_size": 151936,
        "mask_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = hf_config.target_config(real)
    assert (config.mask_id, config.eos_ids, config.pad_id) == (151669, (151645, 151643), 151643)
    config = hf_config.target_config(
        real | {"eos_token_id": 151643}, generation_json={"eos_token_id": [151645, 151643]}
    )
    assert config.eos_ids == (151643, 151645)
    with pytest.raises(CheckpointError, match="pass --mask-token-id"):
        hf_config.target_config(real | {"vocab_size": 151937})


def test_ends_of_text_are_gathered_from_three_files(tmp_path):
    fixtures.write_hf(tmp_path, config={"eos_token_id": 1, "pad_token_id": ...})
    fixtures.write_json(tmp_path / "generation_config.json", {"eos_token_id": [2, 1]})
    config = hf_config.read_target_config(tmp_path)
    assert config.eos_ids == (1, 2, 298)
    assert config.pad_id == 296


def test_token_ids_without_a_tokenizer(tmp_path):
    fixtures.write_hf(tmp_path, tokenizer=False)
    assert hf_config.read_target_config(tmp_path).num_token_ids == 320
    fixtures.write_json(tmp_path / "vocab.json", {"a": 0, "b": 1})
    fixtures.write_json(tmp_path / "added_tokens.json", {"<MASK>": 299})
    added = {"300": {"content": "<|new|>"}}
    settings = {"added_tokens_decoder": added, "eos_token": {"content": "<|new|>"}}
    fixtures.write_json(tmp_path / "tokenizer_config.json", settings)
    ids = tokenizer_files.read_tokenizer_ids(tmp_path)
    assert ids == tokenizer_files.TokenizerIds(num_ids=301, eos_id=300, pad_id=None)


def test_tokenizers_that_cannot_be_read(tmp_path):
    fixtures.write_hf(tmp_path)
    fixtures.write_json(tmp_path / "tokenizer.json", {"model": {"vocab": 3}})
    with pytest.raises(CheckpointError, match="tokenizer files are not in a known form"):
        convert.load_target(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(CheckpointError, match="tokenizer.json is needed"):
        convert.load_target(tmp_path)


def test_reading_needs_neither_torch_nor_transformers(tmp_path):
    fixtures.write_hf(tmp_path / "hf", dtype="bfloat16")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from spot_jax import convert\n"
        "assert 'orbax.checkpoint' not in sys.modules\n"
        "convert.convert(sys.argv[1] + '/hf', sys.argv[1] + '/out')\n"
        "print(convert.load_target(sys.argv[1] + '/out', dtype=None).params['head'].dtype)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "bfloat16\n"), done.stderr


def test_weights_are_read_one_tensor_at_a_time(tmp_path):
    tensors = fixtures.write_hf(tmp_path)
    plan = hf_weights.plan_conversion(tmp_path)
    shape = target.param_shapes(plan.config)["layers_q"]
    seen = []
    leaf = hf_weights.read_leaf("layers_q", shape, plan.leaves["layers_q"], "float32", seen.append)
    assert seen == [64 * 32 * 4] * 2
    np.testing.assert_array_equal(leaf[1], tensors[Q1])
