"""Drafters on disk, and the bundled pair: what arrives, and what is refused."""

import dataclasses
import json
import math
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from spot_jax import bundled, drafter_io
from spot_jax.checkpoint import CheckpointError
from spot_jax.commit import Threshold, TopN
from spot_jax.config import TargetConfig
from spot_jax.draft import SpotSets
from spot_jax.models.order import OrderConfig, OrderNetwork
from spot_jax.models.sets import Scalars
from spot_jax.rules import Factor, HandOver, SubBlocks
from tests import fixtures, pair

TARGET = TargetConfig(
    vocab_size=320, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=48, block_length=8, mask_id=299, eos_ids=(298,), pad_id=296,
    num_token_ids=300,
)  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    drafter_io.save_drafter(tmp_path, pair.random_params(), pair.ORDER, pair.METADATA)
    return tmp_path


def edit(directory, **changes):
    path = directory / "drafter.json"
    metadata = json.loads(path.read_text()) | changes
    fixtures.write_json(path, {k: v for k, v in metadata.items() if v is not ...})


def replace_weights(directory, change):
    """Rewrites the weights by `change(tensors)`, their digest too."""
    path = directory / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(path))
    change(tensors)
    safetensors.numpy.save_file(tensors, path)
    edit(directory, sha256=drafter_io._digest(path))


def test_every_parameter_arrives(saved):
    params = pair.random_params()
    spot = drafter_io.load_drafter(saved, TARGET)
    assert spot.config == pair.ORDER
    found = drafter_io._flatten(spot.params)
    assert found.keys() == params.keys()
    for name, leaf in found.items():
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, params[name].astype(np.float32))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_read_as_float32(tmp_path, dtype):
    params, name = pair.random_params(), np.dtype(dtype).name
    drafter_io.save_drafter(tmp_path, params, pair.ORDER, pair.METADATA, dtype=name)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert {leaf.dtype for leaf in stored.values()} == {np.dtype(dtype)}
    leaf = drafter_io.load_drafter(tmp_path).params["score"]["kernel"]
    assert leaf.dtype == jnp.float32
    expected = params["score/kernel"].astype(dtype)
    np.testing.assert_array_equal(leaf, expected.astype(np.float32))


def test_drafters_older_than_a_field_of_the_shape_have_its_default(saved):
    path = saved / "drafter.json"
    metadata = json.loads(path.read_text())
    assert metadata["order"].pop("norm_eps") == 1e-6
    path.write_text(json.dumps(metadata))
    assert drafter_io.load_drafter(saved).config == pair.ORDER
    config = dataclasses.replace(pair.ORDER, norm_eps=1e-3)
    drafter_io.save_drafter(saved, pair.random_params(), config, pair.METADATA)
    assert drafter_io.load_drafter(saved).config == config


def test_shapes_are_those_of_the_network():
    spot = drafter_io.Spot(drafter_io.param_shapes(pair.ORDER), pair.ORDER)
    features = jnp.zeros((1, 8, spot.params["input_0/kernel"][0]))
    init = OrderNetwork(pair.ORDER).init(jax.random.key(0), features)["params"]
    assert {n: leaf.shape for n, leaf in drafter_io._flatten(init).items()} == spot.params
    published = drafter_io.param_shapes(OrderConfig())
    assert 600_000 < sum(int(np.prod(shape)) for shape in published.values()) < 640_000


