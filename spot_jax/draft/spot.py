"""SPOT: a best-first tree on the commit order that the order network predicts."""

from typing import Any, NamedTuple

from spot_jax.draft.context import DraftContext, committed, coupled_draws, keep_top, nearest
from spot_jax.draft.tree import best_first
from spot_jax.models.order import (
    OrderConfig,
    OrderNetwork,
    next_commit_log_probs,
    order_features,
)
from spot_jax.state import DraftTree, State


class Spot(NamedTuple):
    """The drafter of arXiv 2610.22543.

    The network is asked once a node, conditioned on the drafted state; position and token are
    predicted together, so token alternatives enter the tree where the token is in doubt. It reads
    the evaluated state nearest below the drafted one, which need not be on the decoder's path.

    Attributes:
      params: of the order network.
      config: its shape.
    """

    params: Any
    config: OrderConfig

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        network = OrderNetwork(self.config)
        context = keep_top(context, self.config.num_top)

        def propose(state: State):
            here = nearest(context, state)
            draws = coupled_draws(here, committed(state.masked), self.config.num_alternatives)
            features = order_features(
                here.reading,
                draws.confidence,
                draws.lead,
                draws.place,
                here.parent.masked,
                context.root.masked,
                state.masked,
            )
            scores: Any = network.apply({"params": self.params}, features)
            candidates = context.rule.candidates(state.masked)
            return next_commit_log_probs(scores, candidates), draws.tokens

        return best_first(context, propose, budget)
