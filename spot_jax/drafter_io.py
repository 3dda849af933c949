"""SPOT drafters on disk: `model.safetensors` and, beside it, `drafter.json`, which says what it is.

The description is written last and holds the digest of the weights, so a directory that was
damaged, or left by a killed run, does not load.
"""

import dataclasses
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from spot_jax import checkpoint, json_io, safetensors_io
from spot_jax.config import TargetConfig
from spot_jax.draft.spot import Spot
from spot_jax.models.order import OrderConfig, OrderNetwork, order_features
from spot_jax.state import Reading

FORMAT_VERSION = 1
DESCRIPTION = "drafter.json"
_HEADER = ("format_version", "kind", "order", "sha256")
# What the caller of `save_drafter` says: key -> type, and of the items where it is a list.
_REQUIRED: dict[str, tuple[Any, Any]] = {
    "block_lengths": (list, int),
    "rule": (str, None),
    "temperatures": (list, (int, float)),
    "trained_on": (str, None),
    "num_blocks": (int, None),
}
_OPTIONAL: dict[str, tuple[Any, Any]] = {
    "accuracy": (dict, (int, float)),
    "tokenizer_sha256": (str, None),
    "notes": (str, None),
}
_ACCURACIES = ("drafter", "left_to_right", "highest_stale_confidence")


class DrafterWarning(UserWarning):
    """A drafter used for what it was not trained for: exact all the same, perhaps slower."""


def save_drafter(
    directory: str | Path, params: Any, config: OrderConfig, metadata: dict[str, Any]
) -> None:
    """Writes a drafter, replacing one that is there.

    Args:
      directory: created if absent.
      params: of the order network, nested or flat with `/`, JAX or NumPy arrays.
      config: its shape.
      metadata: `block_lengths`, `rule`, `temperatures`, `trained_on` (name of the target),
        `num_blocks` (trained on, 0 where it is not known); optionally `accuracy` of the next commit
        on held-out blocks (`drafter`, `left_to_right`, `highest_stale_confidence`),
        `tokenizer_sha256`, `notes`.
    """
    directory = Path(directory)
    flat = {name: np.asarray(leaf) for name, leaf in _flatten(params).items()}
    found = {name: leaf.shape for name, leaf in flat.items()}
    problems = _shape_problems(found, param_shapes(config)) + _metadata_problems(metadata)
    if problems:
        raise checkpoint.error_of(directory, problems)
    weights = directory / safetensors_io.SINGLE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / DESCRIPTION).unlink(missing_ok=True)
        safetensors_io.write_file(weights, found, flat.values(), "float32")
        header = {
            "format_version": FORMAT_VERSION,
            "kind": "spot",
            "order": dataclasses.asdict(config),
            "sha256": _digest(weights),
        }
        building = directory / f".{DESCRIPTION}.{os.getpid()}.tmp"
        building.write_text(json.dumps(metadata | header, indent=2) + "\n", encoding="utf-8")
        os.replace(building, directory / DESCRIPTION)
    except OSError as error:
        raise checkpoint.CheckpointError(f"cannot write {directory}: {error}") from error


