"""Random trees, for tests: whatever they propose, decoding must stay exact."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from spot_jax.draft.context import DraftContext, committed, coupled_draws
from spot_jax.draft.tree import best_first
from spot_jax.state import DraftTree, State


class RandomTree(NamedTuple):
    """Random positions with one of their two likeliest tokens.

    Attributes:
      key: typed key; not the requests'.
    """

    key: Key[Array, ""]

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        def propose(state: State):
            counts = committed(state.masked)
            num = min(2, context.reading.top_tokens.shape[-1])
            draws = coupled_draws(context, counts, num)
            key = jax.random.fold_in(self.key, jnp.sum(counts))
            weight = 3.0 * jax.random.normal(key, draws.tokens.shape)
            candidates = context.rule.candidates(state.masked)
            weight = jnp.where(candidates[..., None], weight, -jnp.inf)
            return jax.nn.log_softmax(weight, axis=(-2, -1)), draws.tokens

        return best_first(context, propose, budget)
