"""Commit rules of the reference samplers, beyond those of `commit`."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from spot_jax.commit import Rule, Uniform, rank
from spot_jax.state import Reading


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Factor(Rule):
    """Fast-dLLM's factor rule (arXiv 2505.22618): the more positions, the surer each must be.

    Commits the k best positions for the longest run of k in which the k-th has a confidence of at
    least `1 - factor / (k + 1)`; the best one always.

    Attributes:
      factor: larger commits more at once.
    """

    factor: float = 1.0

    def __post_init__(self):
        if not self.factor > 0:
            raise ValueError(f"factor must be above 0, got {self.factor}")

    def __call__(self, masked, reading: Reading, uniform: Uniform) -> Bool[Array, "*n L"]:
        place = rank(reading.confidence, masked)
        needed = 1 - self.factor / (place.astype(jnp.float32) + 2)
        fails = masked & (place > 0) & (jnp.exp(reading.confidence) < needed)
        first = jnp.min(jnp.where(fails, place, place.shape[-1]), axis=-1, keepdims=True)
        return masked & (place < first)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Release(Rule):
    """Dream's `origin`: every position is released at a random one of `steps` steps.

    At time t of `linspace(1, eps, steps + 1)` a masked position is released with probability
    `1 - s / t`, s being the next time. The product of these telescopes, so one uniform draw per
    position and block tells its step. Steps that release nothing leave the state as it is and are
    not counted.

    Attributes:
      steps: of the reference's schedule.
      eps: last time.
    """

    steps: int
    eps: float = 1e-3

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps must be in [0, 1), got {self.eps}")

    def __call__(self, masked, reading: Reading, uniform: Uniform) -> Bool[Array, "*n L"]:
        order = self.ranking(reading, uniform)
        best = jnp.max(jnp.where(masked, order, -jnp.inf), axis=-1, keepdims=True)
        return masked & (order == best)

    def ranking(self, reading: Reading, uniform: Uniform) -> Float[Array, "*n L"]:
        when = jnp.floor((1 - uniform(fixed=True)) * (self.steps / (1 - self.eps)))
        return -jnp.minimum(when, self.steps - 1)

    @property
    def by_confidence(self) -> bool:
        return False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Restricted(Rule):
    """Another rule, kept to some of the masked positions."""

    rule: Rule

    def __call__(self, masked, reading: Reading, uniform: Uniform) -> Bool[Array, "*n L"]:
        return self.rule(masked, reading, uniform)

    def ranking(self, reading: Reading, uniform: Uniform) -> Float[Array, "*n L"]:
        return self.rule.ranking(reading, uniform)

    @property
    def by_confidence(self) -> bool:
        return self.rule.by_confidence

    @property
    def inner(self) -> Rule:
        return self.rule.inner

    @property
    def single(self) -> bool:
        return self.rule.single


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SubBlocks(_Restricted):
    """Finishes sub-blocks of a block from left to right (Fast-dLLM v2).

    Attributes:
      rule: what commits inside a sub-block.
      length: positions of a sub-block.
    """

    length: int = 8

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"sub-block length must be at least 1, got {self.length}")

    def candidates(self, masked: Bool[Array, "*n L"]) -> Bool[Array, "*n L"]:
        masked = self.rule.candidates(masked)
        part = jnp.arange(masked.shape[-1]) // self.length
        first = jnp.argmax(masked, axis=-1, keepdims=True) // self.length
        return masked & (jnp.broadcast_to(part, masked.shape) == first)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class HandOver(_Restricted):
    """The first position of a block goes first, alone: it is read from the block before."""

    def candidates(self, masked: Bool[Array, "*n L"]) -> Bool[Array, "*n L"]:
        first = jnp.broadcast_to(jnp.arange(masked.shape[-1]) == 0, masked.shape)
        return jnp.where(masked[..., :1], masked & first, self.rule.candidates(masked))