def load_drafter(
    directory: str | Path, target_config: TargetConfig | None = None, allow_mismatch: bool = False
) -> Spot:
    """Reads a drafter, checked whole, with float32 parameters.

    A drafter reads distributions only, so any target whose blocks are not too long will do:
    decoding stays exact. `DrafterWarning` is given where it has not seen the block length.

    Args:
      directory: made by `save_drafter`.
      target_config: of the target that it is to draft for; checked where given.
      allow_mismatch: leaves the warning out.
    """
    directory = Path(directory)
    metadata = read_metadata(directory)
    weights = directory / safetensors_io.SINGLE
    if not weights.is_file():
        raise checkpoint.CheckpointError(f"{weights} is missing")
    if _digest(weights) != metadata["sha256"]:
        raise checkpoint.CheckpointError(
            f"{weights} is damaged: its content does not match sha256 in {DESCRIPTION}"
        )
    config = _order_config(directory, metadata)
    entries = safetensors_io.read_header(weights)
    problems = _shape_problems({n: e.shape for n, e in entries.items()}, param_shapes(config))
    problems += [
        f"tensor {name}: dtype {entry.dtype} is not F32 or BF16"
        for name, entry in entries.items()
        if entry.dtype not in ("F32", "BF16")
    ]
    if problems:
        raise checkpoint.error_of(weights, problems)
    if target_config is not None:
        _check_target(directory, metadata, config, target_config, allow_mismatch)
    flat = {
        name: jnp.asarray(safetensors_io.read_tensor(entry).astype(np.float32))
        for name, entry in entries.items()
    }
    return Spot(traverse_util.unflatten_dict(flat, sep="/"), config)


def read_metadata(directory: str | Path) -> dict[str, Any]:
    """The description of a drafter, its keys and their types checked."""
    path = Path(directory) / DESCRIPTION
    if not Path(directory).is_dir():
        raise checkpoint.CheckpointError(f"{directory} is not a directory")
    metadata = checkpoint.read_json(path)
    if metadata.get("format_version") != FORMAT_VERSION:
        raise checkpoint.CheckpointError(
            f"{path}: format_version {metadata.get('format_version')!r} is not the supported "
            f"version {FORMAT_VERSION}"
        )
    problems = [f"has no {name}" for name in _HEADER if name not in metadata]
    rest = {name: value for name, value in metadata.items() if name not in _HEADER}
    problems += _metadata_problems(rest)
    if not problems and metadata["kind"] != "spot":
        problems = [f"kind {metadata['kind']!r} is not 'spot'"]
    if problems:
        raise checkpoint.error_of(path, problems)
    return metadata


def read_order(directory: str | Path) -> OrderConfig:
    """The shape of a drafter's network, read without its weights."""
    return _order_config(Path(directory), read_metadata(directory))


def param_shapes(config: OrderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the order network, names joined by `/`."""

    def initialise():
        length, top = 2, config.num_top
        masked = jnp.ones((1, length), bool)
        value, tops = jnp.zeros((1, length)), jnp.zeros((1, length, top))
        draws = jnp.zeros((1, length, config.num_alternatives))
        ids = jnp.zeros((1, length), jnp.int32)
        reading = Reading(ids, value, tops, tops.astype(jnp.int32), value, value)
        features = order_features(
            reading, draws, draws, draws.astype(jnp.int32), masked, masked, masked
        )
        return OrderNetwork(config).init(jax.random.key(0), features)["params"]

    shapes = jax.eval_shape(initialise)
    return {name: leaf.shape for name, leaf in _flatten(shapes).items()}


def _check_target(directory, metadata, config: OrderConfig, target: TargetConfig, allow: bool):
    length = target.block_length
    if length > config.max_block:
        raise checkpoint.CheckpointError(
            f"{directory}: reads blocks of up to {config.max_block} positions, the target's have "
            f"{length}"
        )
    if target.num_token_ids < config.num_top:
        raise checkpoint.CheckpointError(
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


def _metadata_problems(metadata: dict[str, Any]) -> list[str]:
    known = _REQUIRED | _OPTIONAL
    problems = [f"has no {name}" for name in _REQUIRED if name not in metadata]
    problems += [f"unknown key {name}" for name in metadata if name not in known]
    for name in known.keys() & metadata.keys():
        value, (kind, items) = metadata[name], known[name]
        inner = list(value.values()) if isinstance(value, dict) else value
        if type(value) is not kind or (
            items and not (inner and all(isinstance(item, items) for item in inner))
        ):
            problems.append(f"{name} has the unexpected value {value!r}")
        elif name == "accuracy" and sorted(value) != sorted(_ACCURACIES):
            problems.append(f"accuracy must have the keys {', '.join(_ACCURACIES)}")
    return problems


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
