"""Commit rules: which masked positions a step fixes. Tiny frozen callables.

Ties go to the lowest position everywhere.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spot_jax.state import Reading, State

Score = Literal["confidence", "left_to_right", "margin", "entropy", "random"]
SCORES = ("confidence", "left_to_right", "margin", "entropy", "random")
# uniform() -> draws of this step; uniform(fixed=True) -> one draw a position, the same at each step
Uniform = Callable[..., Float[Array, "*n L"]]


def commit_score(score: Score, reading: Reading, uniform: Uniform) -> Float[Array, "*n L"]:
    """What a rule ranks positions by, highest first.

    Args:
      score: `confidence` of the drawn token; `left_to_right`; `margin` between the two most
        probable tokens; negative `entropy`; `random`.
      reading: reading of the state.
      uniform: gives the draws of the random order; called only when they are needed.
    """
    if score == "confidence":
        return reading.confidence
    if score == "left_to_right":
        length = reading.confidence.shape[-1]
        return jnp.broadcast_to(-jnp.arange(length, dtype=jnp.float32), reading.confidence.shape)
    if score == "margin":
        return jnp.exp(reading.top_log_probs[..., 0]) - jnp.exp(reading.top_log_probs[..., 1])
    if score == "entropy":
        return -reading.entropy
    return uniform()


def rank(score: Float[Array, "*n L"], masked: Bool[Array, "*n L"]) -> Int[Array, "*n L"]:
    """Place of each masked position by descending score, from 0; unmasked ones come last."""
    score = jnp.where(masked, score, -jnp.inf)
    length = score.shape[-1]
    mine, other = score[..., :, None], score[..., None, :]
    index = jnp.arange(length)
    earlier = jnp.broadcast_to(index[None, :] < index[:, None], other.shape[:-2] + (length, length))
    beats = masked[..., None, :] & ((other > mine) | ((other == mine) & earlier))
    place = jnp.sum(beats, axis=-1)
    return jnp.where(masked, place, length)


class Rule:
    """What all commit rules share. A rule is called with the masked positions and their reading,
    and returns the positions that the step commits."""

    def __call__(
        self, masked: Bool[Array, "*n L"], reading: Reading, uniform: Uniform
    ) -> Bool[Array, "*n L"]:
        raise NotImplementedError

    def ranking(self, reading: Reading, uniform: Uniform) -> Float[Array, "*n L"]:
        """What orders the commits, highest first."""
        return reading.confidence

    def candidates(self, masked: Bool[Array, "*n L"]) -> Bool[Array, "*n L"]:
        """Masked positions that the next step may commit."""
        return masked

    @property
    def by_confidence(self) -> bool:
        """Whether `ranking` is the confidence, a log-probability."""
        return True

    @property
    def inner(self) -> "Rule":
        """The rule that chooses among the candidates: this one, where it wraps no other."""
        return self

    @property
    def single(self) -> bool:
        """Whether every step commits exactly one position."""
        return False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TopN(Rule):
    """Commits the `n` best masked positions: SDAR's static and sequential, LLaDA's low-confidence.

    Attributes:
      n: positions a step; 1 is exact one-token decoding. A tuple is a schedule over a block: the
        commits of its steps in order, at least 1 each, their sum the block length.
      score: what ranks them.
      order_temperature: above 0 the positions are drawn without replacement, in proportion to
        `exp(score / order_temperature)`: Dream's `alg_temp`. Confidence then counts as a
        probability, as there.
    """

    n: int | tuple[int, ...] = 1
    score: Score = "confidence"
    order_temperature: float = 0.0

    def __post_init__(self):
        if not self.n or min(self.n if isinstance(self.n, tuple) else (self.n,)) < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if not self.order_temperature >= 0:
            raise ValueError(f"order_temperature must be 0 or more, got {self.order_temperature}")
        _check_score(self.score)

    def __call__(self, masked, reading: Reading, uniform: Uniform) -> Bool[Array, "*n L"]:
        place = rank(self.ranking(reading, uniform), masked)
        return masked & (place < self.number(masked)[..., None])

    def number(self, masked: Bool[Array, "*n L"]) -> Int[Array, "*n"]:
        """Commits of the step at which these positions are masked."""
        if isinstance(self.n, tuple):
            return _scheduled(self.n, masked)
        return jnp.minimum(self.n, jnp.sum(masked, axis=-1))

    def ranking(self, reading: Reading, uniform: Uniform) -> Float[Array, "*n L"]:
        score = commit_score(self.score, reading, uniform)
        if not self.order_temperature:
            return score
        if self.score == "confidence":
            score = jnp.exp(score)
        draw = jnp.clip(uniform(), 2.0**-24, 1 - 2.0**-24)
        # The n largest of score plus Gumbel noise are a draw without replacement.
        return score / self.order_temperature - jnp.log(-jnp.log(draw))

    @property
    def by_confidence(self) -> bool:
        return self.score == "confidence" and not self.order_temperature

    @property
    def single(self) -> bool:
        return max(self.n if isinstance(self.n, tuple) else (self.n,)) == 1


def _scheduled(numbers: tuple[int, ...], masked: Bool[Array, "*n L"]) -> Int[Array, "*n"]:
    """Commits of the step at which this many positions are masked.

    The step is known from their number: the schedule's last steps commit the last positions. In
    a block that begins partly filled, steps that would have filled that part are over.
    """
    left = jnp.sum(masked, axis=-1)
    number = jnp.zeros_like(left)
    after = 0
    for n in reversed(numbers):
        before = after + n
        number = jnp.where((left > after) & (left <= before), left - after, number)
        after = before
    return jnp.where(left > after, numbers[0], number)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Threshold(Rule):
    """Commits every position whose drawn token is likelier than `threshold`, else the best `n`.

    SDAR's dynamic rule compares strictly and falls back when fewer than `n` cross; lmdeploy,
    FreeDave and Fast-dLLM compare with `>=` (`strict=False`).

    Attributes:
      threshold: probability. Above 1 nothing ever crosses and each step commits the best `n`.
      strict: `>` rather than `>=`.
      n: commits of the fallback.
    """

    threshold: float = 0.9
    strict: bool = True
    n: int = 1

    def __post_init__(self):
        if not self.threshold > 0:
            raise ValueError(f"threshold must be above 0, got {self.threshold}")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")

    def __call__(self, masked, reading: Reading, uniform: Uniform) -> Bool[Array, "*n L"]:
        level = jnp.log(jnp.float32(self.threshold))
        confidence = reading.confidence
        crossing = masked & (confidence > level if self.strict else confidence >= level)
        best = masked & (rank(confidence, masked) < self.n)
        enough = jnp.sum(crossing, axis=-1) >= self.number(masked)
        return jnp.where(enough[..., None], crossing, best)

    def number(self, masked: Bool[Array, "*n L"]) -> Int[Array, "*n"]:
        """Commits of the step at which these positions are masked, at the least."""
        return jnp.minimum(self.n, jnp.sum(masked, axis=-1))


def _check_score(score: str) -> None:
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}: expected one of {', '.join(SCORES)}")


def commit(
    state: State, reading: Reading, rule: Rule, uniform: Uniform
) -> tuple[State, Bool[Array, "*n L"]]:
    """One step of the plain decoder: the next state, and the positions it committed."""
    chosen = rule(rule.candidates(state.masked), reading, uniform)
    tokens = jnp.where(chosen, reading.token, state.tokens)
    return State(tokens, state.masked & ~chosen), chosen
