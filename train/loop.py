"""The loop shared by the trainers: progress bar, metrics as JSON lines, checkpoints, resuming."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.parallel import TrainState


class Checkpoints:
    """Numbered Orbax checkpoints of a `TrainState` in one directory; the newest two are kept.

    Orbax writes to a temporary name and renames, so a kill at any moment leaves whole steps only.
    """

    def __init__(self, directory: str | Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self._manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest state, placed like `like` (any device count), or None if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored: Any = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        return restored

    def save(self, state: TrainState) -> None:
        """Writes `state` under its step and waits until it is whole on disk."""
        self._manager.save(int(state.step), args=ocp.args.StandardSave(state))
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def run_steps(
    state: TrainState,
    *,
    total_steps: int,
    batches: Iterator[Any],
    step_for: Callable[[int], Callable],
    make_batch: Callable[[Any, int], Any],
    out: str | Path,
    log_every: int = 20,
    save_every: int = 200,
) -> TrainState:
    """Trains from wherever `out` left off up to `total_steps`.

    Args:
      state: fresh state; replaced by the newest checkpoint under `out/checkpoints`.
      total_steps: where to stop.
      batches: deterministic stream from step 0; skipped up to the resumed step.
      step_for: parallel step function to use at a given step (phases differ in their loss).
      make_batch: `(batch, step) ->` what the step function takes.
      out: directory; `metrics.jsonl` is appended to.
      log_every: steps between lines of metrics, which are means since the last line.
      save_every: steps between checkpoints; the last step is always saved.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(out / "checkpoints")
    state = checkpoints.restore(state) or state
    first = int(state.step)
    for _ in range(first):
        next(batches)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    since, pending = time.perf_counter(), []
    with Progress(*columns, console=console) as bar, open(out / "metrics.jsonl", "a") as log:
        task = bar.add_task("training", total=total_steps, completed=first)
        for step in range(first, total_steps):
            state, sums = step_for(step)(state, make_batch(next(batches), step))
            pending.append(sums)
            done = step + 1
            if done % log_every == 0 or done == total_steps:
                totals = jax.tree.map(lambda *x: float(sum(x)), *pending)
                seconds = (time.perf_counter() - since) / len(pending)
                count = max(totals.pop("count"), 1.0)
                line = {"step": done, **{k: v / count for k, v in totals.items()}}
                line |= {"count": count, "seconds_per_step": round(seconds, 4)}
                log.write(json.dumps(line) + "\n")
                log.flush()
                bar.update(task, completed=done, description=f"loss {line['loss']:.4f}")
                since, pending = time.perf_counter(), []
            if done % save_every == 0 or done == total_steps:
                checkpoints.save(state)
    checkpoints.close()
    return state
