"""Passes that a drafter would take, from traces of plain decoding, without running the target.

Decoding follows the plain decoder's path whatever is drafted, so its recorded readings are all
that a drafter sees of the path; which of them it sees depends on how far it got. Exact for drafters
that read the path alone. SPOT also reads what the last pass saw off it, which these traces lack:
it takes fewer passes than this.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spot_jax.commit import Rule
from spot_jax.config import Sampling
from spot_jax.draft import Oracle
from spot_jax.draft.context import DraftContext, Drafter, evidence_of
from spot_jax.state import Reading, State
from train import traces as traces_lib

# Positions beyond this are not replayed by the oracle.
MAX_POSITION = 2048
# Points that are drafted at together.
BATCH = 128


# NumPy arrays on the host, JAX arrays inside `jit`.
Values = Any


class Points(NamedTuple):
    """A batch of trace points with what is known of their blocks; see `traces.Traces`."""

    top_log_probs: Values
    top_tokens: Values
    log_doubt: Values
    entropy: Values
    read_masked: Values
    root_masked: Values
    tokens: Values
    order: Values
    start: Values
    key: Values


def take_points(traces: traces_lib.Traces, index: np.ndarray) -> Points:
    """Looks up points and their blocks."""
    block = traces.block[index]
    of_point = (getattr(traces, name)[index] for name in Points._fields[:6])
    return Points(*of_point, *(getattr(traces, name)[block] for name in Points._fields[6:]))


def future_step(points: Points):
    """After how many steps from the root each position is committed, `[B, L]`, and which are.

    The steps of a block follow each other, and each commits something.
    """
    known = points.root_masked & (points.order >= 0)
    last = jnp.iinfo(points.order.dtype).max
    first = jnp.min(jnp.where(known, points.order, last), axis=-1, keepdims=True)
    return jnp.where(known, points.order - first, last), known


def future_state(points: Points, depth) -> State:
    """The state `depth [B]` true steps after the root. Masked tokens are -1."""
    step, _ = future_step(points)
    masked = points.root_masked & (step >= depth[:, None])
    return State(jnp.where(masked, -1, points.tokens), masked)


def context_of(points: Points, sampling: Sampling, rule: Rule) -> DraftContext:
    """The context that a drafter is given at each point."""
    first = points.top_tokens[..., 0], points.top_log_probs[..., 0]
    steps = jnp.zeros(len(points.start), jnp.int32)
    parent, reading = State(points.tokens, points.read_masked), Reading(*first, *points[:4])
    return DraftContext(
        root=future_state(points, steps),
        parent=parent,
        reading=reading,
        evidence=evidence_of(parent, reading),
        fresh=jnp.ones(len(points.start), bool),
        keys=jax.random.wrap_key_data(points.key),
        positions=points.start[:, None] + jnp.arange(points.tokens.shape[1])[None],
        sampling=sampling,
        rule=rule,
    )


@functools.partial(jax.jit, static_argnames=("budget", "info"))
def _advances(drafter: Drafter | None, points: Points, budget: int, info: traces_lib.TraceInfo):
    context = context_of(points, info.sampling, info.rule)
    tree = (drafter or _oracle(points, context.positions))(context, budget)

    def deeper(depth, carry):
        steps, walking = carry
        state = future_state(points, jnp.full(len(points.start), depth))
        same = (tree.tokens == state.tokens[:, None]) & (tree.masked == state.masked[:, None])
        walking = walking & jnp.any(jnp.all(same, axis=-1) & tree.valid, axis=-1)
        return steps + walking, walking

    rows = len(points.start)
    start = jnp.ones(rows, jnp.int32), jnp.ones(rows, bool)
    return jax.lax.fori_loop(1, budget, deeper, start)[0]


def _oracle(points: Points, positions) -> Oracle:
    """The oracle of these points, its order laid out on a canvas."""
    rows = jnp.arange(len(points.start))[:, None]
    canvas = jnp.full((len(points.start), MAX_POSITION), -1, points.order.dtype)
    return Oracle(canvas.at[rows, positions].set(points.order))


def replay(
    drafter: Drafter | None, traces: traces_lib.Traces, info: traces_lib.TraceInfo, budget: int
) -> tuple[np.ndarray, np.ndarray]:
    """Steps and passes of each block of the traces, `[M]` each.

    Args:
      drafter: any that needs nothing but its context; None is the oracle.
      traces: of plain decoding; points of a block in the order of its passes.
      info: how the traces were made.
      budget: states a pass, root included.

    Raises:
      ValueError: the traces are of drafted decoding.
    """
    if info.budget > 1:
        raise ValueError("traces of drafted decoding cannot be replayed: collect without a drafter")
    points = np.argsort(traces.block, kind="stable")
    steps = np.bincount(traces.block, minlength=len(traces.start))
    end = np.cumsum(steps)
    here = end - steps
    passes = np.ones(len(traces.start), np.int64)
    # Only the points at which a pass begins are drafted at, and those of all blocks together.
    while len(active := np.flatnonzero(here < end)):
        for begin in range(0, len(active), BATCH):
            blocks = active[begin : begin + BATCH]
            index = np.resize(points[here[blocks]], BATCH)
            found = np.asarray(_advances(drafter, take_points(traces, index), budget, info))
            here[blocks] += found[: len(blocks)]
        passes[active] += 1
    return steps + 1, passes
