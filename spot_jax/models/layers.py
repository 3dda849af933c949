"""Pieces that the trunk is made of: normalisation, rotary embedding, projections.

Letters: `T` tokens in a row, `D` width, `H` heads, `K` head width, `F` feed-forward width.
Weights keep the Hugging Face layout `[out, in]`, so that the converter never transposes.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spot_jax.config import TargetConfig


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float) -> Array:
    """Root-mean-square normalisation, computed in float32 and returned in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    return scale * x32.astype(x.dtype)


def linear(
    x: Float[Array, "... I"], weight: Float[Array, "O I"], bias: Float[Array, " O"] | None = None
) -> Float[Array, "... O"]:
    """`x @ weight.T + bias` with the `[out, in]` weight layout of Hugging Face checkpoints."""
    out = jnp.einsum("...i,oi->...o", x, weight)
    return out if bias is None else out + bias.reshape((1,) * (out.ndim - 1) + bias.shape)


def split_heads(x: Float[Array, "... T HK"], num_heads: int) -> Float[Array, "... H T K"]:
    """Moves heads before tokens: XLA's batched matmul is several times faster in this layout."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], num_heads, -1), -3, -2)


def merge_heads(x: Float[Array, "... H T K"]) -> Float[Array, "... T HK"]:
    """Inverse of `split_heads`."""
    x = jnp.swapaxes(x, -3, -2)
    return x.reshape(*x.shape[:-2], -1)


def rotary(
    positions: Int[Array, "... T"], config: TargetConfig
) -> tuple[Float[Array, "... T R"], Float[Array, "... T R"]]:
    """Cosines and sines of half-split rotary embedding of the first R dimensions, in float32.

    float32 whatever the model's dtype: bfloat16 angles are wrong by whole turns at long positions.
    """
    frequency, magnitude = rotary_frequencies(config)
    angle = positions[..., None].astype(jnp.float32) * frequency.reshape(
        (1,) * positions.ndim + frequency.shape
    )
    angle = jnp.concatenate([angle, angle], axis=-1)
    return magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)


def rotary_frequencies(config: TargetConfig) -> tuple[np.ndarray, float]:
    """Angle per position of each pair of dimensions `[R / 2]`, and the factor on cos and sin.

    Stretched as `transformers.modeling_rope_utils` does it for the types linear, llama3 and yarn.
    """
    size = config.rotary_dim or config.head_dim
    theta, scaling = config.rope_theta, config.rope_scaling
    plain = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if scaling is None:
        return plain.astype(np.float32), 1.0
    stretched = plain / scaling.factor
    if scaling.rope_type == "linear":
        return stretched.astype(np.float32), 1.0
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return ((1 - share) * stretched + share * plain).astype(np.float32), 1.0

    def dimension(turns):
        """The dimension, as a real number, that turns this often over the original context."""
        ratio = scaling.original_max_position / (turns * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(theta))

    first = max(math.floor(dimension(scaling.beta_fast)), 0)
    last = min(math.ceil(dimension(scaling.beta_slow)), size - 1)
    ramp = (np.arange(size // 2) - first) / max(last - first, 1e-3)
    share = 1 - np.clip(ramp, 0.0, 1.0)
    magnitude = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    return ((1 - share) * stretched + share * plain).astype(np.float32), magnitude


def rotate(
    x: Float[Array, "... H T K"], cos: Float[Array, "... T R"], sin: Float[Array, "... T R"]
) -> Float[Array, "... H T K"]:
    """Applies half-split rotary embedding (`rotate_half` of the reference code) to the first R
    dimensions of each head; the rest stays."""
    size = cos.shape[-1]
    x32 = x[..., :size].astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    cos, sin = cos[..., None, :, :], sin[..., None, :, :]
    turned = (x32 * cos + turned * sin).astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


def swiglu(
    x: Float[Array, "... D"],
    gate: Float[Array, "F D"],
    up: Float[Array, "F D"],
    down: Float[Array, "D F"],
) -> Float[Array, "... D"]:
    """Gated feed-forward of Qwen and Llama: `down(silu(gate x) * up x)`."""
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)
