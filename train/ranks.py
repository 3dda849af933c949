"""Which rank formulas to draft, from traces of plain decoding: Spiffy's choice and a better one.

Every point of a trace tells which formulas its future went through: what was committed after its
root, in the ranks of the reading that a drafter has there.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spot_jax.commit import TopN
from spot_jax.config import Sampling
from spot_jax.draft.context import committed, coupled_draws
from spot_jax.draft.ranks import Formula, position_ranks
from train.replay import Points, context_of, take_points
from train.traces import TraceInfo, Traces

NONE = -1


class Futures(NamedTuple):
    """Formulas that the futures of trace points went through.

    Attributes:
      formulas: all that occur; each in the order of commits that was seen most often.
      ids: int `[P, S]`, the formula after each step behind the root; `NONE` where there is no such
        step, or none that needs a check, or none in the ranks that a reading holds.
    """

    formulas: list[Formula]
    ids: np.ndarray

    def counts(self) -> np.ndarray:
        """Points whose future went through each formula."""
        return np.bincount(self.ids[self.ids >= 0], minlength=len(self.formulas))


def futures(traces: Traces, info: TraceInfo, depth: int, coupled: bool = False) -> Futures:
    """Rewinds traces: each point's future in the ranks of the point's own reading.

    Args:
      traces: points with their blocks.
      info: how the traces were made.
      depth: steps to look ahead.
      coupled: see `RankOptions`. A state reached in an order other than that of its formula then
        has other draws: it counts here, and is drafted with the formula's.
    """
    num, size = len(traces.block), 256
    parts = []
    for begin in range(0, num, size):
        points = take_points(traces, np.arange(begin, begin + size) % num)
        parts.append(jax.device_get(_relabel(points, info.sampling, info.rule, coupled)))
    position, token, step = (np.concatenate(x)[:num] for x in zip(*parts, strict=True))
    return number([_steps(position[p], token[p], step[p], depth) for p in range(num)], depth)


def number(paths: Sequence[Formula], depth: int) -> Futures:
    """Numbers the states that paths go through; paths in other orders meet in equal states."""
    known: dict[frozenset, int] = {}
    orders: list[Counter[Formula]] = []
    ids = np.full((len(paths), depth), NONE)
    for row, path in zip(ids, paths, strict=True):
        state = frozenset()
        for i, step in enumerate(path):
            state = state | set(step)
            row[i] = known.setdefault(state, len(known))
            if row[i] == len(orders):
                orders.append(Counter())
            orders[row[i]][path[: i + 1]] += 1
    return Futures([order.most_common(1)[0][0] for order in orders], ids)


def join(parts: Sequence[Futures]) -> Futures:
    """The futures of several traces as one."""
    known: dict[frozenset, int] = {}
    formulas: list[Formula] = []
    ids = []
    for part in parts:
        place = np.full(len(part.formulas) + 1, NONE)
        for i, formula in enumerate(part.formulas):
            place[i] = known.setdefault(_state(formula), len(known))
            if place[i] == len(formulas):
                formulas.append(formula)
        ids.append(place[part.ids])
    return Futures(formulas, np.concatenate(ids))


def covered(found: Futures, chosen: Sequence[int]) -> np.ndarray:
    """Steps of each point's future, from the first, whose formulas are all among the chosen."""
    held = np.zeros(len(found.formulas) + 1, bool)
    held[list(chosen)] = True
    return np.cumprod(held[found.ids], axis=1).sum(axis=1)


def greedy_coverage(found: Futures, size: int) -> list[int]:
    """Formulas, best first, that maximise what drafting them would accept: the sum of `covered`.

    Adds the formula that gains most each time: a step at every point that misses just it, and the
    steps behind that were in the set already. Ends early when nothing is left to gain.
    """
    chosen: list[int] = []
    held = np.zeros(len(found.formulas) + 1, bool)
    ids = np.concatenate([found.ids, np.full((len(found.ids), 1), NONE)], axis=1)
    while len(chosen) < size:
        inside = held[ids]
        length = np.argmin(inside, axis=1)[:, None]
        missing = np.take_along_axis(ids, length, axis=1)[:, 0]
        np.put_along_axis(inside, length, True, axis=1)
        gain = np.where(missing >= 0, np.argmin(inside, axis=1) - length[:, 0], 0)
        total = np.bincount(missing + 1, gain, minlength=len(held))[1:]
        if not total.any():
            break
        chosen.append(int(np.argmax(total)))
        held[chosen[-1]] = True
    return chosen


