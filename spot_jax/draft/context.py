"""What a drafter is given, and the draws that it shares with the target."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from spot_jax import noise, rows
from spot_jax.commit import Rule
from spot_jax.config import Sampling
from spot_jax.state import DraftTree, Reading, State


class Evidence(NamedTuple):
    """Everything that the last pass read of the current block, off the decoder's path too.

    Attributes:
      nodes: states that were evaluated, `[B, N, L]`.
      reading: of each, `[B, N, L]`.
      valid: slots that hold such a state, `[B, N]`.
    """

    nodes: State
    reading: Reading
    valid: Bool[Array, "B N"]


class DraftContext(NamedTuple):
    """Everything known when a tree is drafted.

    Attributes:
      root: the known next state, `[B, L]`.
      parent: the state before it, whose reading is the freshest on the decoder's path (stale for
        the root).
      reading: that reading, `[B, L]`.
      evidence: all readings of the pass, `parent`'s among them.
      fresh: rows that have such a reading; a row that has just opened a block has none, and
        its tree is cut down to the root.
      keys: typed request keys.
      positions: absolute positions of the block.
      sampling: static, of the plain decoder.
      rule: static, of the plain decoder.
    """

    root: State
    parent: State
    reading: Reading
    evidence: Evidence
    fresh: Bool[Array, " B"]
    keys: Key[Array, " B"]
    positions: Int[Array, "B L"]
    sampling: Sampling
    rule: Rule


@runtime_checkable
class Drafter(Protocol):
    """Proposes states that the plain decoder may go through. Any proposal leaves it exact."""

    def __call__(self, context: DraftContext, budget: int) -> DraftTree: ...


class Draws(NamedTuple):
    """Likely tokens of each position at a later step, under the noise of that step.

    Attributes:
      tokens: `[B, L, A]`, the coupled draw first, then the runners-up.
      confidence: their stale log-probabilities.
      lead: perturbed log-probability of each less that of the first; 0 for the first. At
        temperature 0 the noise is 0.
      place: place of each among the stale top tokens, from 0.
    """

    tokens: Int[Array, "B L A"]
    confidence: Float[Array, "B L A"]
    lead: Float[Array, "B L A"]
    place: Int[Array, "B L A"]


def committed(masked: Bool[Array, "*n L"]) -> Int[Array, "*n"]:
    """Positions of the block already committed: the count that addresses noise."""
    return masked.shape[-1] - jnp.sum(masked, axis=-1)


def evidence_of(parent: State, reading: Reading) -> Evidence:
    """The evidence of a pass that read one state."""
    nodes, readings = jax.tree.map(lambda x: x[:, None], (parent, reading))
    return Evidence(nodes, readings, jnp.ones(parent.masked.shape[:1] + (1,), bool))


def nearest(context: DraftContext, state: State) -> DraftContext:
    """The context with `parent` and `reading` the evaluated state nearest below `state`.

    Of the states whose commits all are commits of `state [B, L]`, the one with the most (the first
    slot of equals). A drafted branch that the decoder did not take has often read what follows the
    very commits that come a step later than drafted.
    """
    nodes, reading, valid = context.evidence
    missing = state.masked[:, None] | (nodes.tokens != state.tokens[:, None])
    below = valid & ~jnp.any(~nodes.masked & missing, axis=-1)
    slot = jnp.argmax(jnp.where(below, committed(nodes.masked), -1), axis=-1)
    parent, reading = jax.tree.map(lambda x: rows.pick_slot(x, slot), (nodes, reading))
    return context._replace(parent=parent, reading=reading)


def coupled_draws(context: DraftContext, counts: Int[Array, " B"], num: int) -> Draws:
    """What the target would draw at `counts` commits if its distributions stayed as they are.

    The same noise as the target's, at the stale top tokens only.
    """
    reading, sampling = context.reading, context.sampling
    score = reading.top_log_probs
    if sampling.temperature > 0:
        if sampling.confidence == "raw":
            score = score / sampling.temperature
        score = score + noise.token_gumbel(
            context.keys, context.positions, counts, reading.top_tokens
        )
    score, place = jax.lax.top_k(score, num)
    return Draws(
        jnp.take_along_axis(reading.top_tokens, place, axis=-1),
        jnp.take_along_axis(reading.top_log_probs, place, axis=-1),
        score - score[..., :1],
        place,
    )


def keep_top(context: DraftContext, num: int) -> DraftContext:
    """The context with only the `num` most probable tokens of its readings, as a network reads it.

    Raises ValueError where the readings hold fewer.
    """
    held = context.reading.top_log_probs.shape[-1]
    if held < num:
        raise ValueError(
            f"the drafter reads the {num} most probable tokens, the reading holds {held}"
        )

    def kept(reading: Reading) -> Reading:
        return reading._replace(
            top_log_probs=reading.top_log_probs[..., :num], top_tokens=reading.top_tokens[..., :num]
        )

    evidence = context.evidence._replace(reading=kept(context.evidence.reading))
    return context._replace(reading=kept(context.reading), evidence=evidence)


def stale_reading(context: DraftContext, draws: Draws) -> Reading:
    """The reading that the target would have if its distributions stayed as they are."""
    return context.reading._replace(token=draws.tokens[..., 0], confidence=draws.confidence[..., 0])


def stale_score(context: DraftContext, draws: Draws, counts: Int[Array, " B"]) -> Array:
    """The commit rule's ranking of each position, from stale distributions and coupled draws."""
    order = noise.order_draws(context.keys, context.positions, counts)
    return context.rule.ranking(stale_reading(context, draws), order)
