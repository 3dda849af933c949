"""The rotary embedding of config.json, in the spelling of transformers 4 or of 5."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spot_jax import json_io
from spot_jax.config import RopeScaling, TargetConfig

# Key of config.json -> field of `RopeScaling`.
_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}


def read_rope(
    config_json: Mapping[str, Any], head_dim: int, default_share: float, problems: list[str]
) -> dict[str, float | int | RopeScaling | None]:
    """Fields of `TargetConfig` about the rotary embedding; what is wrong is added to `problems`."""
    theta: Any = config_json.get("rope_theta")
    share: Any = config_json.get("partial_rotary_factor")
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
            scaling = _scaling(name, kind, rope, config_json, problems)
    if not json_io.is_a(theta, float):
        problems.append(json_io.misfit("rope_theta", theta, float))
        theta = 1.0
    elif theta <= 0:
        problems.append(f"rope_theta must be positive, found {theta}")
    share = default_share if share is None else share
    if not json_io.is_a(share, float) or not 0 < share <= 1:
        problems.append(f"partial_rotary_factor must be in (0, 1], found {share!r}")
        share = 1.0
    return {
        "rope_theta": float(theta),
        # Cut off as transformers does it, but for a product that rounding put below an integer.
        "rotary_dim": 0 if share == 1 else int(head_dim * share + 1e-6),
        "rope_scaling": scaling,
    }


def rope_json(config: TargetConfig, default_share: float) -> dict[str, Any]:
    """The keys from which `read_rope` reads the embedding of `config` back."""
    result: dict[str, Any] = {"rope_theta": config.rope_theta}
    share = config.rotary_dim / config.head_dim if config.rotary_dim else 1.0
    if int(config.head_dim * share) < config.rotary_dim:  # As transformers computes it.
        share = math.nextafter(share, 1.0)
    if share != default_share:
        result["partial_rotary_factor"] = share
    if config.rope_scaling is not None:
        fields = dataclasses.asdict(config.rope_scaling)
        fields["attention_factor"] = fields["attention_factor"] or None  # 0: from the factor.
        scaling = {key: fields[field] for key, field in _SCALING.items()}
        result["rope_scaling"] = {"rope_type": config.rope_scaling.rope_type} | scaling
    return result


def _scaling(
    name: str, kind: Any, rope: Mapping[str, Any], config_json: Mapping[str, Any], problems
) -> RopeScaling | None:
    ours = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unknown = sorted(key for key in rope.keys() - _SCALING.keys() - ours if rope[key] is not None)
    if kind not in ("linear", "llama3", "yarn") or unknown:
        what = f"of type {kind!r}" + f" with {', '.join(unknown)}" * bool(unknown)
        problems.append(f"{name} {what} is not supported, only default, linear, llama3 and yarn")
        return None
    given = {key: rope[key] for key in _SCALING if rope.get(key) is not None}
    wrong = [f"{key} {value!r}" for key, value in given.items() if not json_io.is_a(value, float)]
    if wrong or "factor" not in given:
        problems.append(f"{name}: {', '.join(wrong) or 'has no factor'}: a number is needed")
        return None
    fields = {_SCALING[key]: value for key, value in given.items()}
    trained = config_json.get("max_position_embeddings")
    if json_io.is_a(trained, int):
        fields.setdefault("original_max_position", trained)
    try:
        return RopeScaling(rope_type=kind, **fields)
    except ValueError as error:
        problems.append(str(error))
        return None
