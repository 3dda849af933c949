"""Hugging Face directories to targets and back, and `load_target`, which takes either form."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from spot_jax import checkpoint, families, hf_weights, safetensors_io
from spot_jax.config import TargetConfig
from spot_jax.models import target

# What a tokenizer may consist of; copied along, never interpreted here.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


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
            files=_tokenizer_files(hf_dir),
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
        files=_tokenizer_files(tokenizer_from),
        overwrite=overwrite,
    )


def save_hf(
    params: dict[str, Any],
    config: TargetConfig,
    directory: str | Path,
    *,
    dtype: str = "float32",
    tokenizer_from: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a Hugging Face directory in the family's own names: config.json, model.safetensors.

    Args:
      params: flat tree of `models.target.param_shapes(config)`, JAX or NumPy arrays.
      config: the target's.
      directory: created if absent; files of other names in it are left alone.
      dtype: of the written weights.
      tokenizer_from: directory whose tokenizer files are copied.
      overwrite: replaces config.json and model.safetensors.
    """
    hf_weights.check_dtype(dtype)
    hf_weights.check_params(params, config)
    family = families.by_name(config.family)
    experts = {} if config.experts is None else dataclasses.asdict(config.experts)
    given = dataclasses.asdict(config) | {f"experts.{k}": v for k, v in experts.items()}
    needed = dict(family.fixed) | {f"experts.{k}": v for k, v in family.fixed_experts.items()}
    if any(given.get(field) != value for field, value in needed.items()):
        raise checkpoint.CheckpointError(f"family {family.name} needs {needed}")
    directory = Path(directory)
    existing = sorted(p.name for p in directory.glob("*.safetensors*"))
    existing += ["config.json"] * (directory / "config.json").exists()
    if set(existing) - {safetensors_io.SINGLE, "config.json"} or (existing and not overwrite):
        raise checkpoint.CheckpointError(f"{directory} already holds {', '.join(existing)}")
    shapes = target.param_shapes(config)
    places = family.places(shapes)
    tensors, kept = {}, set()
    for tensor, (leaves, index) in places.items():
        parts = [shapes[leaf][len(index) :] for leaf in leaves]
        tensors[tensor] = (sum(part[0] for part in parts), *parts[0][1:])
        kept |= {tensor} if hf_weights.always_float32(leaves[0]) else set()
    arrays = (_rows(params, place) for place in places.values())
    text = json.dumps(_config_json(config, family, dtype), indent=2) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").unlink(missing_ok=True)
        for file in _tokenizer_files(tokenizer_from):
            (directory / file.name).write_bytes(file.read_bytes())
        safetensors_io.write_file(
            directory / safetensors_io.SINGLE, tensors, arrays, dtype, float32=kept
        )
        (directory / "config.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise checkpoint.CheckpointError(f"cannot write {directory}: {error}") from error


def to_hf(
    model: target.TargetModel,
    directory: str | Path,
    *,
    dtype: str = "float32",
    tokenizer_from: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """`save_hf` of a target."""
    save_hf(
        model.params,
        model.config,
        directory,
        dtype=dtype,
        tokenizer_from=tokenizer_from,
        overwrite=overwrite,
    )


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


def _rows(params: dict[str, Any], place: families.Place) -> np.ndarray:
    parts = [np.asarray(params[leaf])[place.index] for leaf in place.leaves]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _load_converted(
    directory: Path, dtype: str | None, block_length: int | None, mask_token_id: int | None
) -> target.TargetModel:
    params, metadata = checkpoint.read_checkpoint(
        directory, kind="target", dtype=dtype, keep=hf_weights.always_float32
    )
    config = stored_config(directory, metadata, block_length, mask_token_id)
    hf_weights.check_params(params, config)
    return target.TargetModel(params, config)


def _tokenizer_files(directory: str | Path | None) -> list[Path]:
    if directory is None:
        return []
    return [p for name in TOKENIZER_FILES if (p := Path(directory) / name).is_file()]


def _config_json(config: TargetConfig, family: families.Family, dtype: str) -> dict[str, Any]:
    """The config.json from which `hf_config.target_config` reads `config` back."""
    fields = {
        name if isinstance(name, str) else name[0]: getattr(config, field)
        for field, name in family.fields.items()
    }
    required = {name: allowed[0] for name, allowed in family.required.items() if allowed}
    result = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_types[0] if family.model_types else "llama",
        **required,
        **fields,
        **_experts_json(config, family),
        "rope_theta": config.rope_theta,
        "block_size": config.block_length,
        "mask_token_id": config.mask_id,
        "eos_token_id": list(config.eos_ids),
        "pad_token_id": config.pad_id,
        "torch_dtype": dtype,
    }
    share = config.rotary_dim / config.head_dim if config.rotary_dim else 1.0
    if share != family.rotary_share:
        result["partial_rotary_factor"] = share
    if config.rope_scaling is not None:
        scaling = dataclasses.asdict(config.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
        result["rope_scaling"] = {name: value for name, value in scaling.items() if value}
    if config.num_token_ids < config.vocab_size:
        result["num_token_ids"] = config.num_token_ids
    return result


def _experts_json(config: TargetConfig, family: families.Family) -> dict[str, Any]:
    if config.experts is None:
        return {}
    experts = dataclasses.asdict(config.experts)
    experts["num_shared"] = experts["shared_size"] // experts["intermediate_size"]
    return {name: experts[field] for field, name in family.expert_fields.items()}


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
