"""Drafters on disk: `model.safetensors` and, beside it, `drafter.json`, which says what it is.

The description is written last and holds the digest of the weights, so a directory that was
damaged, or left by a killed run, does not load.
"""

import dataclasses
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from spot_jax import json_io, safetensors_io
from spot_jax.commit import Rule, TopN
from spot_jax.config import TargetConfig
from spot_jax.draft.sets import SpotSets
from spot_jax.draft.spot import Spot
from spot_jax.models.order import OrderConfig, OrderNetwork, order_features
from spot_jax.models.sets import Scalars, set_features
from spot_jax.rule_io import rule_from_json, rule_name
from spot_jax.state import Reading

FORMAT_VERSION = 1
DESCRIPTION = "drafter.json"
_HEADER = ("format_version", "kind", "order", "sha256")
# What the caller of `save_drafter` says: key -> type, and of the items where it is a list.
_Fields = dict[str, tuple[Any, Any]]
_REQUIRED: _Fields = {
    "block_lengths": (list, int),
    "temperatures": (list, (int, float)),
    "trained_on": (str, None),
    "num_blocks": (int, None),
}
_OPTIONAL: _Fields = {
    "accuracy": (dict, (int, float)),
    "tokenizer_sha256": (str, None),
    "notes": (str, None),
}


class _Kind(NamedTuple):
    """What differs between kinds of drafters.

    Attributes:
      required, optional: fields of the description beside those of every kind.
      accuracies: keys of `accuracy`.
      num_scores: of the network.
    """

    required: _Fields
    optional: _Fields
    accuracies: tuple[str, ...]
    num_scores: int


KINDS = {
    "spot": _Kind(
        {"rule": (str, None)}, {}, ("drafter", "left_to_right", "highest_stale_confidence"), 1
    ),
    "spot-sets": _Kind(
        {"rules": (list, dict)},
        {"calibration": (dict, (int, float))},
        ("drafter", "stale_confidence"),
        2,
    ),
}


class DrafterWarning(UserWarning):
    """A drafter used for what it was not trained for: exact all the same, perhaps slower."""


def save_drafter(
    directory: str | Path,
    params: Any,
    config: OrderConfig,
    metadata: dict[str, Any],
    kind: str = "spot",
    dtype: str = "float32",
) -> None:
    """Writes a drafter, replacing one that is there.

    Args:
      directory: created if absent.
      params: of the network, nested or flat with `/`, JAX or NumPy arrays.
      config: its shape.
      metadata: `block_lengths`, `temperatures`, `trained_on` (name of the target), `num_blocks`
        (trained on, 0 where it is not known); optionally `tokenizer_sha256`, `notes`.
        Of `spot` also `rule`, what ranks positions, and optionally `accuracy` of the next commit
        on held-out blocks (`drafter`, `left_to_right`, `highest_stale_confidence`).
        Of `spot-sets` also `rules`, a list as of `rule_io`, and optionally `accuracy` of the next
        set (`drafter`, `stale_confidence`) and `calibration`, the fields of `Scalars`.
      kind: `spot` or `spot-sets`.
      dtype: of the stored weights, `float32`, `bfloat16` or `float16`; they are computed with in
        float32 whatever it is.
    """
    directory = Path(directory)
    flat = {name: np.asarray(leaf) for name, leaf in _flatten(params).items()}
    found = {name: leaf.shape for name, leaf in flat.items()}
    problems = _shape_problems(found, param_shapes(config, kind))
    problems += _metadata_problems(metadata, kind)
    if problems:
        raise json_io.error_of(directory, problems)
    weights = directory / safetensors_io.SINGLE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / DESCRIPTION).unlink(missing_ok=True)
        safetensors_io.write_file(weights, found, flat.values(), dtype)
        header = {
            "format_version": FORMAT_VERSION,
            "kind": kind,
            "order": dataclasses.asdict(config),
            "sha256": _digest(weights),
        }
        building = directory / f".{DESCRIPTION}.{os.getpid()}.tmp"
        building.write_text(json.dumps(metadata | header, indent=2) + "\n", encoding="utf-8")
        os.replace(building, directory / DESCRIPTION)
    except OSError as error:
        raise json_io.CheckpointError(f"cannot write {directory}: {error}") from error


