"""Hugging Face directories to targets and back, and `load_target`, which takes either form."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from spot_jax import checkpoint, families, hf_weights, hf_write
from spot_jax.config import TargetConfig
from spot_jax.models import target
from spot_jax.tokenizer_files import tokenizer_files


class Conversion(NamedTuple):
    """What `convert` did, or would do."""

    config: TargetConfig
    dtype: str
    num_tensors: int
    num_params: int


def load_target(
    directory: str | Path,
    *,
    dtype: str | None = "float32",
    block_length: int | None = None,
    mask_token_id: int | None = None,
) -> target.TargetModel:
    """Loads a target from a Hugging Face directory, or from one that `convert` made.

    Args:
      directory: where it is.
      dtype: of the parameters; None keeps the stored one.
      block_length: goes before what the checkpoint says.
      mask_token_id: goes before what the checkpoint says.
    """
    hf_weights.check_dtype(dtype)
    directory = Path(directory)
    if checkpoint.is_checkpoint(directory):
        return _load_converted(directory, dtype, block_length, mask_token_id)
    plan = hf_weights.plan_conversion(
        directory, dtype=dtype, block_length=block_length, mask_token_id=mask_token_id
    )
    params = {}
    for name, shape in target.param_shapes(plan.config).items():
        # Waits for each leaf, so that the host holds one at a time.
        host = hf_weights.read_leaf(name, shape, plan.leaves[name], plan.dtype)
        params[name] = jax.block_until_ready(jax.device_put(host))
    return target.TargetModel(params, plan.config)


def convert(
    hf_dir: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    block_length: int | None = None,
    mask_token_id: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Conversion:
    """Converts a Hugging Face directory into an Orbax checkpoint with its tokenizer.

    Reads and writes a piece at a time: host memory holds some hundred megabytes, whatever the size
    of the weights (`tools/convert_memory.py` measures it).

    Args:
      hf_dir: directory with config.json, safetensors and, usually, a tokenizer.
      out: directory to create, whole or not at all.
      dtype: of the parameters; None keeps that of the source (float32 where float16 or mixed).
      block_length: needed where neither config.json nor the directory's name tells it.
      mask_token_id: needed where config.json does not tell it and the vocabulary is unusual.
      overwrite: replaces an existing checkpoint.
      dry_run: checks everything that can be checked without reading the weights, writes nothing.
    """
    hf_dir = Path(hf_dir)
    checkpoint.check_output(out, overwrite)
    if Path(out).resolve() in hf_dir.resolve().parents:
        raise checkpoint.CheckpointError(f"{out} contains {hf_dir}: refusing to overwrite it")
    plan = hf_weights.plan_conversion(
        hf_dir, dtype=dtype, block_length=block_length, mask_token_id=mask_token_id
    )
    shapes = target.param_shapes(plan.config)
    result = Conversion(
        plan.config,
        plan.dtype,
        sum(map(len, plan.leaves.values())),
        target.num_params(plan.config),
    )
    if dry_run:
        return result
    leaves = {
        name: jax.ShapeDtypeStruct(shape, hf_weights.leaf_dtype(name, plan.dtype))
        for name, shape in shapes.items()
    }
    with _progress() as bar:
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
        task = bar.add_task("converting", total=size)
        checkpoint.write_checkpoint(
            out,
            leaves,
            _metadata(plan.config, hf_dir.resolve().name),
            kind="target",
            files=tokenizer_files(hf_dir),
            overwrite=overwrite,
            pieces=lambda name: hf_weights.read_pieces(
                name, shapes[name], plan.leaves[name], plan.dtype, lambda n: bar.advance(task, n)
            ),
        )
    return result


def save_target(
    out: str | Path,
    params: dict[str, Any],
    config: TargetConfig,
    *,
    source: str,
    tokenizer_from: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint that `load_target` reads; `source` says, to people, what it was."""
    hf_weights.check_params(params, config)
    checkpoint.write_checkpoint(
        out,
        params,
        _metadata(config, source),
        kind="target",
        files=tokenizer_files(tokenizer_from),
        overwrite=overwrite,
    )


def to_hf(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    block_length: int | None = None,
    mask_token_id: int | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Writes a target, converted or not, as a Hugging Face directory with its tokenizer.

    Host memory holds one stack of like weights at a time (three where the family joins queries,
    keys and values). `hf_write.save_hf` writes a target that is in memory.

    Args:
      source: what `load_target` takes.
      out: directory to create; see `hf_write.check_output`.
      dtype: of the written weights; None keeps the stored one.
      block_length: goes before what the source says.
      mask_token_id: goes before what the source says.
      overwrite: replaces a model of one file.
    """
    source = Path(source)
    hf_weights.check_dtype(dtype)
    hf_write.check_output(out, overwrite)
    if Path(out).resolve() == source.resolve():
        raise checkpoint.CheckpointError(f"{out} is what is to be read: name another directory")
    config, stored, read = _leaves_of(source, dtype, block_length, mask_token_id)
    hf_write.write_hf(read, config, out, dtype or stored, source, overwrite)
    places = families.by_name(config.family).places(target.param_shapes(config))
    return Conversion(config, dtype or stored, len(places), target.num_params(config))


def stored_config(
    directory: Path,
    metadata: dict[str, Any],
    block_length: int | None = None,
    mask_token_id: int | None = None,
) -> TargetConfig:
    """The configuration in the metadata of a converted target; what is given goes before it."""
    changes = {"block_length": block_length, "mask_id": mask_token_id}
    try:
        return TargetConfig.from_json(
            metadata.get("config", {}) | {k: v for k, v in changes.items() if v is not None}
        )
    except (TypeError, ValueError) as error:
        raise checkpoint.CheckpointError(f"{directory / checkpoint.METADATA}: {error}") from error


def _metadata(config: TargetConfig, source: str) -> dict[str, Any]:
    return {"source": source, "config": dataclasses.asdict(config)}


def _leaves_of(
    source: Path, dtype: str | None, block_length: int | None, mask_token_id: int | None
) -> tuple[TargetConfig, str, Callable[[str], Any]]:
    """Configuration of a target, converted or not, its dtype, and what reads a leaf."""
    if not checkpoint.is_checkpoint(source):
        plan = hf_weights.plan_conversion(
            source, dtype=dtype, block_length=block_length, mask_token_id=mask_token_id
        )
        shapes = target.param_shapes(plan.config)
        return (
            plan.config,
            plan.dtype,
            lambda name: hf_weights.read_leaf(name, shapes[name], plan.leaves[name], plan.dtype),
        )
    metadata = checkpoint.read_metadata(source, kind="target")
    config = stored_config(source, metadata, block_length, mask_token_id)
    leaves = {
        name: jax.ShapeDtypeStruct(shape, stored)
        for name, (stored, shape) in metadata["arrays"].items()
    }
    hf_weights.check_params(leaves, config)
    read = functools.partial(checkpoint.read_array, source, metadata)
    return config, str(leaves["embed"].dtype), read


def _load_converted(
    directory: Path, dtype: str | None, block_length: int | None, mask_token_id: int | None
) -> target.TargetModel:
    params, metadata = checkpoint.read_checkpoint(
        directory, kind="target", dtype=dtype, keep=hf_weights.always_float32
    )
    config = stored_config(directory, metadata, block_length, mask_token_id)
    hf_weights.check_params(params, config)
    return target.TargetModel(params, config)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
