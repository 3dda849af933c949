"""Pictures of `spot-jax bench`. Needs matplotlib, which the extra `plot` installs."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FIGURES = {"steps_per_pass": "steps per pass", "tokens_per_second": "tokens per second"}


def check() -> None:
    """Raises ValueError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'spot-jax[plot]'")


def draw(
    records: Sequence[dict[str, Any]], directory: Path, figures: Sequence[str] = tuple(FIGURES)
) -> Iterator[Path]:
    """Draws some `FIGURES` against the budget, a picture for each target, rule and temperature.

    Cells without figures are left out. Gives the paths of the pictures as they are written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    counted = [record for record in records if "passes" in record]
    names = ("target", "rule", "temperature")
    for group in dict.fromkeys(tuple(r[name] for name in names) for r in counted):
        chosen = [r for r in counted if tuple(r[name] for name in names) == group]
        tasks = list(dict.fromkeys(r["task"] for r in chosen))
        for figure in figures:
            picture, axes = pyplot.subplots(
                1, len(tasks), figsize=(3.2 * len(tasks) + 0.8, 3.4), sharey=True, squeeze=False
            )
            for axis, task in zip(axes[0], tasks, strict=True):
                _lines(axis, [r for r in chosen if r["task"] == task], figure)
                axis.set_title(task)
                axis.set_xlabel("states in one pass")
            axes[0][0].set_ylabel(FIGURES[figure])
            axes[0][-1].legend(fontsize="small")
            target, rule, temperature = group
            picture.suptitle(f"{target}, {rule}, temperature {temperature:g}")
            picture.tight_layout()
            rule = "".join(c if c.isalnum() or c in ".-" else "-" for c in rule)
            path = directory / f"{target}-{rule}-t{temperature:g}-{figure.replace('_', '-')}.png"
            picture.savefig(path, dpi=150)
            pyplot.close(picture)
            yield path


def _lines(axis, records: Sequence[dict[str, Any]], figure: str) -> None:
    for drafter in dict.fromkeys(r["drafter"] for r in records):
        points = sorted((r["budget"], r[figure]) for r in records if r["drafter"] == drafter)
        if drafter == "none":
            axis.axhline(points[0][1], color="grey", linestyle=":", label="plain")
            continue
        style = {"color": "black", "linestyle": "--"} if drafter == "oracle" else {"marker": "o"}
        axis.plot(*zip(*points, strict=True), label=drafter, **style)
    budgets = sorted({r["budget"] for r in records if r["drafter"] != "none"})
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [str(budget) for budget in budgets])
    axis.grid(alpha=0.3)
