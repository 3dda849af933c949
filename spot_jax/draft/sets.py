"""SPOT-Sets: a best-first tree on the sets that the set network expects steps to commit."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from spot_jax.draft.context import DraftContext, committed, coupled_draws, keep_top, nearest
from spot_jax.draft.set_tree import best_first_sets, set_rule
from spot_jax.models.order import OrderConfig
from spot_jax.models.sets import Scalars, set_features, set_scores
from spot_jax.state import DraftTree, State


class SpotSets(NamedTuple):
    """The drafter of arXiv 2610.22543 for rules that commit several positions a step.

    How the paper predicts and drafts sets is not known; this is our reading of its abstract. The
    network is asked once a node, conditioned on the drafted state and on the threshold.

    Attributes:
      params: of the set network.
      config: its shape.
      scalars: calibration to the target.
    """

    params: Any
    config: OrderConfig
    scalars: Scalars = Scalars()

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        rule = set_rule(context.rule)
        context = keep_top(context, self.config.num_top)

        def law(state: State):
            here = nearest(context, state)
            draws = coupled_draws(here, committed(state.masked), self.config.num_alternatives)
            features = set_features(
                here.reading,
                draws.confidence,
                draws.lead,
                draws.place,
                here.parent.masked,
                context.root.masked,
                state.masked,
                rule,
            )
            scores = set_scores(self.params, self.config, features, draws.confidence, rule)
            drafted = jnp.sum(context.root.masked & ~state.masked, axis=-1)
            return self.scalars(scores, drafted), draws

        return best_first_sets(context, law, budget)