def load_drafter(
    directory: str | Path,
    target_config: TargetConfig | None = None,
    allow_mismatch: bool = False,
    rule: Rule | None = None,
) -> Spot | SpotSets:
    """Reads a drafter, checked whole, with float32 parameters.

    A drafter reads distributions only, so any target whose blocks are not too long will do:
    decoding stays exact. `DrafterWarning` is given where it has not seen the block length.

    Args:
      directory: made by `save_drafter`.
      target_config: of the target that it is to draft for; checked where given.
      allow_mismatch: leaves the warning out.
      rule: that it is to draft for; checked where given, see `check_rule`.
    """
    directory = Path(directory)
    metadata = read_metadata(directory)
    if rule is not None:
        check_rule(directory, metadata, rule)
    weights = directory / safetensors_io.SINGLE
    if not weights.is_file():
        raise json_io.CheckpointError(f"{weights} is missing")
    if _digest(weights) != metadata["sha256"]:
        raise json_io.CheckpointError(
            f"{weights} is damaged: its content does not match sha256 in {DESCRIPTION}"
        )
    config = _order_config(directory, metadata)
    entries = safetensors_io.read_header(weights)
    kind = metadata["kind"]
    expected = param_shapes(config, kind)
    problems = _shape_problems({n: e.shape for n, e in entries.items()}, expected)
    problems += [
        f"tensor {name}: dtype {entry.dtype} is not F32, BF16 or F16"
        for name, entry in entries.items()
        if entry.dtype not in ("F32", "BF16", "F16")
    ]
    if problems:
        raise json_io.error_of(weights, problems)
    if target_config is not None:
        _check_target(directory, metadata, config, target_config, allow_mismatch)
    flat = {
        name: jnp.asarray(safetensors_io.read_tensor(entry).astype(np.float32))
        for name, entry in entries.items()
    }
    params = traverse_util.unflatten_dict(flat, sep="/")
    if kind == "spot":
        return Spot(params, config)
    return SpotSets(params, config, Scalars(**metadata.get("calibration", {})))


def check_rule(directory: str | Path, metadata: dict[str, Any], rule: Rule) -> None:
    """Raises CheckpointError where a drafter was not made for a kind of rule.

    Of thresholds, and of numbers of commits a step, any will do.
    """
    if metadata["kind"] == "spot":
        fits, made_for = rule.single, "one commit a step"
    else:
        rules = [rule_from_json(value) for value in metadata["rules"]]
        fits = type(rule.inner) in map(type, rules)
        made_for = ", ".join(map(rule_name, rules))
    if not fits:
        raise json_io.CheckpointError(
            f"{directory} is a {metadata['kind']} drafter for {made_for}: it cannot draft for the "
            f"rule {rule_name(rule.inner)}"
        )


def read_metadata(directory: str | Path) -> dict[str, Any]:
    """The description of a drafter, its keys and their types checked."""
    path = Path(directory) / DESCRIPTION
    if not Path(directory).is_dir():
        raise json_io.CheckpointError(f"{directory} is not a directory")
    metadata = json_io.read_json(path)
    if metadata.get("format_version") != FORMAT_VERSION:
        raise json_io.CheckpointError(
            f"{path}: format_version {metadata.get('format_version')!r} is not the supported "
            f"version {FORMAT_VERSION}"
        )
    problems = [f"has no {name}" for name in _HEADER if name not in metadata]
    kind = metadata.get("kind", "spot")
    if not isinstance(kind, str) or kind not in KINDS:
        problems.append(f"kind {kind!r} is none of {', '.join(KINDS)}")
    else:
        problems += _metadata_problems(description(metadata), kind)
    if problems:
        raise json_io.error_of(path, problems)
    return metadata


def description(metadata: dict[str, Any]) -> dict[str, Any]:
    """What of `read_metadata` the caller of `save_drafter` had said."""
    return {name: value for name, value in metadata.items() if name not in _HEADER}


def read_order(directory: str | Path) -> OrderConfig:
    """The shape of a drafter's network, read without its weights."""
    return _order_config(Path(directory), read_metadata(directory))


