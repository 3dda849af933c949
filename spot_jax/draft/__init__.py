"""Drafters: callables `(DraftContext, budget) -> DraftTree`, pytrees so that they cross `jit`."""

from spot_jax.draft.chain import Chain
from spot_jax.draft.confidence import ConfidenceSets, ConfidenceTree
from spot_jax.draft.context import DraftContext, Drafter
from spot_jax.draft.oracle import Oracle
from spot_jax.draft.random import RandomTree
from spot_jax.draft.ranks import RankOptions, Ranks, make_ranks
from spot_jax.draft.sets import SpotSets
from spot_jax.draft.spot import Spot

__all__ = [
    "Chain",
    "ConfidenceSets",
    "ConfidenceTree",
    "DraftContext",
    "Drafter",
    "Oracle",
    "RandomTree",
    "RankOptions",
    "Ranks",
    "Spot",
    "SpotSets",
    "make_ranks",
]
