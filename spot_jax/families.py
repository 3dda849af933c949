"""Which family a checkpoint is of.

Remote code is never run: what a family's row does not say about a checkpoint is read from its own
JSON files, or is an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spot_jax import json_io, refusals
from spot_jax.family import Family
from spot_jax.family_rows import FAMILIES


def by_name(name: str) -> Family:
    """The family that a `TargetConfig` names."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise json_io.CheckpointError(f"unknown family {name!r}: supported are {_supported()}")


def find(
    config_json: Mapping[str, Any],
    names: Sequence[str] = (),
    generation_json: Mapping[str, Any] | None = None,
) -> Family:
    """The family of a checkpoint: by `architectures`, then `auto_map`, then `model_type`.

    Of several names the first that is known counts. A name in `architectures` that is not known is
    never overruled by a known `model_type`, but for one that is a family's own: families of
    different arithmetic share model types.

    Args:
      config_json: content of config.json.
      names: of the model, such as that of its directory.
      generation_json: content of generation_config.json.

    Raises:
      CheckpointError: for a model that no family has, or that cannot be decoded exactly.
    """
    architectures = _names(config_json, "architectures", list)
    classes = [*architectures, *_names(config_json, "auto_map", dict)]
    model_type = config_json.get("model_type")
    what = f"architectures {architectures} with model_type {model_type!r}"
    family = _by_class(classes)
    if family is None:
        own = (f for f in FAMILIES if not architectures or f.own_model_type)
        family = next((f for f in own if model_type in f.model_types), None)
    why = refusals.reason(classes, (config_json, generation_json or {}), model_type)
    if family is not None and why is None:
        why = refusals.reason_of_name(family.name, names)
        what += f" ({', '.join(names)})" * bool(names)
    if why is not None:
        raise json_io.CheckpointError(f"{what} cannot be decoded exactly: {why}")
    if family is None:
        raise json_io.CheckpointError(f"{what} is not supported: supported are {_supported()}")
    return family


def _by_class(classes: Sequence[str]) -> Family | None:
    for name in classes:
        for family in FAMILIES:
            if name in family.architectures or (family.marker and family.marker in name.lower()):
                return family
    return None


def _names(config_json: Mapping[str, Any], key: str, kind: type) -> list[str]:
    """Names of classes: a list of them, or `module.Class` by what loads it."""
    value = config_json.get(key)
    if value is None:
        return []
    if not isinstance(value, kind):
        raise json_io.CheckpointError(f"{key} of config.json must not be {value!r}")
    items = list(value.values()) if isinstance(value, dict) else value
    return [item.rpartition(".")[2] for item in items if isinstance(item, str)]


def _supported() -> str:
    return ", ".join(f"{f.name} ({', '.join(f.architectures)})" for f in FAMILIES)
