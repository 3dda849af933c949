"""What the commands tell people, all of it on stderr."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from spot_jax.costs_io import Table
from spot_jax.decode import DecodeConfig
from spot_jax.generate import Stats

_COLUMNS = {
    "drafter": "drafter",
    "budget": "budget",
    "requests": "requests",
    "tokens": "tokens",
    "steps": "steps",
    "passes": "passes",
    "steps_per_pass": "steps/pass",
    "tokens_per_second": "tokens/s",
    "compile_seconds": "compile s",
}


@contextlib.contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[list[int], list[Any]], None]]:
    """A bar on a terminal; gives the callback that moves it by a batch."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with shown:
        task = shown.add_task(name, total=total)
        yield lambda places, _: shown.advance(task, len(places))


def summary(name: str, config: DecodeConfig, stats: Stats) -> dict[str, Any]:
    """One decoder's object of `--stats`."""
    said = {
        "drafter": name,
        "budget": config.budget,
        "temperature": config.sampling.temperature,
        "requests": stats.requests,
        "tokens": stats.tokens,
        "steps": stats.steps,
        "passes": stats.passes,
        "steps_per_pass": round(stats.steps_per_pass, 4),
        "tokens_per_second": round(stats.tokens_per_second, 3),
        "compile_seconds": round(stats.compile_seconds, 3),
    }
    return said | ({"passes_at": dict(stats.passes_at)} if stats.passes_at else {})


def table(summaries: Sequence[dict[str, Any]]) -> None:
    """The summary of every decoder."""
    if not summaries:
        return
    shown = Grid(box=None, padding=(0, 2, 0, 0))
    for name, title in _COLUMNS.items():
        shown.add_column(title, justify="left" if name == "drafter" else "right", no_wrap=True)
    for row in summaries:
        shown.add_row(*(_cell(row[name]) for name in _COLUMNS))
    console = Console(stderr=True, width=max(Console(stderr=True).width, 100))
    console.print(shown)
    for row in summaries:
        if "passes_at" in row:
            total = max(sum(row["passes_at"].values()), 1)
            shares = (f"{100 * n / total:.0f} % of {size}" for size, n in row["passes_at"].items())
            console.print(f"passes by the states checked in them: {', '.join(shares)}")


def cost_table(table: Table) -> None:
    """What passes and drafts take, and the steps a pass must make to be as fast as plain ones."""
    title = (
        f"{table.target}, {table.rule}, temperature {table.temperature:g}, {table.dtype}, batch of "
        f"{table.batch_size} behind {table.context} tokens: {table.environment['device']}"
    )
    shown = Grid("N", "pass ms", "ratio", title=title)
    for name in table.draft_ms:
        shown.add_column(f"{name} ms", justify="right")
        shown.add_column("even at", justify="right")
    one = table.evaluate_ms[0]
    for place, (size, time) in enumerate(zip(table.sizes, table.evaluate_ms, strict=True)):
        row = [str(size), f"{time:.2f}", f"{time / one:.2f}"]
        for draft in table.draft_ms.values():
            row += [f"{draft[place]:.2f}", f"{(time + draft[place]) / one:.2f}"]
        shown.add_row(*row)
    Console(stderr=True, width=max(Console(stderr=True).width, 100)).print(shown)


def bench_tables(records: Sequence[dict[str, Any]]) -> None:
    """Steps per pass of every task, a table for each target, rule and temperature."""
    console = Console(stderr=True, width=max(Console(stderr=True).width, 100))
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[n] for n in ("target", "rule", "temperature")), []).append(
            record
        )
    for (target, rule, temperature), group in groups.items():
        tasks = list(dict.fromkeys(record["task"] for record in group))
        title = f"{target}, {rule}, temperature {temperature:g}: steps per pass"
        shown = Grid("drafter", "N", *tasks, "all", "tokens/s", "equal", title=title)
        for drafter, budget in dict.fromkeys((r["drafter"], r["budget"]) for r in group):
            row = {r["task"]: r for r in group if (r["drafter"], r["budget"]) == (drafter, budget)}
            whole = list(row.values())
            counted = [r for r in whole if "passes" in r]
            total = {n: sum(r[n] for r in counted) for n in ("steps", "passes", "tokens")}
            seconds = sum(r["tokens"] / max(r["tokens_per_second"], 1e-9) for r in counted)
            shown.add_row(
                drafter,
                str(budget),
                *(_steps_per_pass(row.get(task)) for task in tasks),
                f"{total['steps'] / max(total['passes'], 1):.2f}"
                if len(counted) == len(whole)
                else "",
                f"{total['tokens'] / max(seconds, 1e-9):.1f}",
                f"{sum(r['equal'] for r in whole)}/{sum(r['requests'] for r in whole)}",
            )
        console.print(shown)


def _steps_per_pass(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    if "passes" not in record:
        return record["verdict"]
    return f"{record['steps_per_pass']:.2f}" + " (tie)" * (record["verdict"] == "TIE")


def equality(difference: dict[str, Any] | None) -> None:
    """Whether drafted and plain answers are equal."""
    said = "equal: the same tokens in the same steps"
    if difference is not None:
        said = (
            f"DIFFERENT from request {difference['id']!r}, position {difference['position']}: "
            f"plain {difference['plain']}, drafted {difference['drafted']}; "
            "spot-jax verify tells ties from errors"
        )
    Console(stderr=True).print(said, soft_wrap=True, highlight=False, markup=False)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
