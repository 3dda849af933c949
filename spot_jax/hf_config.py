"""Reads the configuration of a target from the JSON files of a Hugging Face directory."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spot_jax import families, hf_rope, json_io
from spot_jax.config import Experts, TargetConfig
from spot_jax.family import Family
from spot_jax.tokenizer_files import TokenizerIds, read_tokenizer_ids


def target_config(
    config_json: Mapping[str, Any],
    *,
    directory: str | Path = "",
    generation_json: Mapping[str, Any] | None = None,
    tokenizer: TokenizerIds | None = None,
    block_length: int | None = None,
    mask_token_id: int | None = None,
) -> TargetConfig:
    """The configuration of a checkpoint, or one error with everything that is wrong about it.

    Args:
      config_json: content of config.json.
      directory: where it is from; names like `SDAR-8B-Chat-b32` tell the block length.
      generation_json: content of generation_config.json.
      tokenizer: ids of the tokenizer, if there is one.
      block_length: goes before what the checkpoint says.
      mask_token_id: goes before what the checkpoint says.
    """
    called = _directory_names(directory)
    family = families.find(config_json, called, generation_json)
    problems: list[str] = []
    fields: dict[str, Any] = dict(family.fixed) | {"family": family.name}
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(TargetConfig)}
    for field, names in family.fields.items():
        names = (names,) if isinstance(names, str) else names
        given = (config_json[name] for name in names if config_json.get(name) is not None)
        value = next(given, family.defaults.get(field))
        if isinstance(value, str) and value == family.defaults.get(field):
            continue  # Follows from other fields.
        if json_io.is_a(value, kinds[field]):
            fields[field] = kinds[field](value)
        else:
            problems.append(json_io.misfit(names[0], value, kinds[field]))
    for field, formula in family.defaults.items():
        if field not in fields and isinstance(formula, str):
            _derive(fields, field, problems)
    for name, allowed in family.required.items():
        value = config_json.get(name)
        if value is not None and value not in allowed:
            problems.append(f"{name} {value!r} is not supported")
    layer_types = config_json.get("layer_types") or []
    if not isinstance(layer_types, list):
        problems.append(f"layer_types must be a list, found {layer_types!r}")
    elif any(kind != "full_attention" for kind in layer_types):
        problems.append(f"layer_types {layer_types} are not all full_attention")
    frequency = config_json.get("moe_layer_freq")
    frequencies = frequency if isinstance(frequency, list) else [frequency]
    if any(each not in (None, 1) for each in frequencies):
        problems.append(f"moe_layer_freq {frequency!r} is not 1 for every layer")
    if family.expert_fields:
        fields["experts"] = _experts(config_json, family, problems)

    fields |= hf_rope.read_rope(
        config_json, fields.get("head_dim", 0), family.rotary_share, problems
    )
    fields["block_length"] = _block_length(
        config_json, called, block_length, family.block_length, problems
    )
    vocab_size = fields.get("vocab_size", 0)
    fields |= _special_ids(
        (config_json, generation_json or {}), family, vocab_size, tokenizer, mask_token_id, problems
    )
    known = config_json.get("num_token_ids", vocab_size)
    if not json_io.is_a(known, int):
        problems.append(json_io.misfit("num_token_ids", known, int))
    fields["num_token_ids"] = known
    if tokenizer is not None:
        fields["num_token_ids"] = tokenizer.num_ids
        if tokenizer.num_ids > vocab_size > 0:
            problems.append(
                f"the tokenizer has ids up to {tokenizer.num_ids - 1}, the vocabulary {vocab_size}"
            )
    if not problems:
        try:
            return TargetConfig(**fields)
        except (TypeError, ValueError) as error:
            problems.append(str(error))
    raise json_io.error_of(Path(directory) / "config.json", problems)


def read_target_config(
    directory: Path, *, block_length: int | None = None, mask_token_id: int | None = None
) -> TargetConfig:
    """`target_config` of the files in a Hugging Face directory."""
    generation = directory / "generation_config.json"
    return target_config(
        json_io.read_json(directory / "config.json"),
        directory=directory,
        generation_json=json_io.read_json(generation) if generation.is_file() else None,
        tokenizer=read_tokenizer_ids(directory),
        block_length=block_length,
        mask_token_id=mask_token_id,
    )


def _derive(fields: dict[str, Any], field: str, problems: list[str]) -> None:
    """Fills in `num_kv_heads` or `head_dim`, which some families' configs leave out."""
    heads, width = fields.get("num_heads", 0), fields.get("hidden_size", 0)
    if heads < 1 or width < 1:
        return  # Reported already, or about to be.
    if field == "num_kv_heads":
        fields[field] = heads
    elif width % heads:
        problems.append(f"has no head_dim, and hidden size {width} is no multiple of {heads} heads")
    else:
        fields[field] = width // heads


