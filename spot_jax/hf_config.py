"""Reads the configuration of a target from the JSON files of a Hugging Face directory."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spot_jax import checkpoint, families
from spot_jax.config import Experts, RopeScaling, TargetConfig


class TokenizerIds(NamedTuple):
    """What a tokenizer says about ids: one past the largest, and those of its special tokens."""

    num_ids: int
    eos_id: int | None
    pad_id: int | None


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
    family = families.find(config_json, called)
    problems: list[str] = []
    fields: dict[str, Any] = dict(family.fixed) | {"family": family.name}
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(TargetConfig)}
    for field, names in family.fields.items():
        names = (names,) if isinstance(names, str) else names
        given = (config_json[name] for name in names if config_json.get(name) is not None)
        value = next(given, family.defaults.get(field))
        if isinstance(value, str) and value == family.defaults.get(field):
            continue  # Follows from other fields.
        if _is_a(value, kinds[field]):
            fields[field] = kinds[field](value)
        else:
            problems.append(_bad_value(names[0], value, kinds[field]))
    for field, formula in family.defaults.items():
        if field not in fields and isinstance(formula, str):
            _derive(fields, field, problems)
    for name, allowed in family.required.items():
        value = config_json.get(name)
        if value is not None and value not in allowed:
            problems.append(f"{name} {value!r} is not supported")
    if any(kind != "full_attention" for kind in config_json.get("layer_types") or ()):
        problems.append(f"layer_types {config_json['layer_types']} are not all full_attention")
    frequency = config_json.get("moe_layer_freq")
    frequencies = frequency if isinstance(frequency, list) else [frequency]
    if any(each not in (None, 1) for each in frequencies):
        problems.append(f"moe_layer_freq {frequency!r} is not 1 for every layer")
    if family.expert_fields:
        fields["experts"] = _experts(config_json, family, problems)

    fields |= _rope(config_json, fields.get("head_dim", 0), family.rotary_share, problems)
    fields["block_length"] = _block_length(
        config_json, called, block_length, family.block_length, problems
    )
    vocab_size = fields.get("vocab_size", 0)
    fields |= _special_ids(
        (config_json, generation_json or {}), family, vocab_size, tokenizer, mask_token_id, problems
    )
    fields["num_token_ids"] = config_json.get("num_token_ids", vocab_size)
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
    raise checkpoint.error_of(Path(directory) / "config.json", problems)


def read_target_config(
    directory: Path, *, block_length: int | None = None, mask_token_id: int | None = None
) -> TargetConfig:
    """`target_config` of the files in a Hugging Face directory."""
    generation = directory / "generation_config.json"
    return target_config(
        checkpoint.read_json(directory / "config.json"),
        directory=directory,
        generation_json=checkpoint.read_json(generation) if generation.is_file() else None,
        tokenizer=read_tokenizer_ids(directory),
        block_length=block_length,
        mask_token_id=mask_token_id,
    )


def read_tokenizer_ids(directory: Path) -> TokenizerIds | None:
    """Ids of the tokenizer in `directory`, None if there is none."""
    names = ("tokenizer.json", "vocab.json")
    vocabulary = next((n for n in names if (directory / n).is_file()), None)
    if vocabulary is None:
        if (directory / "tokenizer.model").is_file():
            raise checkpoint.CheckpointError(
                f"{directory}: tokenizer.model alone is not readable, tokenizer.json is needed: "
                f"load it with transformers' AutoTokenizer and save it with save_pretrained"
            )
        return None
    try:
        return _tokenizer_ids(directory, checkpoint.read_json(directory / vocabulary))
    except (AttributeError, KeyError, TypeError) as error:
        raise checkpoint.CheckpointError(
            f"{directory}: tokenizer files are not in a known form: {error!r}"
        ) from error


def _tokenizer_ids(directory: Path, vocabulary: dict[str, Any]) -> TokenizerIds:
    ids = vocabulary  # vocab.json
    if "model" in vocabulary:  # tokenizer.json
        ids = vocabulary["model"]["vocab"]
        if isinstance(ids, list):  # Unigram: [token, score] in order of ids.
            ids = {token: index for index, (token, _) in enumerate(ids)}
        ids = ids | {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            settings |= checkpoint.read_json(directory / name)
    for number, token in settings.get("added_tokens_decoder", {}).items():
        ids[token["content"]] = int(number)
    if (directory / "added_tokens.json").is_file():
        ids |= checkpoint.read_json(directory / "added_tokens.json")

    def special(role: str) -> int | None:
        token = settings.get(role)
        token = token["content"] if isinstance(token, dict) else token
        return None if token is None else ids.get(token)

    return TokenizerIds(
        max(ids.values(), default=-1) + 1, special("eos_token"), special("pad_token")
    )


def _is_a(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _bad_value(name: str, value: Any, kind: Any) -> str:
    if value is None:
        return f"has no {name}"
    return f"{name} must be of type {kind.__name__}, found {value!r}"


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


def _experts(
    config_json: Mapping[str, Any], family: families.Family, problems: list[str]
) -> Experts | None:
    fields: dict[str, Any] = dict(family.fixed_experts)
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Experts)}
    for field, name in family.expert_fields.items():
        value, kind = config_json.get(name), kinds.get(field, int)
        if _is_a(value, kind):
            fields[field] = kind(value)
        else:
            problems.append(_bad_value(name, value, kind))
    shared = fields.pop("num_shared", 0)
    if problems:
        return None
    fields["shared_size"] = shared * fields["intermediate_size"]
    try:
        return Experts(**fields)
    except ValueError as error:
        problems.append(str(error))
        return None


def _rope(
    config_json: Mapping[str, Any], head_dim: int, default_share: float, problems: list[str]
) -> dict[str, float | int | RopeScaling | None]:
    """Fields of the rotary embedding, from the spelling of transformers 4 or of 5."""
    theta = config_json.get("rope_theta")
    share = config_json.get("partial_rotary_factor")
    scaling = None
    for name in ("rope_parameters", "rope_scaling"):
        rope = config_json.get(name) or {}
        if not isinstance(rope, dict):
            problems.append(f"{name} must be an object, found {rope!r}")
            continue
        theta = rope.get("rope_theta", theta)
        share = rope.get("partial_rotary_factor", share)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            scaling = _rope_scaling(name, kind, rope, config_json, problems)
    if theta is None or not _is_a(theta, float):
        problems.append(_bad_value("rope_theta", theta, float))
        theta = 1.0
    if theta <= 0:
        problems.append(f"rope_theta must be positive, found {theta}")
    share = default_share if share is None else share
    if not _is_a(share, float) or not 0 < share <= 1:
        problems.append(f"partial_rotary_factor must be in (0, 1], found {share!r}")
        share = 1.0
    return {
        "rope_theta": float(theta),
        "rotary_dim": 0 if share == 1 else int(head_dim * share),
        "rope_scaling": scaling,
    }


def _rope_scaling(
    name: str, kind: str, rope: Mapping[str, Any], config_json: Mapping[str, Any], problems
) -> RopeScaling | None:
    known = {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    }
    ours = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unknown = sorted(key for key in rope.keys() - known.keys() - ours if rope[key] is not None)
    if kind not in ("linear", "llama3", "yarn") or unknown:
        what = f"of type {kind!r}" + f" with {', '.join(unknown)}" * bool(unknown)
        problems.append(f"{name} {what} is not supported, only default, linear, llama3 and yarn")
        return None
    fields = {field: rope[key] for key, field in known.items() if rope.get(key) is not None}
    fields.setdefault("original_max_position", config_json.get("max_position_embeddings") or 0)
    wrong = [f"{field} {value!r}" for field, value in fields.items() if not _is_a(value, float)]
    if wrong or "factor" not in fields:
        problems.append(f"{name}: {', '.join(wrong) or 'has no factor'}: a number is needed")
        return None
    try:
        return RopeScaling(rope_type=kind, **fields)
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
    family: families.Family,
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
