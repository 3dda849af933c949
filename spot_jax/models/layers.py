"""Pieces that the trunk is made of: normalisation, rotary embedding, projections.

Letters: `T` tokens in a row, `D` width, `H` heads, `K` head width, `F` feed-forward width.
Weights keep the Hugging Face layout `[out, in]`, so that the converter never transposes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float) -> Array:
    """Root-mean-square normalisation, computed in float32 and returned in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    return scale * x32.astype(x.dtype)


def linear(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float[Array, "... O"]:
    """`x @ weight.T` with the `[out, in]` weight layout of Hugging Face checkpoints."""
    return jnp.einsum("...i,oi->...o", x, weight)


def split_heads(x: Float[Array, "... T HK"], num_heads: int) -> Float[Array, "... H T K"]:
    """Moves heads before tokens: XLA's batched matmul is several times faster in this layout."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], num_heads, -1), -3, -2)


def merge_heads(x: Float[Array, "... H T K"]) -> Float[Array, "... T HK"]:
    """Inverse of `split_heads`."""
    x = jnp.swapaxes(x, -3, -2)
    return x.reshape(*x.shape[:-2], -1)


def rotary(
    positions: Int[Array, "... T"], head_dim: int, theta: float
) -> tuple[Float[Array, "... T K"], Float[Array, "... T K"]]:
    """Cosines and sines of half-split rotary embedding, in float32.

    float32 whatever the model's dtype: bfloat16 angles are wrong by whole turns at long positions.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[..., None].astype(jnp.float32) * frequency.reshape(
        (1,) * positions.ndim + frequency.shape
    )
    angle = jnp.concatenate([angle, angle], axis=-1)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "... H T K"], cos: Float[Array, "... T K"], sin: Float[Array, "... T K"]
) -> Float[Array, "... H T K"]:
    """Applies half-split rotary embedding (`rotate_half` of the reference code)."""
    x32 = x.astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    cos, sin = cos[..., None, :, :], sin[..., None, :, :]
    return (x32 * cos + turned * sin).astype(x.dtype)


def swiglu(
    x: Float[Array, "... D"],
    gate: Float[Array, "F D"],
    up: Float[Array, "F D"],
    down: Float[Array, "D F"],
) -> Float[Array, "... D"]:
    """Gated feed-forward of Qwen and Llama: `down(silu(gate x) * up x)`."""
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)
