"""Tables of measured costs as JSON lines, read strictly."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spot_jax.costs import Costs
from spot_jax.json_io import CheckpointError, is_a, misfit


class Table(NamedTuple):
    """What was measured of one target, in milliseconds.

    Attributes:
      target: name of its directory.
      rule, temperature, dtype, batch_size: how it decoded.
      context: tokens of the prompts.
      sizes: states of a pass.
      evaluate_ms: of a pass of each size.
      draft_ms: by drafter, of drafting a tree of each size.
      environment: device and versions, for people.
    """

    target: str
    rule: str
    temperature: float
    dtype: str
    batch_size: int
    context: int
    sizes: list[int]
    evaluate_ms: list[float]
    draft_ms: dict[str, list[float]]
    environment: dict[str, Any]

    def costs(self, drafter: str) -> Costs:
        """Of one of the drafters; without its name, as if drafting took no time."""
        draft = self.draft_ms.get(drafter, [0.0] * len(self.sizes))
        return Costs.measured(self.sizes, self.evaluate_ms, draft)


def line_of(table: Table) -> str:
    """A table as a line of JSON."""
    return json.dumps(table._asdict()) + "\n"


def read_tables(path: str | Path) -> list[Table]:
    """The tables of a file, a line each; raises CheckpointError, naming line and key."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable: {error}") from error
    if not lines:
        raise CheckpointError(f"{path} is empty")
    tables = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where}: no JSON: {error}") from error
        if problem := _problem(value):
            raise CheckpointError(f"{where}: {problem}")
        tables.append(Table(**value))
    return tables


def _problem(value: Any) -> str | None:
    """What is wrong about the object of a line, or None."""
    if not isinstance(value, dict):
        return f"must be a JSON object, found {type(value).__name__}"
    kinds = Table.__annotations__
    odd = [name for name in value if name not in kinds]
    if odd:
        return f"has the unknown key {odd[0]}: {', '.join(kinds)} expected"
    for name, kind in kinds.items():
        plain = getattr(kind, "__origin__", kind)
        if not is_a(value.get(name), plain):
            return misfit(name, value.get(name), plain)
    sizes = value["sizes"]
    if not all(is_a(size, int) for size in sizes):
        return f"sizes must be whole numbers, found {sizes!r}"
    if sizes[:2] != [1, 2] or sizes != sorted(set(sizes)):
        return f"sizes must ascend from 1 and 2, found {sizes!r}"
    times = {"evaluate_ms": value["evaluate_ms"]}
    times |= {f"draft_ms of {name}": of for name, of in value["draft_ms"].items()}
    for name, of in times.items():
        if problem := _problem_of_times(name, of, sizes):
            return problem
    return None


def _problem_of_times(name: str, times: Any, sizes: Sequence[int]) -> str | None:
    if not isinstance(times, list):
        return misfit(name, times, list)
    if len(times) != len(sizes):
        return f"{name} must have {len(sizes)} times, one a size, found {len(times)}"
    for time in times:
        if not is_a(time, float):
            return misfit(f"each time of {name}", time, float)
    if name == "evaluate_ms" and min(times) <= 0:
        return f"evaluate_ms must be above 0, found {times!r}"
    if name != "evaluate_ms" and (times[0] or min(times) < 0):
        return f"{name} must begin with 0 and be 0 or more, found {times!r}"
    return None
