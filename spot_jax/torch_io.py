"""Reads PyTorch state dicts without torch and without running anything that is in them.

A `.pt` file is a zip archive with a pickle and one raw file a storage. The pickle is read by an
unpickler that knows the few names which a plain state dict needs; any other name is an error, so
nothing from the file is ever called. Everything that the pickle says about sizes is checked against
the archive before memory is taken.
"""

import collections
import io
import math
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from spot_jax import checkpoint

_DTYPES = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "BoolStorage": np.dtype(bool),
}
_MAX_PICKLE, _MAX_ORDER, _MAX_DIMS = 64_000_000, 64, 8
# What `torch.save` makes a state dict of; in particular no opcode that reaches around `find_class`.
_OPCODES = set(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "BINUNICODE SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS "
    "EMPTY_DICT SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL "
    "BINPERSID REDUCE BUILD".split()
)


class _StorageKind(NamedTuple):
    name: str


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    size: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_state_dict(path: str | Path) -> dict[str, np.ndarray]:
    """The tensors of a state dict, in float32 where they are floating-point.

    Args:
      path: written by `torch.save(model.state_dict(), path)`; a dict that holds the state dict
        under `state_dict`, `model` or `model_state_dict` will do.

    Raises:
      checkpoint.CheckpointError: naming the file, and what in it is not a plain state dict.
    """
    path = Path(path)
    if not path.is_file():
        raise checkpoint.CheckpointError(f"{path} is missing")
    if not zipfile.is_zipfile(path):
        raise checkpoint.CheckpointError(
            f"{path}: not a zip archive, or cut short: files of PyTorch before 1.6 must be saved "
            "again with a newer one"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path, archive)
    except checkpoint.CheckpointError:
        raise
    # What a pickle can raise while it is built has no bounds; nothing but data is lost by it.
    except Exception as error:
        raise checkpoint.CheckpointError(f"{path}: not a readable state dict: {error}") from error


def _read(path: Path, archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    pickles = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise checkpoint.CheckpointError(f"{path}: has {len(pickles)} files data.pkl, expected one")
    root = pickles[0].removesuffix("data.pkl")
    if archive.getinfo(pickles[0]).file_size > _MAX_PICKLE:
        raise checkpoint.CheckpointError(f"{path}: data.pkl is larger than {_MAX_PICKLE} bytes")
    order = f"{root}byteorder"
    if order in archive.namelist() and (
        archive.getinfo(order).file_size > _MAX_ORDER or archive.read(order).strip() != b"little"
    ):
        raise checkpoint.CheckpointError(f"{path}: is not in little-endian order")
    pickled = archive.read(pickles[0])
    _check_opcodes(path, pickled)
    content = _Unpickler(path, pickled).load()
    for name in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not content:
        raise checkpoint.CheckpointError(f"{path}: holds no state dict")
    odd = [str(name) for name, value in content.items() if not isinstance(value, _Tensor)]
    if odd:
        raise checkpoint.CheckpointError(f"{path}: {', '.join(odd[:8])}: not tensors")
    return {str(name): _load(path, archive, root, name, t) for name, t in content.items()}


def _load(path: Path, archive, root: str, name: str, tensor: _Tensor) -> np.ndarray:
    storage = tensor.storage
    file = f"{root}data/{storage.key}"
    if file not in archive.namelist():
        raise checkpoint.CheckpointError(f"{path}: tensor {name}: {file} is missing")
    info = archive.getinfo(file)
    if info.file_size != storage.size * storage.dtype.itemsize:
        raise checkpoint.CheckpointError(
            f"{path}: tensor {name}: {file} has {info.file_size} bytes, its storage "
            f"{storage.size} items of {storage.dtype.itemsize}"
        )
    # A compressed member may claim any size; torch stores them as they are.
    if info.compress_type != zipfile.ZIP_STORED:
        raise checkpoint.CheckpointError(f"{path}: tensor {name}: {file} is compressed")
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    empty = math.prod(tensor.shape) == 0
    if not empty and not 0 <= tensor.offset <= tensor.offset + reach < storage.size:
        raise checkpoint.CheckpointError(f"{path}: tensor {name} reaches outside its storage")
    flat = np.frombuffer(archive.read(file), storage.dtype)
    view = np.lib.stride_tricks.as_strided(
        flat[tensor.offset :],
        tensor.shape,
        tuple(s * storage.dtype.itemsize for s in tensor.strides),
        writeable=False,
    )
    floating = storage.dtype.kind == "f" or storage.dtype == ml_dtypes.bfloat16
    # A stride of 0 could make any number of items out of one.
    if math.prod(tensor.shape) > storage.size:
        raise checkpoint.CheckpointError(f"{path}: tensor {name} repeats its storage")
    return np.array(view, np.float32 if floating else None)


def _check_opcodes(path: Path, data: bytes) -> None:
    """Raises on what no state dict holds, and on a memo whose table would take memory by itself."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            raise checkpoint.CheckpointError(
                f"{path}: holds the opcode {opcode.name}, which a plain state dict does not need: "
                "refused"
            )
        if opcode.name == "LONG_BINPUT" and argument is not None and argument > len(data):
            raise checkpoint.CheckpointError(f"{path}: data.pkl is damaged: memo {argument}")


class _Unpickler(pickle.Unpickler):
    """Knows ordered dicts, storages and tensors, and calls nothing else."""

    def __init__(self, path: Path, data: bytes):
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) in (
            ("torch._utils", "_rebuild_tensor_v2"),
            ("torch._utils", "_rebuild_parameter"),
        ):
            # A function of its own for each file: a pickle may set attributes of what it is given.
            make = _tensor if name == "_rebuild_tensor_v2" else _parameter
            return lambda *arguments: make(*arguments)
        if module == "torch" and name in _DTYPES:
            return _StorageKind(name)
        raise checkpoint.CheckpointError(
            f"{self._path}: holds {module}.{name}, which a plain state dict does not need: refused"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise checkpoint.CheckpointError(f"{self._path}: unknown reference {pid!r:.80}")
        _, kind, key, _, size = pid
        if not isinstance(kind, _StorageKind) or not isinstance(key, str):
            raise checkpoint.CheckpointError(f"{self._path}: unknown storage {pid!r:.80}")
        if not _are_sizes((size,)) or "/" in key:
            raise checkpoint.CheckpointError(f"{self._path}: unknown storage {pid!r:.80}")
        return _Storage(key, _DTYPES[kind.name], size)


def _tensor(storage, offset, shape, strides, *rest) -> _Tensor:
    """In the place of `torch._utils._rebuild_tensor_v2`."""
    del rest  # requires_grad, backward hooks, metadata
    shape, strides = tuple(shape), tuple(strides)
    if not isinstance(storage, _Storage) or not _are_sizes((offset, *shape, *strides)):
        raise ValueError("a tensor without storage, shape and strides")
    if len(shape) != len(strides) or len(shape) > _MAX_DIMS:
        raise ValueError(f"a tensor of shape {shape} with strides {strides}")
    return _Tensor(storage, offset, shape, strides)


def _parameter(data, *rest) -> _Tensor:
    """In the place of `torch._utils._rebuild_parameter`."""
    del rest
    if not isinstance(data, _Tensor):
        raise ValueError("a parameter that is no tensor")
    return data


def _are_sizes(numbers) -> bool:
    return all(type(n) is int and 0 <= n < 2**48 for n in numbers)