def test_nested_parameters_are_saved_too(tmp_path, saved):
    nested = drafter_io.load_drafter(saved).params
    drafter_io.save_drafter(tmp_path / "again", nested, pair.ORDER, pair.METADATA)
    first, second = (d / "model.safetensors" for d in (saved, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()


BAD_DESCRIPTIONS = {
    "no rule": {"rule": ...},
    "no sha256": {"sha256": ...},
    "unknown key colour": {"colour": "red"},
    "num_blocks has the unexpected value '3'": {"num_blocks": "3"},
    "num_blocks has the unexpected value True": {"num_blocks": True},
    "block_lengths has the unexpected value": {"block_lengths": []},
    "accuracy must have the keys drafter": {"accuracy": {"spot": 0.5}},
    "format_version 2 is not": {"format_version": 2},
    "kind 'ranks' is none of spot, spot-sets": {"kind": "ranks"},
    "order must be an object, found 8": {"order": 8},
    "order has the unknown key depth": {"order": {"depth": 8}},
    "order: width must be positive, got 0": {
        "order": dataclasses.asdict(pair.ORDER) | {"width": 0}
    },
    "order: width must be of type int, found 16.0": {"order": {"width": 16.0}},
    "order: norm_eps must be a finite number, found nan": {"order": {"norm_eps": math.nan}},
    "order: width 16 is not a multiple": {
        "order": dataclasses.asdict(pair.ORDER) | {"num_heads": 3}
    },
    "damaged": {"sha256": "0" * 64},
}


@pytest.mark.parametrize("message", BAD_DESCRIPTIONS)
def test_bad_descriptions(saved, message):
    edit(saved, **BAD_DESCRIPTIONS[message])
    with pytest.raises(CheckpointError, match=message) as caught:
        drafter_io.load_drafter(saved)
    assert str(saved) in str(caught.value) and "\n" not in str(caught.value)


BAD_WEIGHTS = {
    "tensor score/bias is missing": lambda t: t.pop("score/bias"),
    "unknown tensor extra": lambda t: t.update(extra=np.zeros(3, np.float32)),
    r"tensor score/bias: shape \[3\], expected \[2\]": lambda t: t.update(
        {"score/bias": np.zeros(3, np.float32)}
    ),
    "tensor score/bias: dtype F64 is not F32": lambda t: t.update(
        {"score/bias": np.zeros(2, np.float64)}
    ),
}


@pytest.mark.parametrize("message", BAD_WEIGHTS)
def test_bad_weights(saved, message):
    replace_weights(saved, BAD_WEIGHTS[message])
    with pytest.raises(CheckpointError, match=message):
        drafter_io.load_drafter(saved)


def test_damaged_files(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="safetensors is damaged"):
        drafter_io.load_drafter(saved)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="safetensors is damaged"):
        drafter_io.load_drafter(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match="safetensors is missing"):
        drafter_io.load_drafter(saved)
    (saved / "drafter.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"drafter\.json is not readable JSON"):
        drafter_io.load_drafter(saved)
    with pytest.raises(CheckpointError, match="is not a directory"):
        drafter_io.load_drafter(saved / "absent")


def test_nothing_wrong_is_saved(tmp_path):
    params = pair.random_params() | {"score/bias": np.zeros(7)}
    with pytest.raises(CheckpointError, match="score/bias: shape"):
        drafter_io.save_drafter(tmp_path / "out", params, pair.ORDER, pair.METADATA)
    with pytest.raises(CheckpointError, match="has no rule"):
        metadata = {name: value for name, value in pair.METADATA.items() if name != "rule"}
        drafter_io.save_drafter(tmp_path / "out", pair.random_params(), pair.ORDER, metadata)
    assert not (tmp_path / "out").exists()


SETS = {
    name: value for name, value in pair.METADATA.items() if name not in ("rule", "accuracy")
} | {
    "rules": [{"threshold": 0.9, "strict": True, "n": 1}, {"threshold": 0.8, "n": 1}],
    "accuracy": {"drafter": 0.5, "stale_confidence": 0.3},
    "calibration": {"scale": 0.5, "bias": -1.0, "depth": 0.25, "order": 2.0},
}


@pytest.fixture
def saved_sets(tmp_path):
    params = pair.random_params(kind="spot-sets")
    drafter_io.save_drafter(tmp_path, params, pair.ORDER, SETS, kind="spot-sets")
    return tmp_path


def test_a_set_drafter_arrives_with_its_calibration(saved_sets):
    found = drafter_io.load_drafter(saved_sets, TARGET)
    assert isinstance(found, SpotSets) and found.config == pair.ORDER
    assert found.scalars == Scalars(0.5, -1.0, 0.25, 2.0)
    for name, leaf in drafter_io._flatten(found.params).items():
        expected = pair.random_params(kind="spot-sets")[name].astype(np.float32)
        np.testing.assert_array_equal(leaf, expected)
    assert drafter_io.description(drafter_io.read_metadata(saved_sets)) == SETS
    edit(saved_sets, calibration=...)
    assert drafter_io.load_drafter(saved_sets).scalars == Scalars()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": ...}, "has no rules"),
        ({"rules": [{"n": 1, "threshold": "high"}]}, "rules: rule has the unexpected threshold"),
        ({"rules": [{"threshold": 0.9}]}, "rules: rule must be an object with n"),
        ({"rules": [{"n": 0}]}, "rules: n must be at least 1"),
        ({"rules": ["n:2"]}, "rules has the unexpected value"),
        ({"rule": "confidence"}, "unknown key rule"),
        ({"calibration": {"scale": 1.0}}, "calibration must have the keys scale, bias, depth"),
        ({"accuracy": {"drafter": 0.5}}, "accuracy must have the keys drafter, stale_confidence"),
        ({"kind": "spot", "rules": ..., "rule": "confidence", "calibration": ...}, "accuracy must"),
    ],
)
def test_bad_descriptions_of_sets(saved_sets, changes, message):
    edit(saved_sets, **changes)
    with pytest.raises(CheckpointError, match=message):
        drafter_io.load_drafter(saved_sets)


