"""Steps per pass of every drafter and budget on held-out problems, task by task, by replay.

    python -m tools.passes --out runs/passes.jsonl

The target decodes plainly once a temperature; the passes that each drafter would take follow from
its trace (`train.replay`), and are those that decoding with it takes. `spiffy`, `counts` and
`coverage` are calibrated anew for each temperature (`train.calibrate`), on blocks of training
problems, to twice the formulas of the largest budget: some do not fit every state.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from spot_jax import bundled
from spot_jax.commands import plots
from spot_jax.commit import TopN
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig
from spot_jax.draft import ConfidenceTree, Drafter, RankOptions, Spot, make_ranks
from spot_jax.draft.context import DraftContext
from spot_jax.state import DraftTree
from tools.problems import drafters_of, load_words, task_batches
from train import curriculum
from train import traces as traces_lib
from train.calibrate import DEPTH, METHODS, calibrate, some_blocks
from train.collect import collect_batch
from train.replay import replay

# Of the training problems to calibrate on, each of which has at least one block.
CALIBRATION_SEED = 5000


class Uncoupled(NamedTuple):
    """A drafter that does not see the noise: it drafts the likeliest tokens."""

    drafter: Drafter

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        sampling = dataclasses.replace(context.sampling, temperature=0.0)
        return self.drafter(context._replace(sampling=sampling), budget)


def calibration_traces(target, words, directories, config: DecodeConfig, info, blocks: int):
    """Blocks to calibrate on, of the given traces at this temperature, or of training problems."""
    found = [traces_lib.read_traces(directory) for directory in directories]
    found = [t for i, t in found if i.sampling == info.sampling]
    if not found:
        number, seed = -(-blocks // len(curriculum.TASKS)), CALIBRATION_SEED
        batches = task_batches(words, curriculum.TASKS, number, seed, info.block_length, "train")
        found = [
            collect_batch(target, b.prompts, jnp.asarray(b.lengths), b.keys, config)[0]
            for b in batches.values()
        ]
    return some_blocks(traces_lib.concatenate(found), blocks, seed=0)


def calibrated(part, info, budget: int) -> dict[str, Drafter | None]:
    """A drafter of rank formulas for every method."""
    drafters: dict[str, Drafter | None] = {}
    coupled = info.sampling.temperature > 0
    for method in METHODS:
        chosen = calibrate([(info, part)], method, 2 * budget - 1, DEPTH, coupled)
        options = RankOptions(coupled=coupled, prune=method == "spiffy")
        drafters[method] = make_ranks(chosen.formulas, chosen.shares, options)
    return drafters


def main(
    out: Path | None = None,
    count: int = 40,
    budgets: Sequence[int] = (2, 4, 8, 16, 32),
    temperatures: Sequence[float] = (0.0, 1.0),
    tasks: Sequence[str] = curriculum.TASKS,
    model: Path | None = None,
    spot: Sequence[Path] = (),
    traces: Sequence[Path] = (),
    blocks: int = 50,
    sharpness: float = ConfidenceTree().sharpness,
    uncoupled: bool = False,
    gsm8k: Path | None = None,
    max_new_tokens: int = 96,
    seed: int = 7,
    plot: Path | None = None,
) -> None:
    """Prints a table for each temperature.

    Args:
      out: JSON lines, one a cell; appended to.
      count: held-out problems a task.
      budgets: states a pass.
      temperatures: of plain decoding.
      tasks: of the curriculum.
      model: target directory; the bundled one by default.
      spot: drafter directories, the bundled one by default.
      traces: directories of traces of the same target (`train.collect`) to calibrate on;
        those of other temperatures are left out. By default training problems are decoded.
      blocks: calibration blocks.
      sharpness: of the confidence tree.
      uncoupled: above temperature 0 also SPOT without the target's noise, to see what that loses.
      gsm8k: its test lines, for one more task, of uncertain text.
      max_new_tokens: longest answer.
      seed: of problems and noise.
      plot: directory of pictures, one a temperature. Needs matplotlib.
    """
    if plot is not None:
        plots.check()
    target, words = load_words(model)
    drafters = drafters_of(target, spot, sharpness)
    length = target.config.block_length
    batches = task_batches(words, tasks, count, seed, length, gsm8k=gsm8k)
    lines = []
    for temperature in temperatures:
        sampling = Sampling(temperature=temperature)
        info = traces_lib.TraceInfo(
            target=str(model or "home"), block_length=length, sampling=sampling, rule=TopN()
        )
        config = DecodeConfig(max_new_tokens=max_new_tokens, sampling=sampling)
        found = {
            task: collect_batch(target, b.prompts, jnp.asarray(b.lengths), b.keys, config)[0]
            for task, b in batches.items()
        }
        whole = traces_lib.concatenate(list(found.values()))
        ends = np.cumsum([len(part.start) for part in found.values()])
        part = calibration_traces(target, words, traces, config, info, blocks)
        known = drafters | calibrated(part, info, max(budgets))
        if uncoupled and temperature:
            fitted = {name: d for name, d in drafters.items() if isinstance(d, Spot)}
            known |= {f"{name}, uncoupled": Uncoupled(d) for name, d in fitted.items()}
        table = Table("drafter", "N", *found, "all", title=f"steps per pass, T = {temperature}")
        for budget in budgets:
            for name, drafter in known.items():
                counts = np.stack(replay(drafter, whole, info, budget), axis=1)
                cells = [tuple(map(int, x.sum(axis=0))) for x in np.split(counts, ends[:-1])]
                for task, (steps, passes) in zip(found, cells, strict=True):
                    line = {
                        "target": (model or bundled.bundled_target()).name,
                        "rule": "confidence",
                        "temperature": temperature,
                        "task": task,
                        "drafter": name,
                        "budget": budget,
                        "steps": steps,
                        "passes": passes,
                        "steps_per_pass": steps / passes,
                    }
                    lines.append(line)
                    print(json.dumps(line), file=sys.stderr)
                    if out is not None:
                        with open(out, "a") as file:
                            file.write(json.dumps(line) + "\n")
                cells.append(tuple(map(sum, zip(*cells, strict=True))))
                table.add_row(name, str(budget), *(f"{s / p:.2f}" for s, p in cells))
        Console().print(table)
    if plot is not None:
        for path in plots.draw(lines, plot, ["steps_per_pass"]):
            print(path, file=sys.stderr)


if __name__ == "__main__":
    tyro.cli(main)
