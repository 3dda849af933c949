"""Commit rules as JSON objects: the fields of `TopN` or of `Threshold`."""

import dataclasses
from typing import Any

from spot_jax.commit import Rule, Threshold, TopN

_FIELDS: dict[str, tuple[type, ...]] = {
    "n": (int, list),
    "score": (str,),
    "order_temperature": (int, float),
    "threshold": (int, float),
    "strict": (bool,),
}


def rule_to_json(rule: TopN | Threshold) -> dict[str, Any]:
    """The fields of a rule."""
    fields = dataclasses.asdict(rule)
    return {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}


def rule_from_json(value: Any) -> TopN | Threshold:
    """The rule of such an object; fields that are absent have their defaults, but for `n`.

    Raises ValueError for any other.
    """
    if not isinstance(value, dict) or "n" not in value:
        raise ValueError(f"rule must be an object with n, found {value!r}")
    cls = Threshold if "threshold" in value else TopN
    names = [field.name for field in dataclasses.fields(cls)]
    odd = [name for name in value if name not in names]
    if odd:
        raise ValueError(f"rule has the unknown keys {', '.join(odd)}: {', '.join(names)} expected")
    for name, x in value.items():
        items = x if isinstance(x, list) else [x]
        if type(x) not in _FIELDS[name] or (
            name == "n" and any(type(item) is not int for item in items)
        ):
            raise ValueError(f"rule has the unexpected {name} {x!r}")
    fields: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in value.items()}
    return cls(**fields)


def rule_name(rule: Rule) -> str:
    """A rule as `--rule` spells it, with what that cannot say behind."""
    if isinstance(rule, Threshold):
        name = f"threshold:{'' if rule.strict else '>='}{rule.threshold:g}"
        return name if rule.n == 1 else f"{name} (at least {rule.n})"
    if isinstance(rule, TopN) and not rule.order_temperature:
        score = rule.score.replace("_", "-")
        return score if rule.n == 1 else f"n:{rule.n}" + f" by {score}" * (score != "confidence")
    return str(rule)
