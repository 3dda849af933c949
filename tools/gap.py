"""Where drafts fail, and how far their probabilities can be trusted.

    python -m tools.gap --count 20 --out runs/gap

Decodes held-out problems with a drafter and looks at every tree that it drafts: at which true state
the accepted path left it and why, and how often each drafted state came true beside the probability
that its value promises.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig, Request, advance, begin, draft, finish
from spot_jax.draft.tree import cut
from spot_jax.drafter_io import load_drafter
from tools.problems import drafters_of, load_words, task_batches
from train import curriculum

CAUSES = ("end", "order", "token", "budget")
LARGER = 4

_begin = jax.jit(begin)


class Drafted(NamedTuple):
    """What became of the trees of one pass.

    Attributes:
      cause: index into `CAUSES` of why no more was accepted; -1 where nothing was drafted.
      promised: probability of each drafted state `[B, N - 1]`; 0 where there is none.
      came: whether it came true.
    """

    cause: np.ndarray
    promised: np.ndarray
    came: np.ndarray


@functools.partial(jax.jit, static_argnames=("larger",), donate_argnums=(3,))
def _advance(target, config, request, loop, drafter, larger: int):
    loop, context = advance(target, config, request, loop)
    return draft(config, drafter, loop, context), context, cut(drafter(context, larger), context)


def passes(target, batch, config: DecodeConfig, drafter) -> Iterator[Drafted]:
    """Decodes a batch with a drafter; the trees pass by pass, judged by what came of them."""
    lengths = jnp.asarray(batch.lengths)
    request = Request(lengths, lengths + config.max_new_tokens, batch.keys)
    loop = _begin(target, batch.prompts, request, config)
    trees = []
    while not bool(jnp.all(loop.done)):
        loop, context, tree = _advance(
            target, config, request, loop, drafter, LARGER * config.budget
        )
        fresh = context.fresh & ~loop.done
        trees.append(jax.device_get((tree, context.positions, fresh)))
    order = np.asarray(finish(target, config, request, loop).trace.step)
    canvas = np.asarray(loop.canvas)
    for tree, where, fresh in trees:
        tokens, when = (np.take_along_axis(x, where, axis=1) for x in (canvas, order))
        yield judge(tree, tokens, when, fresh, config.budget)


def judge(tree, tokens, order, fresh, budget: int) -> Drafted:
    """What became of trees, of which the first `budget` slots are those that are checked.

    Args:
      tree: `[B, M, L]`, root first, in the order in which it grew.
      tokens, order: of plain decoding, `[B, L]`.
      fresh: rows that draft.
      budget: states that are checked.
    """
    known = tree.masked[:, 0] & (order >= 0)
    step = np.where(known, order, np.iinfo(order.dtype).max)
    depth = np.argsort(np.argsort(step, axis=1, kind="stable"), axis=1) + 1
    depth = np.where(known, depth, np.iinfo(np.int64).max)
    # A node is the true state at its own depth where what it commits is right and comes first.
    mine = tree.masked[:, :1] & ~tree.masked
    size = mine.sum(axis=-1)
    right = np.where(mine, tree.tokens == tokens[:, None], True).all(axis=-1)
    first = np.where(mine, depth[:, None] <= size[..., None], True).all(axis=-1)
    came = tree.valid & first & right & (size > 0)
    inner = known.sum(axis=1) - 1  # The step that completes a block needs no draft.
    reached = np.where(came[:, :budget], size[:, :budget], 0).max(axis=1)
    reached_in_all = np.where(came, size, 0).max(axis=1)
    # The true positions with another token: the order was foreseen.
    placed = tree.valid & first & (size == reached[:, None] + 1)
    cause = np.select(
        [reached >= inner, reached_in_all > reached, placed[:, :budget].any(axis=1)],
        [CAUSES.index("end"), CAUSES.index("budget"), CAUSES.index("token")],
        CAUSES.index("order"),
    )
    checked = tree.valid[:, 1:budget]
    promised = np.where(checked, np.exp(tree.log_value[:, 1:budget]), 0)
    drafts = fresh & (inner > 0)
    return Drafted(
        np.where(drafts, cause, -1), promised * drafts[:, None], came[:, 1:budget] & drafts[:, None]
    )


def reliability(promised, came, bins: int = 10) -> list[dict[str, float]]:
    """Drafted states by the probability promised: how many, the mean promise, the share true."""
    promised, came = promised.ravel(), came.ravel()
    which = np.minimum((promised * bins).astype(int), bins - 1)
    found = []
    for number in range(bins):
        here = (which == number) & (promised > 0)
        if here.any():
            found.append(
                {
                    "states": int(here.sum()),
                    "promised": float(promised[here].mean()),
                    "came_true": float(came[here].mean()),
                }
            )
    return found


def draw(curve: list[dict[str, float]], path: Path, title: str) -> None:
    """The reliability curve as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), layout="constrained")
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1)
    axis.plot([p["promised"] for p in curve], [p["came_true"] for p in curve], marker="o")
    axis.set(xlabel="probability promised", ylabel="share that came true", title=title)
    figure.savefig(path)


def main(
    out: Path,
    count: int = 20,
    budgets: Sequence[int] = (4, 16),
    temperatures: Sequence[float] = (0.0, 1.0),
    drafters: Sequence[str] = ("tree", "spot"),
    model: Path | None = None,
    spot: Path | None = None,
    max_new_tokens: int = 96,
    seed: int = 7,
) -> None:
    """Prints why drafts ended, writes `gap.jsonl` and reliability curves.

    Args:
      out: directory.
      count: held-out problems a task.
      budgets: states a pass.
      temperatures: of plain decoding.
      drafters: of `chain`, `tree` and `spot`.
      model: target directory; the bundled one by default.
      spot: drafter directory; the bundled one by default.
      max_new_tokens: longest answer.
      seed: of problems and noise.
    """
    target, words = load_words(model)
    known = drafters_of(target, [], sharpness=1.0)
    if spot is not None:
        known["spot"] = load_drafter(spot, target.config)
    batches = task_batches(words, curriculum.TASKS, count, seed, target.config.block_length)
    out.mkdir(parents=True, exist_ok=True)
    columns = [f"{cause} %" for cause in CAUSES]
    table = Table("drafter", "N", "T", *columns, title="why the accepted path ended")
    for temperature in temperatures:
        for name in drafters:
            for budget in budgets:
                config = DecodeConfig(
                    max_new_tokens=max_new_tokens,
                    budget=budget,
                    sampling=Sampling(temperature=temperature),
                )
                found = [
                    p for b in batches.values() for p in passes(target, b, config, known[name])
                ]
                cause = np.concatenate([p.cause for p in found])
                drafts = np.sum(cause >= 0)
                shares = [float(np.sum(cause == number) / drafts) for number in range(len(CAUSES))]
                promised, came = (
                    np.concatenate(x) for x in zip(*(p[1:] for p in found), strict=True)
                )
                curve = reliability(promised, came)
                title = f"{name}, N = {budget}, T = {temperature:g}"
                line = {
                    "drafter": name,
                    "budget": budget,
                    "temperature": temperature,
                    "trees": int(drafts),
                    "causes": dict(zip(CAUSES, shares, strict=True)),
                    "promised": float(promised.sum() / drafts),
                    "came_true": float(came.sum() / drafts),
                    "reliability": curve,
                }
                with open(out / "gap.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                draw(curve, out / f"{name}-{budget}-{temperature:g}.png", title)
                row = (f"{share:.1%}" for share in shares)
                table.add_row(name, str(budget), f"{temperature:g}", *row)
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