def param_shapes(config: OrderConfig, kind: str = "spot") -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a drafter's network, names joined by `/`."""

    def initialise():
        length, top = 2, config.num_top
        masked = jnp.ones((1, length), bool)
        value, tops = jnp.zeros((1, length)), jnp.zeros((1, length, top))
        draws = jnp.zeros((1, length, config.num_alternatives))
        ids = jnp.zeros((1, length), jnp.int32)
        reading = Reading(ids, value, tops, tops.astype(jnp.int32), value, value)
        seen = reading, draws, draws, draws.astype(jnp.int32), masked, masked, masked
        features = order_features(*seen) if kind == "spot" else set_features(*seen, TopN())
        network = OrderNetwork(config, KINDS[kind].num_scores)
        return network.init(jax.random.key(0), features)["params"]

    shapes = jax.eval_shape(initialise)
    return {name: leaf.shape for name, leaf in _flatten(shapes).items()}


def _check_target(directory, metadata, config: OrderConfig, target: TargetConfig, allow: bool):
    length = target.block_length
    if length > config.max_block:
        raise json_io.CheckpointError(
            f"{directory}: reads blocks of up to {config.max_block} positions, the target's have "
            f"{length}"
        )
    if target.num_token_ids < config.num_top:
        raise json_io.CheckpointError(
            f"{directory}: reads the {config.num_top} most probable tokens, the target has "
            f"{target.num_token_ids}"
        )
    if length not in metadata["block_lengths"] and not allow:
        known = ", ".join(map(str, metadata["block_lengths"]))
        warnings.warn(
            f"drafter {directory} was trained on blocks of {known} positions, the target's have "
            f"{length}: decoding stays exact, it may be slower",
            DrafterWarning,
            stacklevel=3,
        )


def _order_config(directory: Path, metadata: dict[str, Any]) -> OrderConfig:
    """The shape; fields that came later than the drafter have their defaults."""
    order = metadata["order"]
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(OrderConfig)}
    if not isinstance(order, dict):
        problems = [f"order must be an object, found {order!r}"]
    else:
        problems = [f"order has the unknown key {name}" for name in order.keys() - kinds.keys()]
        problems += [
            "order: " + json_io.misfit(name, value, kinds[name])
            for name, value in order.items()
            if name in kinds and not json_io.is_a(value, kinds[name])
        ]
    if not problems:
        try:
            return OrderConfig(**order)
        except ValueError as error:
            problems.append(f"order: {error}")
    raise json_io.error_of(directory / DESCRIPTION, problems)


def _metadata_problems(metadata: dict[str, Any], kind: str) -> list[str]:
    more = KINDS[kind]
    required = _REQUIRED | more.required
    known = required | _OPTIONAL | more.optional
    problems = [f"has no {name}" for name in required if name not in metadata]
    problems += [f"unknown key {name}" for name in metadata if name not in known]
    for name in known.keys() & metadata.keys():
        value, (outer, items) = metadata[name], known[name]
        inner = list(value.values()) if isinstance(value, dict) else value
        if type(value) is not outer or (
            items and not (inner and all(isinstance(item, items) for item in inner))
        ):
            problems.append(f"{name} has the unexpected value {value!r}")
        elif name in ("accuracy", "calibration"):
            keys = more.accuracies if name == "accuracy" else Scalars._fields
            if sorted(value) != sorted(keys):
                problems.append(f"{name} must have the keys {', '.join(keys)}")
        elif name == "rules":
            problems += _rule_problems(value)
    return problems


def _rule_problems(rules: Any) -> list[str]:
    try:
        for rule in rules:
            rule_from_json(rule)
    except ValueError as error:
        return [f"rules: {error}"]
    return []


def _shape_problems(found: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> list[str]:
    problems = [f"tensor {name} is missing" for name in expected if name not in found]
    problems += [f"unknown tensor {name}" for name in found if name not in expected]
    return problems + [
        f"tensor {name}: shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]


def _flatten(tree: Any) -> dict[str, Any]:
    return dict(sorted(traverse_util.flatten_dict(tree, sep="/").items()))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
