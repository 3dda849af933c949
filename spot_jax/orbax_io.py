"""Arrays on disk by Orbax: a tree at once, one by one, or bit by bit."""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spot_jax.json_io import CheckpointError

CHUNK_BYTES = 8 << 20

# `pieces(name)` yields parts of an array, each with its index there.
Pieces = Callable[[str], Iterable[tuple[tuple[int | slice, ...], np.ndarray]]]


def save(path: Path, params: dict[str, Any]) -> None:
    """Writes a tree of arrays that the host's memory can hold twice."""
    import orbax.checkpoint as ocp

    with _one_line_errors(path), ocp.StandardCheckpointer() as orbax:
        orbax.save(path, params)


def restore(path: Path, tree: Any) -> Any:
    """Reads all arrays. `tree` has their shapes and dtypes, and the sharding of each."""
    import orbax.checkpoint as ocp

    with _one_line_errors(path), ocp.StandardCheckpointer() as orbax:
        return orbax.restore(path, tree)


def restore_one(path: Path, name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads one array of a flat tree, and no other."""
    import orbax.checkpoint as ocp

    arguments = ocp.args.PyTreeRestore(
        item={name: leaf},
        restore_args={name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype)},
        partial_restore=True,
    )
    handler = ocp.PyTreeCheckpointHandler()
    with _one_line_errors(path), ocp.Checkpointer(handler) as orbax:
        return orbax.restore(path, args=arguments)[name]


def save_pieces(path: Path, params: dict[str, Any], pieces: Pieces) -> None:
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


def chunk_shape(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Part of an array that is one file: all of it, one of its matrices, or rows of one."""
    chunk = list(shape)
    for axis in range(len(chunk)):
        rest = math.prod(chunk[axis + 1 :]) * itemsize
        if chunk[axis] * rest <= CHUNK_BYTES:
            break
        chunk[axis] = 1 if axis < len(chunk) - 2 else max(1, CHUNK_BYTES // rest)
    return tuple(chunk)


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
