"""Writes a target as a Hugging Face directory, in its family's own names."""

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spot_jax import (
    checkpoint,
    families,
    hf_config,
    hf_rope,
    hf_weights,
    safetensors_io,
)
from spot_jax.config import TargetConfig
from spot_jax.family import Family, Place
from spot_jax.json_io import CheckpointError, error_of
from spot_jax.models import target
from spot_jax.tokenizer_files import tokenizer_files

_CONFIG = "config.json"


def save_hf(
    params: Mapping[str, Any],
    config: TargetConfig,
    directory: str | Path,
    *,
    dtype: str = "float32",
    tokenizer_from: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Writes config.json, model.safetensors and the files of a tokenizer.

    Args:
      params: flat tree of `models.target.param_shapes(config)`, JAX or NumPy arrays.
      config: the target's.
      directory: created if absent; see `check_output`.
      dtype: of the written weights.
      tokenizer_from: directory whose tokenizer files are copied.
      overwrite: replaces the files of these names.
    """
    hf_weights.check_params(params, config)
    write_hf(params.__getitem__, config, directory, dtype, tokenizer_from, overwrite)


def write_hf(
    read: Callable[[str], Any],
    config: TargetConfig,
    directory: str | Path,
    dtype: str,
    tokenizer_from: str | Path | None,
    overwrite: bool,
) -> None:
    """`save_hf` of leaves that are read when they are needed, and held while they are."""
    hf_weights.check_dtype(dtype)
    check_output(directory, overwrite)
    family = families.by_name(config.family)
    config_json = _config_json(config, family, dtype)
    _check_sayable(config, config_json)
    shapes = target.param_shapes(config)
    places = family.places(shapes)
    tensors, kept = {}, set()
    for tensor, (leaves, index) in places.items():
        parts = [shapes[leaf][len(index) :] for leaf in leaves]
        tensors[tensor] = (sum(part[0] for part in parts), *parts[0][1:])
        kept |= {tensor} if hf_weights.always_float32(leaves[0]) else set()
    text = json.dumps(config_json, indent=2) + "\n"
    out = Path(os.path.abspath(directory))
    building = out.with_name(f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir()
        for file in tokenizer_files(tokenizer_from):
            (building / file.name).write_bytes(file.read_bytes())
        safetensors_io.write_file(
            building / safetensors_io.SINGLE, tensors, _tensors(read, places), dtype, float32=kept
        )
        (building / _CONFIG).write_text(text, encoding="utf-8")
        out.mkdir(exist_ok=True)
        # Last in, first out: what has no config.json does not load.
        (out / _CONFIG).unlink(missing_ok=True)
        for file in sorted(building.iterdir(), key=lambda file: file.name == _CONFIG):
            os.replace(file, out / file.name)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def check_output(directory: str | Path, overwrite: bool) -> None:
    """Raises unless `save_hf` may create `directory`, or replace the model in it.

    Only a directory that is empty, or holds a model in one file as `save_hf` leaves it, is ever
    written to. Its other files are left alone.
    """
    out = Path(directory)
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise CheckpointError(f"{out} is not a directory")
    names = {path.name for path in out.iterdir()}
    if not names:
        return
    if checkpoint.is_checkpoint(out) or _CONFIG not in names:
        what = "a converted checkpoint" if checkpoint.is_checkpoint(out) else f"without {_CONFIG}"
        raise CheckpointError(f"{out} is {what}, no Hugging Face model: refusing to write into it")
    if not overwrite:
        raise CheckpointError(f"{out} already exists: pass --overwrite to replace it")
    weights = {n for n in names if n.endswith((".safetensors", ".bin")) or ".index." in n}
    others = sorted(weights - {safetensors_io.SINGLE})
    if others:
        raise CheckpointError(f"{out} also holds weights in {others[0]}: refusing to write into it")


def _check_sayable(config: TargetConfig, config_json: dict[str, Any]) -> None:
    """Raises unless the family's own keys say the whole configuration."""
    back = hf_config.target_config(config_json)
    wrong = [
        f"{name} {value!r} would be read back as {_flat(back).get(name)!r}"
        for name, value in _flat(config).items()
        if value != _flat(back).get(name)
    ]
    if wrong:
        where = f"config.json of family {config.family} cannot say this configuration"
        raise error_of(where, wrong)


def _flat(config: TargetConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    experts = fields.pop("experts") or {}
    return fields | {f"experts.{name}": value for name, value in experts.items()}


def _tensors(read: Callable[[str], Any], places: Mapping[str, Place]) -> Iterator[np.ndarray]:
    """The tensors in order; those of one leaf are neighbours, so each leaf is read once."""
    leaves: dict[str, np.ndarray] = {}
    for place in places.values():
        leaves = {name: leaf for name, leaf in leaves.items() if name in place.leaves}
        for name in place.leaves:
            if name not in leaves:
                leaves[name] = np.asarray(read(name))
        parts = [leaves[name][place.index] for name in place.leaves]
        yield parts[0] if len(parts) == 1 else np.concatenate(parts)


def _config_json(config: TargetConfig, family: Family, dtype: str) -> dict[str, Any]:
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
        **hf_rope.rope_json(config, family.rotary_share),
        "block_size": config.block_length,
        "mask_token_id": config.mask_id,
        "eos_token_id": list(config.eos_ids),
        "pad_token_id": config.pad_id,
        "torch_dtype": dtype,
    }
    if config.num_token_ids < config.vocab_size:
        result["num_token_ids"] = config.num_token_ids
    return result


def _experts_json(config: TargetConfig, family: Family) -> dict[str, Any]:
    if config.experts is None:
        return {}
    experts = dataclasses.asdict(config.experts)
    experts["num_shared"] = experts["shared_size"] // experts["intermediate_size"]
    return {name: experts[field] for field, name in family.expert_fields.items()}
