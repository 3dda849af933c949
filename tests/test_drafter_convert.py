"""PyTorch files: read without torch, refused where they are more than data, and converted."""

import collections
import io
import json
import os
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax import cli, drafter_convert, drafter_io, torch_io
from spot_jax.checkpoint import CheckpointError
from spot_jax.models.order import OrderConfig, OrderNetwork

CONFIG = OrderConfig(max_block=16, norm_eps=1e-5)
FEATURES = drafter_io.param_shapes(CONFIG)["input_0/kernel"][0]
METADATA = {
    "block_lengths": [16],
    "rule": "confidence",
    "temperatures": [0.0],
    "trained_on": "SDAR-8B-Chat-b16",
    "num_blocks": 0,
}


def torch_shapes(features=FEATURES):
    """What the PyTorch network has, by hand."""
    width, inner = 128, 512
    shapes = {
        "input_proj.0.weight": (width, features), "input_proj.0.bias": (width,),
        "input_proj.2.weight": (width, width), "input_proj.2.bias": (width,),
        "pos_embed.weight": (16, width), "encoder.norm.weight": (width,),
        "encoder.norm.bias": (width,), "head.weight": (3, width), "head.bias": (3,),
    }  # fmt: skip
    for layer in range(3):
        shapes |= {
            f"encoder.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.in_proj_weight": (3 * width, width),
                "self_attn.in_proj_bias": (3 * width,),
                "self_attn.out_proj.weight": (width, width),
                "self_attn.out_proj.bias": (width,),
                "linear1.weight": (inner, width), "linear1.bias": (inner,),
                "linear2.weight": (width, inner), "linear2.bias": (width,),
                "norm1.weight": (width,), "norm1.bias": (width,),
                "norm2.weight": (width,), "norm2.bias": (width,),
            }.items()
        }  # fmt: skip
    return shapes


def random_tensors(**options):
    random = np.random.default_rng(0)
    return {
        name: (0.2 * random.normal(size=shape)).astype(np.float32)
        for name, shape in torch_shapes(**options).items()
    }


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


