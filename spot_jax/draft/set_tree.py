"""Trees whose nodes differ by the set of positions that a step commits."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spot_jax.commit import Rule, Threshold, TopN, rank
from spot_jax.draft.context import DraftContext, Draws
from spot_jax.draft.tree import Sets, grow_tree
from spot_jax.models.sets import NEVER, SetScores, set_log_prob
from spot_jax.state import DraftTree, State

# law(states [B, L]) -> scores of the next commits and what would be drawn there
Law = Callable[[State], tuple[SetScores, Draws]]
# The most doubtful positions whose subsets are all toggled, and those that are toggled alone.
TOGETHER, ALONE = 4, 4
# Best positions that are left out, and the runners-up that take their place.
OUT, IN = 2, 4


def set_rule(rule: Rule) -> TopN | Threshold:
    """The rule inside its wrappers. Raises ValueError for rules without a law of sets."""
    if not isinstance(rule.inner, TopN | Threshold):
        raise ValueError(
            f"sets are drafted for the rules threshold and n per step, not for {rule.inner}"
        )
    return rule.inner


def best_first_sets(context: DraftContext, law: Law, budget: int) -> DraftTree:
    """Grows a tree by the most probable next set.

    The children of a node are a few likely sets: all positions that more likely cross than not,
    the same with the most doubtful ones the other way (staying, crossing, or with another token),
    and the n best positions with their nearest rivals, which the rule falls back to.

    Args:
      context: see `DraftContext`.
      law: asked once a node.
      budget: slots, root included.
    """
    rule = set_rule(context.rule)

    def propose(state: State):
        scores, draws = law(state)
        candidates = context.rule.candidates(state.masked)
        choice = _by_order(scores, candidates, rule)
        if isinstance(rule, Threshold):
            choice = jnp.concatenate([_by_crossing(scores, candidates), choice], axis=1)
        chosen = choice >= 0
        picked = jax.nn.one_hot(choice, scores.cross.shape[-1], dtype=bool)
        log_prob = set_log_prob(scores, candidates, rule, chosen, picked)
        drawn = jnp.take_along_axis(draws.tokens[:, None], jnp.maximum(choice, 0)[..., None], -1)
        tokens = jnp.where(chosen, drawn[..., 0], state.tokens[:, None])
        masked = state.masked[:, None] & ~chosen
        # The step that completes the block needs no check: its successor is known to be complete.
        fit = (log_prob > NEVER / 2) & ~_repeated(choice) & jnp.any(masked, axis=-1)
        return jnp.where(fit, log_prob, -jnp.inf), Sets(tokens, masked)

    return grow_tree(context, propose, budget)


def _flips() -> np.ndarray:
    """`[K, M + 1]`: which of the M most doubtful positions each set has the other way."""
    subsets = [s for n in range(TOGETHER + 1) for s in itertools.combinations(range(TOGETHER), n)]
    subsets += [(m,) for m in range(TOGETHER, TOGETHER + ALONE)]
    flips = np.zeros((len(subsets), TOGETHER + ALONE + 1), bool)
    for row, subset in zip(flips, subsets, strict=True):
        row[list(subset)] = True
    return flips


def _by_crossing(scores: SetScores, candidates: Bool[Array, "B L"]) -> Int[Array, "B K L"]:
    """Likely sets of crossing positions: of each position its alternative, -1 where it stays."""
    stays = jnp.zeros_like(scores.cross[..., :1])
    value, outcome = jax.lax.top_k(jnp.concatenate([stays, scores.cross], axis=-1), 2)
    doubt = rank(value[..., 1] - value[..., 0], candidates)
    flips = jnp.asarray(_flips())
    flipped = jnp.moveaxis(flips[:, jnp.minimum(doubt, flips.shape[1] - 1)], 0, 1)
    choice = jnp.where(flipped, outcome[:, None, :, 1], outcome[:, None, :, 0]) - 1
    return jnp.where(candidates[:, None], choice, -1)


def _by_order(
    scores: SetScores, candidates: Bool[Array, "B L"], rule: TopN | Threshold
) -> Int[Array, "B K L"]:
    """The n best positions, one of them exchanged, or one of them with its second token."""
    alternatives = min(2, scores.order.shape[-1])
    value, token = jax.lax.top_k(scores.order, alternatives)
    place = rank(value[..., 0], candidates)
    number = rule.number(candidates)[:, None]
    least = min(rule.n) if isinstance(rule.n, tuple) else rule.n
    best = place < number
    sets = [best]
    for out, new in itertools.product(range(min(OUT, least)), range(IN)):
        sets.append((best & (place != number - 1 - out)) | (place == number + new))
    choice = [jnp.where(chosen & candidates, token[..., 0], -1) for chosen in sets]
    if alternatives == 2:
        doubtful = rank(value[..., 1] - value[..., 0], best & candidates) == 0
        choice.append(jnp.where(doubtful, token[..., 1], choice[0]))
    return jnp.stack(choice, axis=1)


def _repeated(choice: Int[Array, "B K L"]) -> Bool[Array, "B K"]:
    """Sets that are there earlier already."""
    same = jnp.all(choice[:, :, None] == choice[:, None], axis=-1)
    earlier = jnp.arange(choice.shape[1])[None, :] < jnp.arange(choice.shape[1])[:, None]
    return jnp.any(same & earlier[None], axis=-1)
