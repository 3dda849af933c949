"""The order network: which masked position will the target commit next, and with which token.

A small pre-norm encoder over the positions of a block. It reads only the target's output
distributions and the state, no token embedding, so it carries over to other targets.
"""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spot_jax.state import Reading


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderConfig:
    """Shape of the order network.

    Attributes:
      num_top: R, stale log-probabilities read of each position.
      num_alternatives: A, tokens proposed for each position.
      max_block: longest block it can read.
      norm_eps: added to variances; networks trained in PyTorch have its 1e-5.
    """

    num_top: int = 32
    num_alternatives: int = 3
    max_block: int = 64
    width: int = 128
    num_heads: int = 8
    num_layers: int = 3
    mlp_width: int = 512
    norm_eps: float = 1e-6

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.type in (int, float) and not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} must be positive, got {getattr(self, field.name)}")
        if self.num_alternatives > self.num_top:
            raise ValueError(
                f"num_alternatives {self.num_alternatives} exceeds num_top {self.num_top}"
            )
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.num_heads} heads")


def order_features(
    reading: Reading,
    draw_confidence: Float[Array, "*n L A"],
    draw_lead: Float[Array, "*n L A"],
    draw_place: Int[Array, "*n L A"],
    read_masked: Bool[Array, "*n L"],
    root_masked: Bool[Array, "*n L"],
    masked: Bool[Array, "*n L"],
) -> Float[Array, "*n L F"]:
    """Input features of each position.

    Args:
      reading: the freshest reading there is.
      draw_confidence: stale log-probabilities of the tokens that would be drawn at this state.
      draw_lead: their distance behind the first, noise included.
      draw_place: their place among the stale top tokens.
      read_masked: masked positions of the state that the reading belongs to.
      root_masked: masked positions of the tree's root, one step later.
      masked: masked positions of the node whose next commit is asked for.
    """
    odds = log_odds(draw_confidence) / 8
    first = jnp.where(masked, odds[..., 0], -jnp.inf)
    best = jnp.max(first, axis=-1, keepdims=True)
    behind = jnp.where(masked, _clip(first - jnp.where(jnp.isfinite(best), best, 0.0), 4.0), -4.0)
    place = jnp.sum(first[..., None, :] > first[..., :, None], axis=-1)
    length = masked.shape[-1]
    total = jnp.sum(masked, axis=-1, keepdims=True) / length
    drafted = root_masked & ~masked
    depth = jnp.sum(drafted, axis=-1, keepdims=True) / 8
    probs = jnp.exp(reading.top_log_probs[..., :2])
    of_reading = jnp.concatenate(
        [
            _clip(reading.top_log_probs, 20.0) / 8,
            _clip(reading.log_doubt, 30.0)[..., None] / 8,
            reading.entropy[..., None],
            probs[..., :1] - probs[..., 1:],
            odds,
            _clip(draw_lead, 10.0) / 4,
            1.0 / (1.0 + draw_place.astype(jnp.float32)),
        ],
        axis=-1,
    )
    flags = [masked, read_masked, read_masked & ~root_masked, drafted]
    of_state = [f.astype(jnp.float32) for f in flags]
    of_state += [behind, 1.0 / (1.0 + place.astype(jnp.float32))]
    of_state += [jnp.broadcast_to(total, masked.shape)]
    of_state += [jnp.broadcast_to(depth, masked.shape)]
    # A position that was committed when the target read it says nothing about the order.
    of_reading = jnp.where(read_masked[..., None], of_reading, 0.0)
    return jnp.concatenate([of_reading, jnp.stack(of_state, axis=-1)], axis=-1)


def log_odds(log_prob):
    """About the log-odds of a log-probability, within 30 of 0.

    Rather than the log-probability: near certainty the order lies beyond the third digit.
    """
    return _clip(-jnp.log(jnp.maximum(-log_prob, 1e-30)), 30.0)


def _clip(x, bound):
    return jnp.clip(x, -bound, bound)


class OrderNetwork(nn.Module):
    """Scores of (position, token) pairs; a softmax over all of them is the next commit's law.

    Attributes:
      config: its shape.
      num_scores: S, kinds of scores; the set network has two.
    """

    config: OrderConfig
    num_scores: int = 1

    @nn.compact
    def __call__(self, features: Float[Array, "*n L F"]) -> Float[Array, "*n L SA"]:
        """Raw scores, kind by kind. Raises ValueError for a block longer than `max_block`."""
        config = self.config
        length = features.shape[-2]
        if length > config.max_block:
            raise ValueError(f"block of {length} positions exceeds max_block {config.max_block}")
        norm = functools.partial(nn.LayerNorm, epsilon=config.norm_eps)
        x = nn.Dense(config.width, name="input_0")(features)
        x = nn.Dense(config.width, name="input_1")(nn.gelu(x))
        where = self.param(
            "position", nn.initializers.normal(0.02), (config.max_block, config.width)
        )
        x = x + jnp.broadcast_to(where[:length], x.shape)
        for index in range(config.num_layers):
            x = x + _Mixer(config, name=f"mixer_{index}")(norm(name=f"norm_{index}a")(x))
            h = norm(name=f"norm_{index}b")(x)
            h = nn.gelu(nn.Dense(config.mlp_width, name=f"mlp_{index}a")(h))
            x = x + nn.Dense(config.width, name=f"mlp_{index}b")(h)
        x = norm(name="norm")(x)
        return nn.Dense(self.num_scores * config.num_alternatives, name="score")(x)


class _Mixer(nn.Module):
    """Bidirectional self-attention over the positions of a block."""

    config: OrderConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*n L D"]) -> Float[Array, "*n L D"]:
        config = self.config
        heads = (config.num_heads, config.width // config.num_heads)
        query, key, value = (
            nn.DenseGeneral(heads, name=name)(x) for name in ("query", "key", "value")
        )
        score = jnp.einsum("...qhk,...shk->...hqs", query, key) * heads[1] ** -0.5
        mixed = jnp.einsum("...hqs,...shk->...qhk", jax.nn.softmax(score, axis=-1), value)
        return nn.DenseGeneral(config.width, axis=(-2, -1), name="output")(mixed)


def next_commit_log_probs(
    scores: Float[Array, "*n L A"], masked: Bool[Array, "*n L"]
) -> Float[Array, "*n L A"]:
    """Log-probability of each (masked position, alternative) being the next commit."""
    scores = jnp.where(masked[..., None], scores, -1e30)
    total = jax.nn.logsumexp(scores, axis=(-2, -1), keepdims=True)
    return jnp.where(masked[..., None], scores - total, -jnp.inf)
