"""Calibrates the drafters that need traces but no training.

python -m train.calibrate --traces runs/traces-t0 --out ranks.json --method coverage
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from spot_jax.draft.ranks import Formula, RankOptions
from spot_jax.passes import MAX_BUDGET
from spot_jax.ranks_io import save_ranks
from train import ranks
from train.traces import TraceInfo, Traces, read_traces

Method = Literal["spiffy", "counts", "coverage"]
METHODS: tuple[Method, ...] = ("spiffy", "counts", "coverage")
# Steps to look ahead. Looking further ahead found nothing at budgets up to 32.
DEPTH = 12


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """Formulas, most useful first, with the share of points that passed through each.

    Attributes:
      accepted: drafted states accepted a point if all are drafted, on the calibration traces.
      points: of the calibration traces.
    """

    formulas: list[Formula]
    shares: list[float]
    accepted: float
    points: int


def calibrate(
    sets: Sequence[tuple[TraceInfo, Traces]],
    method: Method,
    size: int,
    depth: int,
    coupled: bool = False,
) -> Calibrated:
    """Selects `size` formulas of up to `depth` steps from traces."""
    found = ranks.join([ranks.futures(traces, info, depth, coupled) for info, traces in sets])
    chosen = ranks.SELECTIONS[method](found, size)
    counts, points = found.counts(), len(found.ids)
    return Calibrated(
        [found.formulas[i] for i in chosen],
        [float(counts[i] / points) for i in chosen],
        float(ranks.covered(found, chosen).mean()),
        points,
    )


def some_blocks(traces: Traces, number: int, seed: int) -> Traces:
    """A random choice of blocks; all if there are fewer."""
    order = np.random.default_rng(seed).permutation(len(traces.start))
    return traces.select(np.sort(order[:number]))


def main(
    traces: list[Path],
    out: Path,
    method: Method = "coverage",
    budget: int = 32,
    blocks: int = 50,
    depth: int = DEPTH,
    coupled: bool = False,
    seed: int = 0,
) -> None:
    """Selects rank formulas and writes them as JSON, for `spot_jax.load_ranks`.

    Args:
      traces: directories made by `train.collect`, of one block length.
      out: file to write.
      method: `coverage` maximises the accepted length; `spiffy` is the published selection, by
        the counts of a formula and of its parents; `counts` goes by its own count alone.
      budget: states a pass, root included. Smaller budgets take the first formulas (`coverage`,
        `counts`) or those of highest score at run time (`spiffy`).
      blocks: calibration blocks, shared evenly by the directories.
      depth: steps to look ahead.
      coupled: token ranks of the draws under the target's own noise, not of the plain
        probabilities. No difference at temperature 0.
      seed: of the choice of blocks.
    """
    for name, value, least in (("budget", budget, 2), ("blocks", blocks, 1), ("depth", depth, 1)):
        if value < least:
            raise SystemExit(f"--{name} must be at least {least}, got {value}")
    if budget > MAX_BUDGET:
        raise SystemExit(f"--budget must be at most {MAX_BUDGET}, got {budget}")
    if not out.parent.is_dir():
        raise SystemExit(f"--out: {out.parent} is not a directory")
    try:
        read = [read_traces(directory) for directory in traces]
    except ValueError as error:
        raise SystemExit(str(error)) from error
    lengths = {info.block_length for info, _ in read}
    if len(lengths) > 1:
        raise SystemExit(f"--traces are of several block lengths: {sorted(lengths)}")
    share = -(-blocks // len(read))
    sets = [(info, some_blocks(found, share, seed)) for info, found in read]
    number = sum(len(found.start) for _, found in sets)
    if number < blocks:
        print(f"warning: only {number} blocks to calibrate on", file=sys.stderr)
    result = calibrate(sets, method, budget - 1, depth, coupled)
    if not result.formulas:
        raise SystemExit(f"{', '.join(map(str, traces))}: no step ahead that needs a check")
    save_ranks(
        out,
        result.formulas,
        result.shares,
        RankOptions(coupled=coupled, prune=method == "spiffy"),
        method=method,
        block_length=lengths.pop(),
        calibrated_on={
            "targets": sorted({info.target for info, _ in sets}),
            "temperatures": sorted({float(info.sampling.temperature) for info, _ in sets}),
            "blocks": number,
            "points": result.points,
        },
    )
    print(
        f"{len(result.formulas)} formulas from {number} blocks; "
        f"{result.accepted:.2f} drafts accepted a pass there",
        file=sys.stderr,
    )


if __name__ == "__main__":
    tyro.cli(main)
