"""Attention over several sources of keys under one softmax, and the attend functions of the trunk.

A *source* is `(key, value, visible)`: keys and values whose leading axes broadcast against the
query's, and a boolean mask that broadcasts against the scores. Sources are scored apart and
normalised together, so a prefix cache shared by all nodes is never copied per node.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Source = tuple[Array, Array, Array]

# Finite, so that a row that sees nothing gives a mean and not a NaN.
HIDDEN = -1e30


def attention(query: Float[Array, "*n H T K"], sources: Sequence[Source]) -> Array:
    """Softmax attention of grouped queries over the union of `sources`.

    Args:
      query: `[..., H, T, K]`.
      sources: each key and value `[..., G, S, K]` with `G` dividing `H`, and visibility that
        broadcasts to `[..., T, S]`.

    Returns:
      `[..., H, T, K]` in the dtype of the query. Scores and softmax are float32.
    """
    *lead, num_heads, length, head = query.shape
    scores = []
    for key, _, visible in sources:
        groups = key.shape[-3]
        grouped = query.reshape(*lead, groups, num_heads // groups, length, head)
        score = _dot32("...grtk,...gsk->...grts", grouped, key)
        scores.append(jnp.where(visible[..., None, None, :, :], score * head**-0.5, HIDDEN))
    peak = functools.reduce(jnp.maximum, [s.max(axis=-1, keepdims=True) for s in scores])
    weights = [jnp.exp(s - peak) for s in scores]
    total = sum(w.sum(axis=-1, keepdims=True) for w in weights)
    mixed = sum(
        _dot32("...grts,...gsk->...grtk", w.astype(value.dtype), value)
        for w, (_, value, _) in zip(weights, sources, strict=True)
    )
    return (mixed / total).astype(query.dtype).reshape(query.shape)


def _dot32(spec: str, left: Array, right: Array) -> Array:
    """A matmul with float32 sums and result."""
    if jax.default_backend() == "cpu":
        # XLA's CPU backend has no batched bfloat16 matmul with a float32 result.
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


def attend_masked(visible: Bool[Array, "*n T T"]):
    """An `attend` for plain sequences under an explicit mask; keeps each layer's keys and values."""

    def attend(query, key, value, memory):
        del memory
        return attention(query, [(key, value, visible)]), (key, value)

    return attend


def attend_doubled(block_length: int, length: int):
    """An `attend` for training on doubled sequences `[..., 2 * length]` = noisy half, clean half.

    A clean token sees the clean tokens of its own and earlier blocks; a noisy token sees the clean
    tokens of earlier blocks and the noisy tokens of its own block (block diffusion, arXiv
    2503.09573). The two halves are scored apart, so hidden quarters of the mask cost nothing.
    """
    block = jnp.arange(length) // block_length
    clean_visible = block[:, None] >= block[None, :]
    earlier = block[:, None] > block[None, :]
    num_blocks = length // block_length

    def blocks(x):
        return x.reshape(*x.shape[:-2], num_blocks, block_length, x.shape[-1])

    def attend(query, key, value, memory):
        del memory
        noisy_q, clean_q = jnp.split(query, 2, axis=-2)
        noisy_k, clean_k = jnp.split(key, 2, axis=-2)
        noisy_v, clean_v = jnp.split(value, 2, axis=-2)
        clean_out = attention(clean_q, [(clean_k, clean_v, clean_visible)])
        # Blocks go before heads: [..., num_blocks, H, L, K].
        own_q, own_k, own_v = (jnp.moveaxis(blocks(x), -3, -4) for x in (noisy_q, noisy_k, noisy_v))
        prefix = (
            clean_k[..., None, :, :, :],
            clean_v[..., None, :, :, :],
            earlier.reshape(num_blocks, block_length, length),
        )
        own = (own_k, own_v, jnp.ones((1, 1), bool))
        noisy_out = jnp.moveaxis(attention(own_q, [prefix, own]), -4, -3).reshape(query.shape[:-2] + (length, query.shape[-1]))
        return jnp.concatenate([noisy_out, clean_out], axis=-2), None

    return attend
