"""The chain of FreeDave (arXiv 2510.00294) and SSD (arXiv 2510.04147)."""

import dataclasses

import jax
import jax.numpy as jnp

from spot_jax import noise
from spot_jax.draft.context import DraftContext, committed, coupled_draws, stale_reading
from spot_jax.draft.tree import cut, empty_tree
from spot_jax.state import NO_PARENT, DraftTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Chain:
    """Nested states: each level is the commit rule applied to the stale reading.

    Under a rule of one commit a step these are the k best positions by stale score. Each level
    commits with the draws of its own step, so at T > 0 it is coupled too; FreeDave, published
    for T = 0, is the same there. Training-free.
    """

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        rule = context.rule
        tree = empty_tree(context.root, budget)

        def level(slot, tree):
            tokens, masked = tree.tokens[:, slot - 1], tree.masked[:, slot - 1]
            counts = committed(masked)
            draws = coupled_draws(context, counts, 1)
            order = noise.order_draws(context.keys, context.positions, counts)
            chosen = rule(rule.candidates(masked), stale_reading(context, draws), order)
            # The step that completes the block needs no check.
            alive = jnp.any(masked & ~chosen, axis=-1) & tree.valid[:, slot - 1]
            return DraftTree(
                tokens=tree.tokens.at[:, slot].set(jnp.where(chosen, draws.tokens[..., 0], tokens)),
                masked=tree.masked.at[:, slot].set(masked & ~chosen),
                parent=tree.parent.at[:, slot].set(jnp.where(alive, slot - 1, NO_PARENT)),
                valid=tree.valid.at[:, slot].set(alive),
                log_value=tree.log_value.at[:, slot].set(jnp.where(alive, 0.0, -jnp.inf)),
            )

        return cut(jax.lax.fori_loop(1, budget, level, tree), context)
