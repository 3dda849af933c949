"""The true order with stale tokens: the upper bound of every order drafter."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from spot_jax.draft.context import DraftContext, committed, coupled_draws
from spot_jax.draft.tree import best_first
from spot_jax.state import DraftTree, State


class Oracle(NamedTuple):
    """Drafts the order in which plain decoding of the same requests committed.

    Attributes:
      step: `Trace.step` of that decoding.
    """

    step: Int[Array, "B C"]

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        order = jnp.take_along_axis(self.step, context.positions, axis=1)

        def propose(state: State):
            draws = coupled_draws(context, committed(state.masked), 1)
            when = jnp.where(state.masked & (order >= 0), order, jnp.iinfo(order.dtype).max)
            first = (when == jnp.min(when, axis=-1, keepdims=True)) & state.masked & (order >= 0)
            return jnp.where(first, 0.0, -jnp.inf)[..., None], draws.tokens

        return best_first(context, propose, budget)
