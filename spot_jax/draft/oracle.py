"""The true order with stale tokens: the upper bound of every drafter."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from spot_jax.draft.context import DraftContext, committed, coupled_draws
from spot_jax.draft.tree import Sets, grow_tree
from spot_jax.state import DraftTree, State


class Oracle(NamedTuple):
    """Drafts the steps by which plain decoding of the same requests committed.

    Attributes:
      step: `Trace.step` of that decoding.
    """

    step: Int[Array, "B C"]

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        order = jnp.take_along_axis(self.step, context.positions, axis=1)

        def propose(state: State):
            draws = coupled_draws(context, committed(state.masked), 1)
            known = state.masked & (order >= 0)
            when = jnp.where(known, order, jnp.iinfo(order.dtype).max)
            chosen = known & (when == jnp.min(when, axis=-1, keepdims=True))
            tokens = jnp.where(chosen, draws.tokens[..., 0], state.tokens)
            masked = state.masked & ~chosen
            some = jnp.any(chosen, axis=-1) & jnp.any(masked, axis=-1)
            log_prob = jnp.where(some, 0.0, -jnp.inf)[:, None]
            return log_prob, Sets(tokens[:, None], masked[:, None])

        return grow_tree(context, propose, budget)