def _experts(config_json: Mapping[str, Any], family: Family, problems: list[str]) -> Experts | None:
    fields: dict[str, Any] = dict(family.fixed_experts)
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Experts)}
    for field, name in family.expert_fields.items():
        value, kind = config_json.get(name), kinds.get(field, int)
        if json_io.is_a(value, kind):
            fields[field] = kind(value)
        else:
            problems.append(json_io.misfit(name, value, kind))
    shared = fields.pop("num_shared", 0)
    if problems:
        return None
    fields["shared_size"] = shared * fields["intermediate_size"]
    try:
        return Experts(**fields)
    except ValueError as error:
        problems.append(str(error))
        return None


def _directory_names(directory: str | Path) -> list[str]:
    """What the directory calls the model; in the cache, `models--ORG--NAME/snapshots/HASH`."""
    if not str(directory):
        return []
    path = Path(directory).absolute()
    hub = [path.parent.parent.name] if path.parent.name == "snapshots" else []
    return [path.name, *hub]


def _block_length(
    config_json: Mapping[str, Any],
    names: Sequence[str],
    override: int | None,
    default: int | None,
    problems: list[str],
) -> int:
    """The caller's, else what config.json and the directory's name say, if they agree, else the
    family's default."""
    if override is not None:
        return override
    found = {name: config_json.get(name) for name in ("block_size", "block_length", "bd_size")}
    for name in names:
        suffix = re.search(r"-b(4|8|16|32|64)$", name)
        if suffix:
            found[f"the name {name}"] = int(suffix[1])
    found = {where: value for where, value in found.items() if value is not None}
    if found:
        value, *others = found.values()
        if type(value) is int and all(other == value for other in others):
            return value
        said = ", ".join(f"{where} says {value!r}" for where, value in found.items())
        problems.append(f"block length is unclear: {said}: pass --block-length")
    elif default is not None:
        return default
    else:
        problems.append("says no block length: pass --block-length")
    return 1


def _special_ids(
    sources: Sequence[Mapping[str, Any]],
    family: Family,
    vocab_size: int,
    tokenizer: TokenizerIds | None,
    mask: int | None,
    problems: list[str],
) -> dict[str, Any]:
    """Fields `mask_id`, `eos_ids` and `pad_id`; `sources` are config and generation config."""
    real = vocab_size in family.vocab_sizes
    mask = sources[0].get("mask_token_id") if mask is None else mask
    mask = family.mask_id if mask is None and real else mask
    eos = [number for source in sources for number in _ids(source, "eos_token_id", problems)]
    pads = [number for source in sources for number in _ids(source, "pad_token_id", problems)]
    if tokenizer is not None:
        eos += [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        pads += [] if tokenizer.pad_id is None else [tokenizer.pad_id]
    # A real checkpoint's config may name one end of text where its chat template uses another.
    eos = list(dict.fromkeys([*eos, *(family.eos_ids if real else ())]))
    pad = [*pads, *([family.pad_id] if real else eos), 0][0]
    if mask is None:
        problems.append("has no mask_token_id: pass --mask-token-id")
    if not eos:
        problems.append("has no end-of-text id: set eos_token_id in config.json")
    roles = [("mask", mask), *(("eos", number) for number in eos), ("pad", pad)]
    for role, number in roles if vocab_size else ():
        if number is not None and (type(number) is not int or not 0 <= number < vocab_size):
            problems.append(f"{role} token id {number!r} is outside the vocabulary of {vocab_size}")
    if mask is not None and mask in eos:
        problems.append(f"mask token id {mask} is also an end-of-text id: pass --mask-token-id")
    return {"mask_id": mask, "eos_ids": tuple(eos), "pad_id": pad}


def _ids(source: Mapping[str, Any], name: str, problems: list[str]) -> list[int]:
    value = source.get(name)
    value = [] if value is None else value if isinstance(value, list) else [value]
    bad = [item for item in value if type(item) is not int]
    if bad:
        problems.append(f"{name} {source[name]!r} is not an integer or a list of integers")
    return [item for item in value if type(item) is int]
