"""Training-free trees: the next commit, or set of commits, by stale confidence."""

import dataclasses

import jax
import jax.numpy as jnp

from spot_jax.draft.context import DraftContext, committed, coupled_draws, stale_score
from spot_jax.draft.set_tree import best_first_sets, set_rule
from spot_jax.draft.tree import best_first
from spot_jax.models.order import log_odds
from spot_jax.models.sets import SetScores, margins
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ConfidenceSets:
    """Best-first tree on sets, in which a position crosses the threshold by its stale margin.

    Attributes:
      sharpness: log-odds of crossing for a unit of stale log-odds above the threshold.
      rise: added to the stale log-odds: positions grow surer as others are committed.
      order: sharpness of the order in which a rule picks its best positions.
    """

    sharpness: float = 1.5
    rise: float = 0.5
    order: float = 3.0

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        rule = set_rule(context.rule)
        num = min(2, context.reading.top_tokens.shape[-1])

        def law(state: State):
            counts = committed(state.masked)
            draws = coupled_draws(context, counts, num)
            cross = self.sharpness * (margins(draws.confidence, rule) + self.rise)
            if rule.by_confidence:
                order = log_odds(draws.confidence)
            else:
                order = stale_score(context, draws, counts)[..., None] + draws.lead
            return SetScores(cross, self.order * order), draws

        return best_first_sets(context, law, budget)
