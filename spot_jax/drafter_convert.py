"""Order networks trained in PyTorch, converted into drafters.

The key names of the drafters published with SPOT are not known. This reads the names that
`torch.nn.TransformerEncoder` gives its layers, around them those of `CANONICAL`, and takes a
mapping for others. What is read must be the order network of `models.order`, in its features too.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spot_jax import checkpoint, drafter_io, safetensors_io, torch_io
from spot_jax.models.order import OrderConfig

PREFIX = re.compile(r"^(module\.|model\.|_orig_mod\.|order_network\.|drafter\.)+")
# Names around the encoder's layers.
CANONICAL = {
    "input_proj.0.weight": "input_0/kernel",
    "input_proj.0.bias": "input_0/bias",
    "input_proj.2.weight": "input_1/kernel",
    "input_proj.2.bias": "input_1/bias",
    "pos_embed.weight": "position",
    "encoder.norm.weight": "norm/scale",
    "encoder.norm.bias": "norm/bias",
    "head.weight": "score/kernel",
    "head.bias": "score/bias",
}
_LAYER = {
    "self_attn.out_proj.weight": "mixer_{}/output/kernel",
    "self_attn.out_proj.bias": "mixer_{}/output/bias",
    "linear1.weight": "mlp_{}a/kernel",
    "linear1.bias": "mlp_{}a/bias",
    "linear2.weight": "mlp_{}b/kernel",
    "linear2.bias": "mlp_{}b/bias",
    "norm1.weight": "norm_{}a/scale",
    "norm1.bias": "norm_{}a/bias",
    "norm2.weight": "norm_{}b/scale",
    "norm2.bias": "norm_{}b/bias",
}


def names(config: OrderConfig) -> dict[str, tuple[str, ...]]:
    """Name of every tensor of the PyTorch network -> the leaves that share it."""
    result: dict[str, tuple[str, ...]] = {name: (leaf,) for name, leaf in CANONICAL.items()}
    for layer in range(config.num_layers):
        lead = f"encoder.layers.{layer}."
        result |= {lead + name: (leaf.format(layer),) for name, leaf in _LAYER.items()}
        for source, leaf in (("in_proj_weight", "kernel"), ("in_proj_bias", "bias")):
            parts = tuple(f"mixer_{layer}/{part}/{leaf}" for part in ("query", "key", "value"))
            result[f"{lead}self_attn.{source}"] = parts
    return result


def convert_drafter(
    source: str | Path,
    out: str | Path,
    metadata: dict[str, Any],
    mapping: Mapping[str, str] | None = None,
) -> OrderConfig:
    """Writes the drafter that is in a PyTorch or safetensors file.

    The layers must be pre-norm with GELU. Ours is the tanh form; files trained with the exact one
    are read all the same, and their scores move by less than 0.001 or so: a draft may differ, what
    is decoded never does.

    Args:
      source: a `.pt` state dict, read without executing anything, or a safetensors file.
      out: directory to write.
      metadata: see `drafter_io.save_drafter`.
      mapping: name in the file -> name in `names(OrderConfig())`, for files of other names.

    Returns:
      The shape of the network.

    Raises:
      checkpoint.CheckpointError: naming every tensor that does not fit; nothing is written.
    """
    source = Path(source)
    _check_output(Path(out))
    tensors = _renamed(source, _read(source), mapping or {})
    config = _shape_of(tensors)
    lengths = [n for n in metadata["block_lengths"] if not 1 <= n <= config.max_block]
    if lengths:
        raise checkpoint.CheckpointError(
            f"{source}: has {config.max_block} positions, so it was not trained on blocks of "
            f"{', '.join(map(str, lengths))}"
        )
    expected, known = drafter_io.param_shapes(config), names(config)
    problems = [f"{name} has no place in the order network" for name in tensors.keys() - known]
    problems += [f"{name} is missing" for name in known.keys() - tensors]
    leaves: dict[str, np.ndarray] = {}
    for name in known.keys() & tensors.keys():
        try:
            leaves |= _leaves(tensors[name], known[name], expected)
        except ValueError as error:
            problems.append(f"{name} {list(tensors[name].shape)}: {error}")
    if problems:
        raise checkpoint.error_of(source, sorted(problems))
    drafter_io.save_drafter(out, leaves, config, metadata)
    return config


def _check_output(out: Path) -> None:
    """Raises where writing a drafter would replace the weights of something else."""
    if (out / drafter_io.DESCRIPTION).is_file() or not os.path.lexists(out):
        return
    if not out.is_dir():
        raise checkpoint.CheckpointError(f"{out} is not a directory")
    if any(out.iterdir()):
        raise checkpoint.CheckpointError(f"{out} is not a drafter: refusing to write into it")


def _read(source: Path) -> dict[str, np.ndarray]:
    if source.suffix == ".safetensors":
        if not source.is_file():
            raise checkpoint.CheckpointError(f"{source} is missing")
        entries = safetensors_io.read_header(source)
        odd = [name for name, e in entries.items() if e.dtype not in safetensors_io.DTYPES]
        if odd:
            raise checkpoint.CheckpointError(f"{source}: {', '.join(odd)}: not floating-point")
        return {n: safetensors_io.read_tensor(e).astype(np.float32) for n, e in entries.items()}
    return torch_io.read_state_dict(source)


def _renamed(source: Path, tensors: dict[str, np.ndarray], mapping: Mapping[str, str]):
    """By the mapping, else without the prefixes of wrappers, and under `encoder.`."""
    known = names(OrderConfig())
    problems = [f"the mapping names {name}, which is not in the file" for name in mapping]
    problems = [p for p, name in zip(problems, mapping, strict=True) if name not in tensors]
    problems += [
        f"the mapping leads to {name}, which is none of {', '.join(sorted(known))}"
        for name in mapping.values()
        if name not in known
    ]
    result = {}
    for name, value in tensors.items():
        new = mapping.get(name)
        if new is None:
            new = PREFIX.sub("", name)
            if re.match(r"layers\.\d+\.|norm\.", new):
                new = f"encoder.{new}"
            if new == "pos_embed":
                new, value = "pos_embed.weight", value[0] if value.shape[:1] == (1,) else value
        if new in result:
            problems.append(f"two tensors are {new}")
        result[new] = value
    if problems:
        raise checkpoint.error_of(source, problems)
    return result


def _shape_of(tensors: dict[str, np.ndarray]) -> OrderConfig:
    """The published shape, with the positions and alternatives that the file has.

    No file says what its norms add to variances; PyTorch's default is taken.
    """
    config = OrderConfig(norm_eps=1e-5)
    changes = {
        field: min(len(tensors[name]), most)
        for field, name, most in (
            ("max_block", "pos_embed.weight", 4096),
            ("num_alternatives", "head.weight", config.num_top),
        )
        if name in tensors and tensors[name].ndim == 2 and len(tensors[name])
    }
    return dataclasses.replace(config, **changes)


def _leaves(tensor: np.ndarray, leaves: tuple[str, ...], expected) -> dict[str, np.ndarray]:
    """Splits a tensor among its leaves and turns `[out, in]` into their shapes."""
    if not np.isfinite(tensor).all():
        raise ValueError("holds numbers that are not finite")
    if not tensor.ndim:
        raise ValueError("is a single number")
    if len(tensor) % len(leaves):
        raise ValueError(f"its rows are not divisible by {len(leaves)}")
    result = {}
    for leaf, part in zip(leaves, np.split(tensor, len(leaves)), strict=True):
        shape = expected[leaf]
        wanted: tuple[int, ...] = shape if leaf == "position" else (math.prod(shape),)
        if leaf.endswith("kernel"):
            # Heads are the last axes of what they come from, and the first of what they go to.
            inputs = 2 if leaf.endswith("output/kernel") else 1
            wanted = (math.prod(shape[inputs:]), math.prod(shape[:inputs]))
        if part.shape != wanted:
            if leaf == "input_0/kernel" and part.shape[:1] == wanted[:1] and part.ndim == 2:
                raise ValueError(
                    f"reads {part.shape[1]} features a position where ours reads {wanted[-1]}: it "
                    "was trained on other features, and cannot draft here"
                )
            raise ValueError(f"expected {[wanted[0] * len(leaves), *wanted[1:]]}")
        if leaf.endswith("kernel"):
            part = part.T
        result[leaf] = np.ascontiguousarray(part).reshape(shape)
    return result
