"""A training-free tree: the next commit as a softmax of stale confidence."""

import dataclasses

import jax
import jax.numpy as jnp

from spot_jax.draft.context import DraftContext, committed, coupled_draws, stale_score
from spot_jax.draft.tree import best_first
from spot_jax.state import DraftTree, State


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ConfidenceTree:
    """Best-first tree in which a position is next with probability softmax(sharpness * score).

    Attributes:
      sharpness: inverse temperature of that softmax. Confidence is a log-probability, and its
        logarithm is taken first: near certainty the order lies in the digits after 0.99. The
        default was the best of 1, 2, 3 and 5 at a budget of 16 on the bundled target's training
        traces.
    """

    sharpness: float = 3.0

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        rule = context.rule

        def propose(state: State):
            counts = committed(state.masked)
            draws = coupled_draws(context, counts, 1)
            stale = stale_score(context, draws, counts)
            if rule.by_confidence:
                stale = -jnp.log(jnp.maximum(-stale, 1e-30))
            weight = jnp.where(rule.candidates(state.masked), self.sharpness * stale, -jnp.inf)
            return jax.nn.log_softmax(weight, axis=-1)[..., None], draws.tokens

        return best_first(context, propose, budget)
