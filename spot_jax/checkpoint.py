"""Checkpoints on disk: Orbax for the arrays, our metadata and digests around them.

    spot_jax.json   format version, kind, names and shapes of the arrays, whatever the caller adds
    SHA256SUMS      digest of every other file; `sha256sum -c SHA256SUMS` checks them by hand
    params/         the arrays, written by Orbax
    ...             files copied along, such as a tokenizer

Orbax reads a flipped byte without complaint, hence the digests. A directory is built under a
temporary name, its `spot_jax.json` last, and then renamed, so a killed run leaves nothing that
loads.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from spot_jax import orbax_io
from spot_jax.json_io import CheckpointError, error_of, read_json

FORMAT_VERSION = 1
METADATA, DIGESTS, PARAMS = "spot_jax.json", "SHA256SUMS", "params"


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
    pieces: orbax_io.Pieces | None = None,
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
        Parts of at most one chunk (`orbax_io.chunk_shape`) are written fastest.
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
            orbax_io.save(building / PARAMS, params)
        else:
            orbax_io.save_pieces(building / PARAMS, params, pieces)
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
    metadata = read_metadata(directory, kind=kind)
    abstract = {
        name: _abstract(array, None if keep(name) else dtype)
        for name, array in metadata["arrays"].items()
    }
    tree = traverse_util.unflatten_dict(abstract, sep="/")
    return orbax_io.restore(Path(os.path.abspath(directory)) / PARAMS, tree), metadata


def read_array(
    directory: str | Path, metadata: dict[str, Any], name: str, dtype: str | None = None
) -> jax.Array:
    """Reads one array of a flat tree, whose `read_metadata` was read before.

    Args:
      directory: made by `write_checkpoint`.
      metadata: its metadata.
      name: of the array.
      dtype: of the result; the stored one where None.
    """
    path = Path(os.path.abspath(directory)) / PARAMS
    return orbax_io.restore_one(path, name, _abstract(metadata["arrays"][name], dtype))


def read_metadata(directory: str | Path, *, kind: str) -> dict[str, Any]:
    """The metadata of a checkpoint, once every digest and its version and kind are right."""
    directory = Path(directory)
    check_digests(directory)
    metadata = read_json(directory / METADATA)
    if metadata.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory}: format version {metadata.get('format_version')} is not the supported "
            f"version {FORMAT_VERSION}"
        )
    if metadata.get("kind") != kind:
        raise CheckpointError(f"{directory}: holds a {metadata.get('kind')}, expected a {kind}")
    return metadata


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


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    return dict(traverse_util.flatten_dict(tree, sep="/"))


def _abstract(array: list[Any], dtype: str | None) -> jax.ShapeDtypeStruct:
    stored, shape = array
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(shape, _cast(stored, dtype), sharding=sharding)


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
