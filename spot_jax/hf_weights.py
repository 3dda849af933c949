"""Plans where every parameter of a target comes from in a Hugging Face directory, and reads it."""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from spot_jax import families, hf_config, json_io, orbax_io, safetensors_io
from spot_jax.config import TargetConfig
from spot_jax.family import Family, Place
from spot_jax.models import target
from spot_jax.safetensors_io import TensorEntry

DTYPES = ("float32", "bfloat16")


class Plan(NamedTuple):
    """Where every leaf of a target comes from: tensors by their leading indices in the leaf."""

    config: TargetConfig
    dtype: str
    leaves: dict[str, dict[tuple[int, ...], TensorEntry]]


def plan_conversion(
    hf_dir: Path,
    *,
    dtype: str | None = None,
    block_length: int | None = None,
    mask_token_id: int | None = None,
) -> Plan:
    """Checks a Hugging Face directory against what our trunk needs, without reading weights.

    Every tensor must have a place and every place a tensor, of the right shape; one error lists all
    that do not.
    """
    if not hf_dir.is_dir():
        raise json_io.CheckpointError(f"{hf_dir} is not a directory")
    check_dtype(dtype)
    config = hf_config.read_target_config(
        hf_dir, block_length=block_length, mask_token_id=mask_token_id
    )
    family = families.by_name(config.family)
    entries = safetensors_io.read_entries(hf_dir)
    config = _settle_head(hf_dir, config, family, entries)

    shapes = target.param_shapes(config)
    places = family.places(shapes)
    entries = _unfused(entries, places)
    leaves: dict[str, dict[tuple[int, ...], TensorEntry]] = {name: {} for name in shapes}
    problems = []
    for tensor, entry in entries.items():
        if tensor not in places:
            if not re.fullmatch(family.harmless, tensor):
                problems.append(f"{tensor} {list(entry.shape)} has no place in the model")
            continue
        if entry.dtype not in safetensors_io.DTYPES:
            problems.append(f"{tensor} has dtype {entry.dtype}, only F32, BF16 and F16 are read")
            continue
        names, index = places[tensor]
        expected = [shapes[leaf][len(index) :] for leaf in names]
        whole = (sum(shape[0] for shape in expected), *expected[0][1:])
        if entry.shape != whole:
            problems.append(f"{tensor} has shape {list(entry.shape)}, expected {list(whole)}")
            continue
        begin = 0
        for leaf, shape in zip(names, expected, strict=True):
            leaves[leaf][index] = safetensors_io.rows_of(entry, begin, begin + shape[0])
            begin += shape[0]
    for tensor in places.keys() - entries.keys():
        note = " and the embedding is not tied" if places[tensor].leaves == ("head",) else ""
        problems.append(f"{tensor} is missing{note}")
    if problems:
        raise json_io.error_of(hf_dir, sorted(problems))
    stored = {
        entry.dtype
        for leaf, parts in leaves.items()
        if not always_float32(leaf)
        for entry in parts.values()
    }
    kept = "bfloat16" if stored == {"BF16"} else "float32"
    return Plan(config, dtype or kept, leaves)


def always_float32(leaf: str) -> bool:
    """Leaves that keep float32 in a bfloat16 model: rounded, a router's bias chooses others."""
    return leaf.endswith("router_bias")


def _unfused(entries: dict[str, TensorEntry], places: dict[str, Place]) -> dict[str, TensorEntry]:
    """Splits experts that are stored as one tensor a layer, as transformers 5 holds them."""
    result = dict(entries)
    for tensor, entry in entries.items():
        fused = re.fullmatch(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)", tensor)
        if fused is None or len(entry.shape) != 3 or entry.dtype not in safetensors_io.DTYPES:
            continue
        names = ("down_proj",) if fused[2] == "down_proj" else ("gate_proj", "up_proj")
        rows, odd = divmod(entry.shape[1], len(names))
        parts = {
            f"{fused[1]}.{expert}.{name}.weight": safetensors_io.rows_of(
                safetensors_io.item_of(entry, expert), i * rows, (i + 1) * rows
            )
            for expert in range(entry.shape[0])
            for i, name in enumerate(names)
        }
        # Left as it is, and so reported, where the family or the file has another tensor for it.
        if not odd and not parts.keys() & entries.keys() and parts.keys() & places.keys():
            del result[tensor]
            result |= parts
    return result