class Name:
    """Pickles as a global of a module that is not there."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class HandMade(pickle._Pickler):
    """Writes what `torch.save` writes, without torch."""

    def save(self, obj, *rest):
        if isinstance(obj, Name):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Storage):
            self.save(("storage", Name("torch", obj.kind), obj.key, "cpu", obj.size))
            self.write(pickle.BINPERSID)
        elif isinstance(obj, Tensor):
            self.save(Name("torch._utils", "_rebuild_tensor_v2"))
            hooks = collections.OrderedDict()
            self.save((obj.storage, obj.offset, obj.shape, obj.strides, False, hooks))
            self.write(pickle.REDUCE)
        else:
            super().save(obj, *rest)


Storage = collections.namedtuple("Storage", "kind key size")
Tensor = collections.namedtuple("Tensor", "storage offset shape strides")


def write_zip(path, content, data, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    HandMade(buffer, protocol=2).dump(content)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        for key, value in data.items():
            archive.writestr(f"archive/data/{key}", value)


def write_pt(path, tensors):
    """A `.pt` file by hand."""
    content, data = {}, {}
    for index, (name, value) in enumerate(tensors.items()):
        strides = tuple(s // value.itemsize for s in value.strides)
        kind = {"float32": "FloatStorage", "float16": "HalfStorage"}[value.dtype.name]
        content[name] = Tensor(Storage(kind, str(index), value.size), 0, value.shape, strides)
        data[str(index)] = value.tobytes()
    write_zip(path, content, data)


def test_reads_what_is_written_by_hand(tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_pt(tmp_path / "a.pt", {"a": values, "b": values.astype(np.float16)})
    found = torch_io.read_state_dict(tmp_path / "a.pt")
    for name in ("a", "b"):
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype == np.float32
    # A view: transposed, from an offset.
    view = Tensor(Storage("FloatStorage", "0", 12), 1, (2, 3), (1, 4))
    write_zip(tmp_path / "b.pt", {"state_dict": {"v": view}}, {"0": values.tobytes()})
    found = torch_io.read_state_dict(tmp_path / "b.pt")
    np.testing.assert_array_equal(found["v"], values.reshape(-1)[[[1, 5, 9], [2, 6, 10]]])


@pytest.mark.slow
def test_reads_what_torch_writes(tmp_path):
    torch = pytest.importorskip("torch")
    value = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "plain": value,
        "turned": value.T,
        "part": value[1:, 2:],
        "bfloat16": value.to(torch.bfloat16),
        "parameter": torch.nn.Parameter(value),
        "integers": value.to(torch.int64),
    }
    torch.save(collections.OrderedDict(tensors), tmp_path / "t.pt")
    found = torch_io.read_state_dict(tmp_path / "t.pt")
    for name, expected in tensors.items():
        np.testing.assert_array_equal(found[name], expected.detach().float().numpy())
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="not a zip archive, or cut short"):
        torch_io.read_state_dict(tmp_path / "old.pt")


def tensor(size=4, offset=0, shape=(4,), strides=(1,), kind="FloatStorage", key="0"):
    return Tensor(Storage(kind, key, size), offset, shape, strides)


DATA = {"0": b"\0" * 16}
BAD = {
    "holds posix.system": ({"a": Call(os.system, "touch {}")}, DATA),
    "holds .*builtin.*.eval": ({"a": Call(eval, "open('{}', 'w')")}, DATA),
    "holds numpy": ({"a": np.zeros(3)}, DATA),
    "holds torch.load": ({"a": Name("torch", "load")}, DATA),
    "reaches outside its storage": ({"a": tensor(offset=1)}, DATA),
    "tensor a reaches outside": ({"a": tensor(strides=(2,))}, DATA),
    "data/0 is missing": ({"a": tensor()}, {}),
    "has 16 bytes, its storage 5 items of 4": ({"a": tensor(size=5)}, DATA),
    "repeats its storage": ({"a": tensor(shape=(9,), strides=(0,))}, DATA),
    "not a readable state dict": ({"a": tensor(shape=(-4,))}, DATA),
    "unknown storage": ({"a": tensor(size=2**50)}, DATA),
    "tensor of shape": ({"a": tensor(strides=(1, 1))}, DATA),
    "a, b: not tensors": ({"a": 3, "b": [1]}, DATA),
    "holds no state dict": ([1, 2], DATA),
}


@pytest.mark.parametrize("message", BAD)
def test_files_that_are_more_than_data(tmp_path, message):
    content, data = BAD[message]
    trap = tmp_path / "trap"
    if isinstance(content, dict) and isinstance(content.get("a"), Call):
        function, arguments = content["a"].made
        content = {"a": Call(function, arguments[0].format(trap))}
    write_zip(tmp_path / "x.pt", content, data)
    with pytest.raises(CheckpointError, match=message):
        torch_io.read_state_dict(tmp_path / "x.pt")
    assert not trap.exists(), "the file was executed"


def test_files_that_are_damaged(tmp_path):
    write_pt(tmp_path / "a.pt", {"a": np.zeros(400, np.float32)})
    whole = (tmp_path / "a.pt").read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="cut.pt"):
            torch_io.read_state_dict(tmp_path / "cut.pt")
    flipped = bytearray(whole)
    flipped[whole.index(b"\0" * 800) + 100] ^= 1
    (tmp_path / "flipped.pt").write_bytes(flipped)
    with pytest.raises(CheckpointError, match="CRC"):
        torch_io.read_state_dict(tmp_path / "flipped.pt")
    write_zip(tmp_path / "z.pt", {"a": tensor()}, DATA, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="is compressed"):
        torch_io.read_state_dict(tmp_path / "z.pt")
    with pytest.raises(CheckpointError, match="absent.pt is missing"):
        torch_io.read_state_dict(tmp_path / "absent.pt")


def test_converts_and_loads(tmp_path):
    tensors = random_tensors()
    write_pt(tmp_path / "d.pt", {f"module.{name}": value for name, value in tensors.items()})
    config = drafter_convert.convert_drafter(tmp_path / "d.pt", tmp_path / "out", METADATA)
    assert config == CONFIG
    params = drafter_io.load_drafter(tmp_path / "out").params
    np.testing.assert_array_equal(params["score"]["kernel"], tensors["head.weight"].T)
    projection = tensors["encoder.layers.1.self_attn.in_proj_weight"]
    key = np.asarray(params["mixer_1"]["key"]["kernel"]).reshape(128, 128)
    np.testing.assert_array_equal(key, projection[128:256].T)
    # The same under other names, by a mapping.
    odd = {name.replace("head", "scorer"): value for name, value in tensors.items()}
    write_pt(tmp_path / "odd.pt", odd)
    with pytest.raises(
        CheckpointError, match=r"(?s)head.bias is missing.*scorer.bias has no place"
    ):
        drafter_convert.convert_drafter(tmp_path / "odd.pt", tmp_path / "none", METADATA)
    assert not (tmp_path / "none").exists()
    mapping = {"scorer.weight": "head.weight", "scorer.bias": "head.bias"}
    drafter_convert.convert_drafter(tmp_path / "odd.pt", tmp_path / "mapped", METADATA, mapping)
    weights = [(tmp_path / d / "model.safetensors").read_bytes() for d in ("out", "mapped")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_scores_equal_those_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    # Small enough that what norms add to variances, PyTorch's own default, is seen.
    small = ("input_proj.2.weight", "input_proj.2.bias", "pos_embed.weight")
    tensors = {k: v * (0.01 if k in small else 1) for k, v in random_tensors().items()}
    write_pt(tmp_path / "d.pt", tensors)
    drafter_convert.convert_drafter(tmp_path / "d.pt", tmp_path / "out", METADATA)
    drafter = drafter_io.load_drafter(tmp_path / "out")
    params = drafter.params
    gelu = torch.nn.GELU(approximate="tanh")
    layer = torch.nn.TransformerEncoderLayer(
        128, 8, 512, dropout=0.0, activation=gelu, batch_first=True, norm_first=True,
    )  # fmt: skip
    norm = torch.nn.LayerNorm(128)
    encoder = torch.nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False)
    by_name = {name: torch.tensor(value) for name, value in tensors.items()}
    inner = {k.removeprefix("encoder."): v for k, v in by_name.items() if k.startswith("encoder.")}
    encoder.load_state_dict(inner)
    features = np.random.default_rng(3).normal(size=(2, 16, FEATURES)).astype(np.float32)

    def linear(x, name):
        return torch.nn.functional.linear(x, by_name[f"{name}.weight"], by_name[f"{name}.bias"])

    with torch.no_grad():
        x = linear(gelu(linear(torch.tensor(features), "input_proj.0")), "input_proj.2")
        expected = linear(encoder(x + by_name["pos_embed.weight"]), "head").numpy()
    ours = jax.jit(OrderNetwork(drafter.config).apply)({"params": params}, jnp.asarray(features))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-4)


def test_other_features_cannot_draft(tmp_path):
    write_pt(tmp_path / "d.pt", random_tensors(features=70))
    with pytest.raises(
        CheckpointError, match=f"reads 70 features a position where ours reads {FEATURES}"
    ):
        drafter_convert.convert_drafter(tmp_path / "d.pt", tmp_path / "out", METADATA)
    assert not (tmp_path / "out").exists()


def test_nothing_but_a_drafter_is_replaced(tmp_path):
    write_pt(tmp_path / "d.pt", random_tensors())
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights of a target")
    (tmp_path / "file").write_text("notes")
    for out, message in ((model, "is not a drafter"), (tmp_path / "file", "is not a directory")):
        with pytest.raises(CheckpointError, match=message):
            drafter_convert.convert_drafter(tmp_path / "d.pt", out, METADATA)
    assert (model / "model.safetensors").read_bytes() == b"weights of a target"
    for _ in range(2):  # A drafter is replaced.
        drafter_convert.convert_drafter(tmp_path / "d.pt", tmp_path / "out", METADATA)


MISFITS = {
    r"head.weight \[\]: is a single number": {"head.weight": np.float32(1).reshape(())},
    r"head.bias \[3\]: holds numbers that are not finite": {
        "head.bias": np.full(3, np.nan, np.float32)
    },
    r"pos_embed.weight \[2, 8, 128\]: expected": {
        "pos_embed": np.zeros((2, 8, 128), np.float32), "pos_embed.weight": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("message", MISFITS)
def test_tensors_that_do_not_fit_are_named(tmp_path, message):
    tensors = random_tensors() | MISFITS[message]
    write_pt(tmp_path / "d.pt", {name: v for name, v in tensors.items() if v is not None})
    with pytest.raises(CheckpointError, match=message):
        drafter_convert.convert_drafter(tmp_path / "d.pt", tmp_path / "out", METADATA)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [-3, 17])
def test_block_lengths_that_it_cannot_have_seen(tmp_path, length):
    write_pt(tmp_path / "d.pt", random_tensors())
    with pytest.raises(CheckpointError, match=f"has 16 positions, .* on blocks of {length}"):
        drafter_convert.convert_drafter(
            tmp_path / "d.pt", tmp_path / "out", METADATA | {"block_lengths": [length]}
        )
    assert not (tmp_path / "out").exists()


RAW = {
    # A table of 2**27 entries from twenty bytes.
    "memo 134217728": b"\x80\x02}r\x00\x00\x00\x08.",
    # The registry of extensions goes around `find_class`.
    "opcode EXT1": b"\x80\x02\x82\x01.",
    "opcode INST": b"\x80\x02(ios\nsystem\n.",
    # An attribute of the reader's own function.
    "holds no state dict": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x04\x00\x00\x00evilK\x01sb."
    ),
}


@pytest.mark.parametrize("message", RAW)
def test_pickles_that_no_state_dict_needs(tmp_path, message):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("archive/data.pkl", RAW[message])
    with pytest.raises(CheckpointError, match=message):
        torch_io.read_state_dict(tmp_path / "x.pt")
    assert not hasattr(torch_io._tensor, "evil")


def test_no_member_grows_when_it_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/byteorder", b"little" + b" " * 10_000)
    with pytest.raises(CheckpointError, match="little-endian"):
        torch_io.read_state_dict(tmp_path / "x.pt")


def test_the_command(tmp_path, capsys):
    write_pt(tmp_path / "d.pt", random_tensors())
    command = ["convert", "drafter", str(tmp_path / "d.pt"), str(tmp_path / "out")]
    rest = ["--trained-on", "SDAR-8B-Chat-b16", "--block-length", "16"]
    assert cli.main([*command, *rest]) == 0
    assert json.loads(capsys.readouterr().out)["trained_on"] == "SDAR-8B-Chat-b16"
    assert drafter_io.read_metadata(tmp_path / "out")["block_lengths"] == [16]
    (tmp_path / "m.json").write_text('{"nothing": "head.weight", "head.bias": "x"}')
    assert cli.main([*command, *rest, "--mapping", str(tmp_path / "m.json")]) == 2
    error = capsys.readouterr().err
    assert "the mapping names nothing, which is not in the file" in error
    assert "the mapping leads to x, which is none of" in error
    assert cli.main(command) == 2
    assert "--trained-on" in capsys.readouterr().err
