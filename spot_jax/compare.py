"""Compares two decodings of the same requests: where they part first, and how near the tie was."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from spot_jax import noise
from spot_jax.commit import Threshold
from spot_jax.config import TargetConfig
from spot_jax.decode import DecodeConfig
from spot_jax.generate import Answer


class Divergence(NamedTuple):
    """The first difference between two decodings.

    Attributes:
      request: index of the request.
      step: first step of the row that differs; None where only the steps' number does.
      position: first position of the answer that this step committed differently.
      plain: token that plain decoding committed there at that step, None if it did not.
      drafted: the same of the other decoding.
      margin: by how much the decision was made; infinite where the trace cannot tell.
    """

    request: int
    step: int | None
    position: int
    plain: int | None
    drafted: int | None
    margin: float


def same_answer(plain: Answer, drafted: Answer) -> bool:
    """Whether tokens, end and order of commits are equal."""
    return (
        np.array_equal(plain.tokens, drafted.tokens)
        and np.array_equal(plain.trace.step, drafted.trace.step)
        and (plain.stopped, plain.steps) == (drafted.stopped, drafted.steps)
    )


def first_divergence(
    plain: Sequence[Answer],
    drafted: Sequence[Answer],
    prompt_lengths: Sequence[int],
    keys: Key[Array, " R"],
    config: DecodeConfig,
    target: TargetConfig,
) -> Divergence | None:
    """The earliest request that differs, or None."""
    for index, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        if not same_answer(one, other):
            found = _where(one, other)
            if found is None:
                return Divergence(index, None, len(one.tokens), None, None, math.inf)
            step, position = found
            margin = _margin(one, other, step, prompt_lengths[index], keys[index], config, target)
            plain_token, token = (_committed(a, step).get(position) for a in (one, other))
            return Divergence(index, step, position, plain_token, token, margin)
    return None


def _where(one: Answer, other: Answer) -> tuple[int, int] | None:
    """First step that differs, and the first position in which it does."""
    for step in range(max(one.steps, other.steps)):
        mine, others = _committed(one, step), _committed(other, step)
        if mine != others:
            at = (p for p in sorted(mine | others) if mine.get(p) != others.get(p))
            return step, next(at)
    return None


def _committed(answer: Answer, step: int) -> dict[int, int]:
    """Position -> token of the commits of a step; -1 where the answer has ended."""
    positions = np.flatnonzero(answer.trace.step == step).tolist()
    known = len(answer.tokens)
    return {p: int(answer.tokens[p]) if p < known else -1 for p in positions}


def _margin(one, other, step, prompt_length, key, config, target) -> float:
    """How far the decision of a step was from the other one, in log-probability.

    For two tokens, the difference of their scores, noise included. For two positions, what the
    rule compares: confidences, or a confidence and the threshold.
    """
    sides = [_committed(answer, step) for answer in (one, other)]
    both = sides[0].keys() & sides[1].keys()
    margin = 0.0
    confidence = [answer.trace.confidence for answer in (one, other)]
    for position in both:
        tokens = [side[position] for side in sides]
        if tokens[0] != tokens[1]:
            scores = [float(c[position]) for c in confidence]
            if config.sampling.temperature > 0:
                if min(tokens) < 0:
                    return math.inf
                count = _count(one, step, prompt_length, position, config, target)
                gumbel = _gumbel(key, prompt_length + position, count, tokens)
                scale = config.sampling.temperature if config.sampling.confidence == "raw" else 1.0
                scores = [s / scale + g for s, g in zip(scores, gumbel, strict=True)]
            margin = max(margin, abs(scores[0] - scores[1]))
    only = [
        [float(c[p]) for p in side if p not in both]
        for c, side in zip(confidence, sides, strict=True)
    ]
    rule = config.rule
    if not rule.by_confidence and any(only):
        return math.inf
    for mine, others in (only, only[::-1]):
        for value in mine:
            near = [abs(value - o) for o in others]
            if isinstance(rule, Threshold):
                near.append(abs(value - math.log(rule.threshold)))
            margin = max(margin, min(near, default=math.inf))
    return margin


def _count(one: Answer, step, prompt_length, position, config, target) -> int:
    """Positions of the block that did not count as masked at a step."""
    length = target.block_length
    before = 0 if target.grid == "anchored" else prompt_length % length
    first = (position + before) // length * length - before
    when = one.trace.step[max(first, 0) : first + length]
    committed = int(np.sum((when >= 0) & (when < step)))
    # The prompt's tail counts as committed; so do, under full attention, places behind the limit.
    behind = first + length - config.max_new_tokens if target.attention == "full" else 0
    return committed + max(-first, 0) + max(behind, 0)


def _gumbel(key, position, count, tokens) -> list[float]:
    draws = noise.token_gumbel(
        key[None], jnp.array([[position]]), jnp.array([count]), jnp.array([[tokens]])
    )
    return np.asarray(draws)[0, 0].tolist()
