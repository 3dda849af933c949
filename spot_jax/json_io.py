"""JSON objects read strictly, and the error of files that cannot be used."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint, or a request about one, that cannot be honoured."""


def error_of(where: str | Path, problems: Sequence[str]) -> CheckpointError:
    """One error for all `problems`: on one line where there is one, as a list otherwise."""
    if len(problems) == 1:
        return CheckpointError(f"{where}: {problems[0]}")
    return CheckpointError("\n  - ".join([f"{where}: {len(problems)} problems", *problems]))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def is_a(value: Any, kind: Any) -> bool:
    """Whether a JSON value has the type of a field: a truth is no number, and NaN is none either.

    An integer is a float too; infinity and what overflows are not.
    """
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind


def misfit(name: str, value: Any, kind: Any) -> str:
    """What is wrong about the value of a key that `is_a` refuses."""
    if value is None:
        return f"has no {name}"
    what = "a finite number" if kind is float else f"of type {kind.__name__}"
    return f"{name} must be {what}, found {value!r}"


def distinct(message: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """An `object_pairs_hook` that raises ValueError(message) where a key occurs twice."""

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            raise ValueError(message)
        return names

    return hook
