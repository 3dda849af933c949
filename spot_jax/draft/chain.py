"""The chain of FreeDave (arXiv 2510.00294) and SSD (arXiv 2510.04147)."""

import dataclasses

import jax
import jax.numpy as jnp

from spot_jax.commit import TopN, rank
from spot_jax.draft.context import DraftContext, committed, coupled_draws, stale_score
from spot_jax.draft.tree import cut, empty_tree
from spot_jax.state import NO_PARENT, DraftTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Chain:
    """Nested states: the k-th commits the k best positions by stale score.

    Each level commits with the draws of its own step, so at T > 0 it is coupled too; FreeDave,
    published for T = 0, is the same there. Training-free. Follows the rule's score (left to right
    under a left-to-right rule) and its commits a step.
    """

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        n = context.rule.n if isinstance(context.rule, TopN) else 1
        score = context.rule.score if isinstance(context.rule, TopN) else "confidence"
        tree = empty_tree(context.root, budget)

        def level(slot, tree):
            tokens, masked = tree.tokens[:, slot - 1], tree.masked[:, slot - 1]
            counts = committed(masked)
            draws = coupled_draws(context, counts, 1)
            chosen = masked & (rank(stale_score(context, score, draws, counts), masked) < n)
            # The step that completes the block needs no check.
            alive = jnp.sum(masked, axis=-1) > n
            return DraftTree(
                tokens=tree.tokens.at[:, slot].set(jnp.where(chosen, draws.tokens[..., 0], tokens)),
                masked=tree.masked.at[:, slot].set(masked & ~chosen),
                parent=tree.parent.at[:, slot].set(jnp.where(alive, slot - 1, NO_PARENT)),
                valid=tree.valid.at[:, slot].set(alive),
                log_value=tree.log_value.at[:, slot].set(jnp.where(alive, 0.0, -jnp.inf)),
            )

        return cut(jax.lax.fori_loop(1, budget, level, tree), context)
