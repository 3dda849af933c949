"""Checkpoints on disk: Orbax for the arrays, our metadata and digests around them.

    spot_jax.json   format version, kind, names and shapes of the arrays, whatever the caller adds
    SHA256SUMS      digest of every other file; `sha256sum -c SHA256SUMS` checks them by hand
    params/         the arrays, written by Orbax
    ...             files copied along, such as a tokenizer

Orbax reads a flipped byte without complaint, hence the digests. A directory is built under a
temporary name, its `spot_jax.json` last, and then renamed, so a killed run leaves nothing that
loads.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

FORMAT_VERSION = 1
METADATA, DIGESTS, PARAMS = "spot_jax.json", "SHA256SUMS", "params"
CHUNK_BYTES = 8 << 20

# `pieces(name)` yields parts of an array, each with its index there.
Pieces = Callable[[str], Iterable[tuple[tuple[int | slice, ...], np.ndarray]]]


class CheckpointError(ValueError):
    """A checkpoint, or a request about one, that cannot be honoured."""


def error_of(where: str | Path, problems: Sequence[str]) -> CheckpointError:
    """One error for all `problems`: on one line where there is one, as a list otherwise."""
    if len(problems) == 1:
        return CheckpointError(f"{where}: {problems[0]}")
    return CheckpointError("\n  - ".join([f"{where}: {len(problems)} problems", *problems]))


def is_checkpoint(directory: str | Path) -> bool:
    """Whether `directory` is, by its looks, one that `write_checkpoint` made."""
    return (Path(directory) / METADATA).is_file()


def check_output(directory: str | Path, overwrite: bool) -> None:
    """Raises unless `write_checkpoint` may create, or replace, `directory`.

    Only checkpoints and empty directories are ever replaced, whatever the caller asks for.
    """
    out = Path(directory)
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise CheckpointError(f"{out} already exists: pass --overwrite to replace it")
    if not (is_checkpoint(out) or (out.is_dir() and not any(out.iterdir()))):
        raise CheckpointError(f"{out} is not a spot-jax checkpoint: refusing to overwrite it")


def write_checkpoint(
    directory: str | Path,
    params: dict[str, Any],
    metadata: dict[str, Any],
    *,
    kind: str,
    files: Iterable[Path] = (),
    overwrite: bool = False,
    pieces: Pieces | None = None,
) -> None:
    """Writes a checkpoint directory, whole or not at all.

    Args:
      directory: created, with its parents; an existing one is an error unless `overwrite`.
      params: tree of nested dicts of JAX or NumPy arrays; or, with `pieces`, a flat dict of
        anything that has a shape and a dtype.
      metadata: what `read_checkpoint` returns; must be JSON.
      kind: what the checkpoint is of ("target", "drafter"), so that one is not taken for another.
      files: copied beside the arrays.
      overwrite: replaces an existing checkpoint.
      pieces: content of each array, bit by bit, for arrays that the host's memory cannot hold.
        Parts of at most one chunk (`chunk_shape`) are written fastest.
    """
    check_output(directory, overwrite)
    out = Path(os.path.abspath(directory))
    building = out.with_name(f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    header = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "arrays": {
            name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in _flat(params).items()
        },
    }
    text = (json.dumps(metadata | header, indent=2) + "\n").encode()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir()
        if pieces is None:
            _orbax(building / PARAMS, lambda orbax, path: orbax.save(path, params))
        else:
            _save_pieces(building / PARAMS, params, pieces)
        for file in files:
            shutil.copyfile(file, building / file.name)
        digests = {name: _digest(building / name) for name in _files_under(building)}
        digests[METADATA] = hashlib.sha256(text).hexdigest()
        lines = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
        (building / DIGESTS).write_text("".join(lines), encoding="utf-8")
        (building / METADATA).write_bytes(text)
        _move_into_place(building, out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def read_checkpoint(
    directory: str | Path,
    *,
    kind: str,
    dtype: str | None = None,
    keep: Callable[[str], bool] = lambda name: False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a checkpoint, its digests checked first, onto the first local device.

    Args:
      directory: made by `write_checkpoint`.
      kind: the kind that the caller expects.
      dtype: of all floating-point arrays; the stored one where None.
      keep: names of arrays that have the stored one whatever `dtype` says.

    Returns:
      The tree of arrays and the metadata.
    """
    directory = Path(os.path.abspath(directory))
    check_digests(directory)
    metadata = read_json(directory / METADATA)
    if metadata.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory}: format version {metadata.get('format_version')} is not the supported "
            f"version {FORMAT_VERSION}"
        )
    if metadata.get("kind") != kind:
        raise CheckpointError(f"{directory}: holds a {metadata.get('kind')}, expected a {kind}")
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(
            shape, _cast(stored, None if keep(name) else dtype), sharding=sharding
        )
        for name, (stored, shape) in metadata["arrays"].items()
    }
    tree = traverse_util.unflatten_dict(abstract, sep="/")
    return _orbax(directory / PARAMS, lambda orbax, path: orbax.restore(path, tree)), metadata