def test_a_kind_does_not_pass_for_another(saved_sets):
    edit(saved_sets, kind="spot", rules=..., rule="confidence", calibration=..., accuracy=...)
    with pytest.raises(CheckpointError, match=r"tensor score/bias: shape \[4\], expected \[2\]"):
        drafter_io.load_drafter(saved_sets)


def test_drafters_are_for_a_kind_of_rule(tmp_path, saved):
    sets = tmp_path / "sets"
    params = pair.random_params(kind="spot-sets")
    drafter_io.save_drafter(sets, params, pair.ORDER, SETS, kind="spot-sets")
    for directory, rule in (
        (saved, TopN(score="entropy")),
        (saved, SubBlocks(TopN((1,) * 8), 4)),
        (sets, Threshold(0.7)),
        (sets, HandOver(SubBlocks(Threshold(0.9, n=2), 4))),
    ):
        drafter_io.load_drafter(directory, rule=rule)
    for directory, rule, message in (
        (saved, Threshold(0.9), "a spot drafter for one commit a step: .* rule threshold:0.9"),
        (saved, TopN(2), "a spot drafter for one commit a step: .* rule n:2"),
        (saved, Factor(1.0), "spot drafter .* rule Factor"),
        (sets, TopN(2), "a spot-sets drafter for threshold:0.9, threshold:0.8: .* rule n:2"),
        (sets, SubBlocks(TopN(), 4), "spot-sets drafter .* rule confidence"),
    ):
        with pytest.raises(CheckpointError, match=message):
            drafter_io.load_drafter(directory, rule=rule)


def test_a_drafter_meets_other_targets(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter_io.load_drafter(saved, TARGET)
        other = dataclasses.replace(TARGET, block_length=16)
        drafter_io.load_drafter(saved, other, allow_mismatch=True)
    with pytest.warns(drafter_io.DrafterWarning, match="trained on blocks of 8 positions"):
        drafter_io.load_drafter(saved, other)
    with pytest.raises(CheckpointError, match="blocks of up to 16 positions, the target's have 32"):
        drafter_io.load_drafter(saved, dataclasses.replace(TARGET, block_length=32))
    with pytest.raises(CheckpointError, match="reads the 8 most probable tokens, the target has 7"):
        drafter_io.load_drafter(saved, dataclasses.replace(TARGET, num_token_ids=7))


def test_the_bundled_pair_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "ZOO", tmp_path)
    with pytest.raises(CheckpointError, match="lacks the bundled .*home"):
        bundled.bundled_target()
    assert len(bundled.problems()) == 3
    pair.write_pair(tmp_path)
    assert bundled.problems() == [f"{tmp_path}/SHA256SUMS is missing"]
    bundled.write_digests()
    assert bundled.problems() == []
    (tmp_path / "home" / "config.json").write_text("{}")
    (tmp_path / "home-spot" / "drafter.json").unlink()
    (tmp_path / "home-spot" / "new").touch()
    assert bundled.problems() == [
        f"{tmp_path}/home-spot/drafter.json is missing",
        f"{tmp_path}/home-spot/new is unexpected",
        f"{tmp_path}/home/config.json is damaged",
    ]
    assert bundled.bundled_drafter() == tmp_path / "home-spot"
