"""Reading and writing safetensors files without torch, bfloat16 included.

Format: 8 bytes of little-endian header length, a JSON header
`{name: {"dtype", "shape", "data_offsets"}}`, then the data without holes. Nothing that a header
says is trusted before it is checked against the file.
"""

import json
import math
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from spot_jax import json_io

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
# Bytes an item of the other types of the format; known so that headers check, never converted.
_OTHER_SIZES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
_OTHER_SIZES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_MAX_HEADER = 100_000_000
_DISTINCT = json_io.distinct("a name occurs twice")
_SHOWN = 8


class TensorEntry(NamedTuple):
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_tensor(entry: TensorEntry) -> np.ndarray:
    """A memory map of one tensor; its pages are dropped with the array."""
    dtype = DTYPES[entry.dtype]
    if not math.prod(entry.shape):
        return np.zeros(entry.shape, dtype)
    return np.memmap(entry.file, dtype, mode="r", offset=entry.offset, shape=entry.shape)


def rows_of(entry: TensorEntry, begin: int, end: int) -> TensorEntry:
    """Rows `begin` to `end` of a tensor, as a tensor."""
    row = math.prod(entry.shape[1:]) * DTYPES[entry.dtype].itemsize
    return entry._replace(shape=(end - begin, *entry.shape[1:]), offset=entry.offset + begin * row)


def item_of(entry: TensorEntry, index: int) -> TensorEntry:
    """One item along the leading axis."""
    row = rows_of(entry, index, index + 1)
    return row._replace(shape=row.shape[1:])


def read_entries(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor of a model directory, one file or the shards that its index lists."""
    if (directory / INDEX).is_file():
        return _read_shards(directory)
    if (directory / SINGLE).is_file():
        shards = sorted(p.name for p in directory.glob("model-*-of-*.safetensors"))
        if shards:
            raise json_io.CheckpointError(
                f"{directory}: holds both {SINGLE} and {_names(shards)} but no {INDEX}"
            )
        return read_header(directory / SINGLE)
    found = sorted(p.name for p in directory.glob("*.safetensors"))
    if found:
        raise json_io.CheckpointError(
            f"{directory}: {INDEX} is missing, so {_names(found)} cannot be known to be complete"
        )
    other = sorted(p.name for p in directory.glob("*.bin"))
    note = f"; {_names(other)}: only safetensors are read" if other else ""
    raise json_io.CheckpointError(f"{directory}: has no {SINGLE} and no {INDEX}{note}")


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file; raises if the file is cut, has holes, or its header is not sound."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
            raise json_io.CheckpointError(
                f"{path}: not a safetensors file, or cut inside its header ({size} bytes)"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_DISTINCT)
    except (ValueError, RecursionError) as error:
        raise json_io.CheckpointError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise json_io.CheckpointError(f"{path}: header is not a JSON object")
    header.pop("__metadata__", None)
    start, available = 8 + length, size - 8 - length
    entries, spans, problems, cut = {}, [], [], []
    for name, fields in header.items():
        problem = _entry_problem(fields)
        if problem:
            problems.append(f"tensor {name}: {problem}")
            continue
        begin, end = fields["data_offsets"]
        spans.append((begin, end, name))
        if end > available:
            cut.append(name)
        entries[name] = TensorEntry(path, fields["dtype"], tuple(fields["shape"]), start + begin)
    if cut:
        problems.append(f"file is cut at {size} bytes, tensors beyond its end: {_names(cut)}")
    if not problems:
        problems = _layout_problems(spans, available)
    if problems:
        raise json_io.error_of(path, problems)
    return entries


def write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    arrays: Iterable[np.ndarray],
    dtype: str,
    float32: Container[str] = (),
) -> None:
    """Writes one file atomically, array by array.

    Args:
      path: replaced if it exists.
      shapes: shape of every tensor, in order.
      arrays: the tensors, in the same order, cast to `dtype` one at a time.
      dtype: a NumPy name, "float32", "bfloat16" or "float16".
      float32: names of tensors that are float32 whatever `dtype` says.
    """
    wanted = {name: "float32" if name in float32 else dtype for name in shapes}
    codes = {known.name: code for code, known in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        code = codes[wanted[name]]
        begin, end = end, end + math.prod(shape) * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    building = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(building, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for (name, shape), array in zip(shapes.items(), arrays, strict=True):
                if array.shape != shape:
                    raise ValueError(f"array of shape {array.shape} where {shape} was announced")
                cast = array.astype(DTYPES[codes[wanted[name]]])
                file.write(np.ascontiguousarray(cast).view(np.uint8).data)
        os.replace(building, path)
    finally:
        building.unlink(missing_ok=True)


def _read_shards(directory: Path) -> dict[str, TensorEntry]:
    weight_map = json_io.read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise json_io.CheckpointError(f"{directory / INDEX}: has no weight_map")
    wanted: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        wanted.setdefault(str(file), []).append(name)
    problems, entries = [], {}
    if SINGLE not in wanted and (directory / SINGLE).is_file():
        problems.append(f"holds {SINGLE} beside {INDEX}, which does not list it: remove one")
    for file, names in sorted(wanted.items()):
        path = directory / file
        if path.parent != directory or not path.is_file():
            problems.append(f"{INDEX} names {file}, which is absent; tensors {_names(names)}")
            continue
        try:
            found = read_header(path)
        except json_io.CheckpointError as error:
            problems.append(str(error))
            continue
        absent = [name for name in names if name not in found]
        stray = [name for name in found if weight_map.get(name) != file]
        if absent:
            problems.append(f"{file} lacks tensors that {INDEX} puts there: {_names(absent)}")
        if stray:
            problems.append(
                f"{file} holds tensors that {INDEX} does not put there: {_names(stray)}"
            )
        entries |= {name: found[name] for name in names if name in found}
    if problems:
        raise json_io.error_of(directory, problems)
    return entries


def _entry_problem(fields: Any) -> str | None:
    """What is wrong with one tensor's header, apart from its place in the file."""
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        return "header must have dtype, shape and data_offsets"
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in _OTHER_SIZES):
        return f"unknown dtype {dtype!r}"
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            return f"{numbers!r} is not a list of non-negative integers"
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {offsets} are not a range"
    itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else _OTHER_SIZES[dtype]
    needed = math.prod(shape) * itemsize
    if offsets[1] - offsets[0] != needed:
        return f"{dtype} {shape} needs {needed} bytes, data_offsets {offsets} give another number"
    return None


def _layout_problems(spans: list[tuple[int, int, str]], available: int) -> list[str]:
    problems, position = [], 0
    for begin, end, name in sorted(spans):
        if begin != position:
            problems.append(f"tensor {name} starts at byte {begin} of the data, not at {position}")
        position = max(position, end)
    if position != available:
        problems.append(f"{available - position} bytes after the last tensor belong to none")
    return problems


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