def check_digests(directory: Path) -> None:
    """Raises unless every file is as `write_checkpoint` left it; files added later are ignored."""
    for name in (METADATA, DIGESTS):
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory}: has no {name}, so it is not a whole checkpoint")
    listed, problems = {}, []
    for line in (directory / DIGESTS).read_text(encoding="utf-8", errors="replace").splitlines():
        parts = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if parts is None:
            problems.append(f"{DIGESTS} has a malformed line {line[:90]!r}")
        else:
            listed[parts[2]] = parts[1]
    for name, digest in listed.items():
        if not (directory / name).is_file():
            problems.append(f"{name} is missing")
        elif _digest(directory / name) != digest:
            problems.append(f"{name} is damaged: its content does not match its sha256 digest")
    needed = {METADATA, *(f"{PARAMS}/{name}" for name in _files_under(directory / PARAMS))}
    problems += [f"{name} is not listed in {DIGESTS}" for name in sorted(needed - listed.keys())]
    if problems:
        raise error_of(directory, problems)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def chunk_shape(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Part of an array that is one file: all of it, one of its matrices, or rows of one."""
    chunk = list(shape)
    for axis in range(len(chunk)):
        rest = math.prod(chunk[axis + 1 :]) * itemsize
        if chunk[axis] * rest <= CHUNK_BYTES:
            break
        chunk[axis] = 1 if axis < len(chunk) - 2 else max(1, CHUNK_BYTES // rest)
    return tuple(chunk)


def _orbax(path: Path, work: Callable[[Any, Path], Any]) -> Any:
    """Runs `work(checkpointer, path)`."""
    import orbax.checkpoint as ocp

    with _one_line_errors(path), ocp.StandardCheckpointer() as orbax:
        return work(orbax, path)


def _save_pieces(path: Path, params: dict[str, Any], pieces: Pieces) -> None:
    """Writes what Orbax would, array by array and piece by piece.

    Orbax copies all arrays before it writes the first. Here it saves stand-ins of one item, in the
    layout of one Zarr array a directory; each is then made anew in its true shape and filled.
    """
    import orbax.checkpoint as ocp
    import tensorstore

    stand_ins = {
        name: np.zeros((1,) * len(leaf.shape), leaf.dtype) for name, leaf in params.items()
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with _one_line_errors(path), _quiet(), ocp.Checkpointer(handler) as orbax:
        orbax.save(path, stand_ins)
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    for name, leaf in params.items():
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{path / name}/"},
            "metadata": json.loads((path / name / ".zarray").read_text(encoding="utf-8"))
            | {"shape": leaf.shape, "chunks": chunk_shape(leaf.shape, leaf.dtype.itemsize)},
        }
        with _one_line_errors(path / name):
            array = tensorstore.open(spec, create=True, delete_existing=True, context=context)
            array = array.result()
        for index, piece in pieces(name):
            with _one_line_errors(path / name):
                array[index].write(piece).result()


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # Orbax raises bare `Exception`s with pages of TensorStore state.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: {first[:300]}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax warns that it has no OCDBT files to merge, which we asked for."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    return dict(traverse_util.flatten_dict(tree, sep="/"))


def _cast(stored: str, dtype: str | None) -> np.dtype:
    floating = jax.numpy.issubdtype(stored, jax.numpy.floating)
    return jax.numpy.dtype(dtype if dtype is not None and floating else stored)


def _files_under(directory: Path) -> list[str]:
    return [str(p.relative_to(directory)) for p in sorted(directory.rglob("*")) if p.is_file()]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _move_into_place(building: Path, out: Path) -> None:
    if not os.path.lexists(out):
        os.rename(building, out)
        return
    old = building.with_suffix(".old")
    os.rename(out, old)
    try:
        os.rename(building, out)
    except OSError:
        os.rename(old, out)
        raise
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old)
