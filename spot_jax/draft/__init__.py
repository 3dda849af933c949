"""Drafters: callables `(DraftContext, budget) -> DraftTree`, pytrees so that they cross `jit`."""

from spot_jax.draft.chain import Chain
from spot_jax.draft.confidence import ConfidenceTree
from spot_jax.draft.context import DraftContext, Drafter
from spot_jax.draft.oracle import Oracle
from spot_jax.draft.random import RandomTree
from spot_jax.draft.ranks import RankOptions, Ranks, make_ranks
from spot_jax.draft.spot import Spot

__all__ = [
    "Chain",
    "ConfidenceTree",
    "DraftContext",
    "Drafter",
    "Oracle",
    "RandomTree",
    "RankOptions",
    "Ranks",
    "Spot",
    "make_ranks",
]
