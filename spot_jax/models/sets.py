"""The set network: which positions will the next step commit, and the law of such sets.

The order network with two scores for each (position, token): the log-odds that the position
crosses the threshold with this token, and the score by which the rule picks its best positions
where too few cross. A rule of n commits a step needs the second alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spot_jax.commit import Rule, Threshold, TopN
from spot_jax.models.order import OrderConfig, OrderNetwork, log_odds, order_features
from spot_jax.state import Reading

# The log of no chance at all; finite, so that its gradient is too.
NEVER = -1e30
# Log-odds beyond this are as good as certain.
FAR = 8.0


class SetScores(NamedTuple):
    """What the law of the next commits is made of.

    Attributes:
      cross: log-odds that a position crosses with this token, against staying masked.
      order: what the best positions are picked by; only differences matter.
    """

    cross: Float[Array, "*n L A"]
    order: Float[Array, "*n L A"]


class Scalars(NamedTuple):
    """Calibration of `SetScores` to a target: four numbers, the identity by default.

    Attributes:
      scale: factor of the crossing log-odds.
      bias: added to them.
      depth: added to them for every eight positions drafted since the root.
      order: factor of the order scores.
    """

    scale: Float[Array, ""] | float = 1.0
    bias: Float[Array, ""] | float = 0.0
    depth: Float[Array, ""] | float = 0.0
    order: Float[Array, ""] | float = 1.0

    def __call__(self, scores: SetScores, drafted: Int[Array, "*n"]) -> SetScores:
        """Calibrates scores of states that are `drafted` positions below the root."""
        added = self.bias + self.depth * (drafted.astype(jnp.float32) / 8)
        return SetScores(
            self.scale * scores.cross + added[..., None, None], self.order * scores.order
        )


def margins(confidence: Float[Array, "*n L A"], rule: Rule) -> Float[Array, "*n L A"]:
    """Stale log-odds of each token less those of the threshold; 0 under rules without one.

    This is what lets one network serve several thresholds.
    """
    if not isinstance(rule.inner, Threshold):
        return jnp.zeros_like(confidence)
    level = jnp.log(jnp.minimum(jnp.float32(rule.inner.threshold), 1.0))
    return jnp.clip(log_odds(confidence) - log_odds(level), -FAR, FAR)


def set_features(
    reading: Reading,
    draw_confidence: Float[Array, "*n L A"],
    draw_lead: Float[Array, "*n L A"],
    draw_place: Int[Array, "*n L A"],
    read_masked: Bool[Array, "*n L"],
    root_masked: Bool[Array, "*n L"],
    masked: Bool[Array, "*n L"],
    rule: Rule,
) -> Float[Array, "*n L F"]:
    """`order_features`, and how far each position is from the threshold."""
    features = order_features(
        reading, draw_confidence, draw_lead, draw_place, read_masked, root_masked, masked
    )
    near = jnp.clip(margins(draw_confidence[..., :1], rule), -4.0, 4.0)
    return jnp.concatenate([features, jnp.where(masked[..., None], near, -4.0)], axis=-1)


def set_scores(
    params,
    config: OrderConfig,
    features: Float[Array, "*n L F"],
    draw_confidence: Float[Array, "*n L A"],
    rule: Rule,
) -> SetScores:
    """The network's scores, as corrections of what stale confidence says."""
    raw = OrderNetwork(config, num_scores=2).apply({"params": params}, features)
    cross, order = jnp.split(jnp.asarray(raw), 2, axis=-1)
    return SetScores(cross + margins(draw_confidence, rule), order + log_odds(draw_confidence))


def set_log_prob(
    scores: SetScores,
    candidates: Bool[Array, "*n L"],
    rule: TopN | Threshold,
    chosen: Bool[Array, "*n K L"],
    tokens: Bool[Array, "*n K L A"],
) -> Float[Array, "*n K"]:
    """Log-probability that the next step commits exactly these positions, with these tokens.

    Positions cross the threshold independently. Where fewer than n do, and always under `TopN`, n
    positions are drawn in proportion to the product of their weights `exp(order)`: a softmax at
    n = 1, a conditional Bernoulli law beyond.

    Args:
      scores: of the state.
      candidates: positions that may be committed.
      rule: without its wrappers.
      chosen: sets, each of candidates only.
      tokens: of each position those that count, one or several; read where `chosen`.

    Returns:
      About `NEVER` for sets that the rule cannot commit.
    """
    number = rule.number(candidates)
    most = max(rule.n) if isinstance(rule.n, tuple) else rule.n

    def of_set(score):
        picked = jax.nn.logsumexp(jnp.where(tokens, score[..., None, :, :], NEVER), axis=-1)
        return jnp.sum(jnp.where(chosen, picked, 0.0), axis=-1)

    def sums(score):
        weight = jax.nn.logsumexp(score, axis=-1)
        return log_elementary(jnp.where(candidates, weight, NEVER), most)

    size = jnp.sum(chosen, axis=-1)
    fits = size == number[..., None]
    total = jnp.take_along_axis(sums(scores.order), number[..., None], axis=-1)
    picked = jnp.where(fits, of_set(scores.order) - total, NEVER)
    if isinstance(rule, TopN):
        return picked
    doubt = jax.nn.softplus(jax.nn.logsumexp(scores.cross, axis=-1))
    none = -jnp.sum(jnp.where(candidates, doubt, 0.0), axis=-1, keepdims=True)
    crossed = jnp.where(size >= number[..., None], none + of_set(scores.cross), NEVER)
    table = sums(scores.cross)
    fewer = jax.lax.broadcasted_iota(int, table.shape, table.ndim - 1) < number[..., None]
    few = none + jax.nn.logsumexp(jnp.where(fewer, table, NEVER), axis=-1, keepdims=True)
    return jnp.logaddexp(crossed, few + picked)


def log_elementary(weights: Float[Array, "*n L"], most: int) -> Float[Array, "*n J"]:
    """Logs of the elementary symmetric sums 0 .. most of positive weights, given as logs."""
    first = jnp.zeros((*weights.shape[:-1], 1))
    if most == 1:
        return jnp.concatenate([first, jax.nn.logsumexp(weights, axis=-1, keepdims=True)], axis=-1)
    never = jnp.full((*weights.shape[:-1], most), NEVER)

    def add(table, weight):
        with_it = jnp.maximum(table[..., :-1] + weight[..., None], NEVER)
        longer = jnp.logaddexp(table[..., 1:], with_it)
        return jnp.concatenate([table[..., :1], longer], axis=-1), None

    table = jnp.concatenate([first, never], axis=-1)
    return jax.lax.scan(add, table, jnp.moveaxis(weights, -1, 0))[0]