def read_leaf(
    name: str,
    shape: tuple[int, ...],
    parts: dict[tuple[int, ...], TensorEntry],
    dtype: str,
    advance: Callable[[int], None] = lambda size: None,
) -> np.ndarray:
    """Assembles one leaf on the host, tensor by tensor; `advance` is told the bytes of each."""
    leaf = np.empty(shape, leaf_dtype(name, dtype))
    for index, entry in parts.items():
        leaf[index] = safetensors_io.read_tensor(entry)
        advance(math.prod(entry.shape) * leaf.itemsize)
    return leaf


def read_pieces(
    name: str,
    shape: tuple[int, ...],
    parts: dict[tuple[int, ...], TensorEntry],
    dtype: str,
    advance: Callable[[int], None] = lambda size: None,
) -> Iterator[tuple[tuple[int | slice, ...], np.ndarray]]:
    """One leaf in pieces that each lie in one chunk of `checkpoint.write_checkpoint`."""
    kind = leaf_dtype(name, dtype)
    chunk = orbax_io.chunk_shape(shape, kind.itemsize)
    if chunk == shape:
        yield (), read_leaf(name, shape, parts, dtype, advance)
        return
    for index, entry in parts.items():
        rows = chunk[len(index)]
        for begin in range(0, entry.shape[0], rows):
            end = min(begin + rows, entry.shape[0])
            part = safetensors_io.rows_of(entry, begin, end)
            yield (
                (*index, slice(begin, end)),
                safetensors_io.read_tensor(part).astype(kind, copy=False),
            )
            advance(math.prod(part.shape) * kind.itemsize)


def leaf_dtype(name: str, dtype: str) -> np.dtype:
    """Of a leaf in a model of `dtype`."""
    return jax.numpy.dtype("float32" if always_float32(name) else dtype)


def check_dtype(dtype: str | None) -> None:
    """Raises unless parameters may have this dtype."""
    if dtype not in (None, *DTYPES):
        raise json_io.CheckpointError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def check_params(params: Mapping[str, Any], config: TargetConfig) -> None:
    """Raises unless `params` is the flat tree that `config` describes."""
    shapes = target.param_shapes(config)
    problems = [f"{name} is missing" for name in shapes.keys() - params.keys()]
    problems += [f"{name} has no place in the model" for name in params.keys() - shapes.keys()]
    problems += [
        f"{name} has shape {params[name].shape}, expected {shapes[name]}"
        for name in shapes.keys() & params.keys()
        if tuple(params[name].shape) != shapes[name]
    ]
    if problems:
        raise json_io.error_of("parameters", sorted(problems))


def _settle_head(
    hf_dir: Path,
    config: TargetConfig,
    family: Family,
    entries: dict[str, TensorEntry],
) -> TargetConfig:
    """Drops a stored head that repeats a tied embedding; keeps one that differs, with a warning."""
    names = {leaf: tensor for tensor, leaf in family.weights.items() if isinstance(leaf, str)}
    embed, head = names["embed"], names["head"]
    if not config.tie_embeddings or head not in entries or embed not in entries:
        return config
    if _same_values(entries[embed], entries[head]):
        del entries[head]
        return config
    warnings.warn(
        f"{hf_dir}: tie_word_embeddings is true, but {head} differs from {embed}: "
        f"the stored {head} is used",
        stacklevel=2,
    )
    return dataclasses.replace(config, tie_embeddings=False)


def _same_values(left: TensorEntry, right: TensorEntry, rows: int = 1024) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype not in safetensors_io.DTYPES:
        return False
    a, b = (safetensors_io.read_tensor(entry) for entry in (left, right))
    # As bytes, so that a NaN equals itself.
    return all(
        a[i : i + rows].tobytes() == b[i : i + rows].tobytes() for i in range(0, len(a), rows)
    )