def accumulated(found: Futures, size: int, degree: int = 1) -> list[int]:
    """Spiffy's selection (arXiv 2509.18085): the most frequent formulas that hang together.

    Of the formulas of one step, and those with a parent among the chosen, takes the highest score
    each time. A parent is one step shorter: a pair less, or a step that occurs in the traces.

    Args:
      found: futures of the calibration points.
      size: formulas to choose.
      degree: 1, as published, scores a formula by its count and those of its parents; 0 by its
        count alone. With many formulas 1 fills up with children of one frequent parent.
    """
    counts = found.counts()
    parents = _parents(found)
    score = counts + [degree * sum(counts[p] for p in of) for of in parents]
    open_ = np.array([len(formula) == 1 for formula in found.formulas], bool)
    children: list[list[int]] = [[] for _ in parents]
    for i, of in enumerate(parents):
        for parent in of:
            children[parent].append(i)
    chosen: list[int] = []
    while len(chosen) < size and open_.any():
        chosen.append(int(np.argmax(np.where(open_, score, -1))))
        open_[children[chosen[-1]]] = True
        open_[chosen] = False
    return chosen


SELECTIONS = {
    "spiffy": accumulated,
    "counts": functools.partial(accumulated, degree=0),
    "coverage": greedy_coverage,
}


def _parents(found: Futures) -> list[set[int]]:
    state = [_state(formula) for formula in found.formulas]
    known = {s: i for i, s in enumerate(state)}
    parents = [{known[s - {pair}] for pair in s if s - {pair} in known} for s in state]
    for before, here in zip(found.ids[:, :-1].T, found.ids[:, 1:].T, strict=True):
        for parent, child in {*zip(before.tolist(), here.tolist(), strict=True)}:
            if child >= 0:
                parents[child].add(parent)
    return parents


def _state(formula: Formula) -> frozenset[tuple[int, int]]:
    return frozenset(itertools.chain(*formula))


@functools.partial(jax.jit, static_argnames=("coupled",))
def _relabel(points: Points, sampling: Sampling, rule: TopN, coupled: bool):
    """Rank, token rank (`NONE` if it has none) and step after the root of every position."""
    context = context_of(points, sampling, rule)
    reading = context.reading
    known = points.root_masked & (points.order >= 0)
    last = jnp.iinfo(points.order.dtype).max
    first = jnp.min(jnp.where(known, points.order, last), axis=-1, keepdims=True)
    step = jnp.where(known, points.order - first, NONE)
    tokens = reading.top_tokens
    if coupled:
        earlier = known[:, None] & (points.order[:, None] < points.order[..., None])
        counts = committed(points.root_masked)[:, None] + jnp.sum(earlier, axis=-1)

        def draws(position, counts, top_log_probs, top_tokens):
            one = reading._replace(
                top_log_probs=top_log_probs[:, None], top_tokens=top_tokens[:, None]
            )
            alone = context._replace(reading=one, positions=position[:, None])
            return coupled_draws(alone, counts, top_tokens.shape[-1]).tokens[:, 0]

        tokens = jax.vmap(draws, in_axes=1, out_axes=1)(
            context.positions, counts, reading.top_log_probs, tokens
        )
    same = tokens == points.tokens[..., None]
    token = jnp.where(jnp.any(same, axis=-1), jnp.argmax(same, axis=-1), NONE)
    return position_ranks(context, coupled), token, step


def _steps(position, token, step, depth: int) -> Formula:
    """One point's path. Its last step ends the block or the row: nothing follows to be checked."""
    path = []
    for i in range(min(depth, int(step.max(initial=0)))):
        here = np.flatnonzero(step == i)
        here = here[np.argsort(position[here])]
        if not len(here) or (token[here] < 0).any() or (position[here] >= len(position)).any():
            break
        path.append(tuple(zip(position[here].tolist(), token[here].tolist(), strict=True)))
    return tuple(path)
