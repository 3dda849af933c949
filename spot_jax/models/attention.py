"""Attention over several sources of keys under one softmax, and the attend functions of the trunk.

Sources are scored apart and normalised together, so a prefix that all nodes of a sequence share is
never copied per node.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Finite, so that a row that sees nothing gives a mean and not a NaN.
HIDDEN = -1e30


class Source(NamedTuple):
    """Keys that a query may see.

    Attributes:
      key: `[..., G, S, K]`, with the query's leading axes or, shared by all nodes, without the
        last of them.
      value: the same shape.
      visible: boolean, broadcasts to `[..., T, S]` with all leading axes of the query.
    """

    key: Array
    value: Array
    visible: Array


def attention(query: Float[Array, "*n H T K"], sources: Sequence[Source]) -> Array:
    """Softmax attention of grouped queries over the union of `sources`.

    Args:
      query: `[..., H, T, K]`; each source's `G` divides `H`.
      sources: see `Source`.

    Returns:
      `[..., H, T, K]` in the dtype of the query. Scores and softmax are float32.
    """
    *lead, num_heads, length, head = query.shape
    scores = []
    for key, _, visible in sources:
        groups = key.shape[-3]
        grouped = query.reshape(*lead, groups, num_heads // groups, length, head)
        shared = key.ndim < query.ndim
        score = _dot32(
            "b...grtk,bgsk->b...grts" if shared else "...grtk,...gsk->...grts", grouped, key
        )
        visible = jnp.broadcast_to(visible, (*lead, length, key.shape[-2]))
        scores.append(jnp.where(visible[..., None, None, :, :], score * head**-0.5, HIDDEN))
    peak = functools.reduce(jnp.maximum, [s.max(axis=-1, keepdims=True) for s in scores])
    weights = [jnp.exp(s - peak) for s in scores]
    total = functools.reduce(jnp.add, [w.sum(axis=-1, keepdims=True) for w in weights])
    mixed = []
    for weight, (_, value, _) in zip(weights, sources, strict=True):
        shared = value.ndim < query.ndim
        mixed.append(
            _dot32(
                "b...grts,bgsk->b...grtk" if shared else "...grts,...gsk->...grtk",
                weight.astype(value.dtype),
                value,
            )
        )
    return (functools.reduce(jnp.add, mixed) / total).astype(query.dtype).reshape(query.shape)


def _dot32(spec: str, left: Array, right: Array) -> Array:
    """A matmul with float32 sums and result."""
    if jax.default_backend() == "cpu":
        # XLA's CPU backend has no batched bfloat16 matmul with a float32 result.
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


def block_causal(query: Int[Array, "*n T"], key: Int[Array, "*n S"], block_length: int):
    """Visibility `[*n, T, S]` between absolute positions: own and earlier blocks."""
    return (query // block_length)[..., :, None] >= (key // block_length)[..., None, :]


def attend_masked(visible: Bool[Array, "*n #T T"]):
    """An `attend` for plain sequences under an explicit mask; keeps keys and values."""

    def attend(query, key, value, memory):
        del memory
        return attention(query, [Source(key, value, visible)]), (key, value)

    return attend


def attend_whole(visible: Bool[Array, "*n #T T"]):
    """`attend_masked` that keeps nothing."""
    masked = attend_masked(visible)

    def attend(query, key, value, memory):
        return masked(query, key, value, memory)[0], None

    return attend


def attend_nodes(
    prefix_lengths: Int[Array, " B"],
    parents: Int[Array, "B N"],
    within: Bool[Array, "#B #L #L"],
):
    """An `attend` for nodes `[B, N, L]` over a prefix cache.

    A node sees its sequence's prefix, one clean parent block if it has one, and itself. Nodes
    never see each other otherwise, which makes slots interchangeable.

    Args:
      prefix_lengths: cached positions to see, of the memory `(key, value) [B, G, S, K]`.
      parents: slot of the clean parent, -1 for none.
      within: visibility inside a node.

    Returns:
      The function; what it keeps of a layer is slot 0's keys and values, `[B, G, L, K]` each.
    """

    def attend(query, key, value, memory):
        cached_key, cached_value = memory
        seen = jnp.arange(cached_key.shape[-2])[None] < prefix_lengths[:, None]
        sources = [
            Source(cached_key, cached_value, seen[:, None, None, :]),
            Source(key, value, within[:, None]),
        ]
        if key.shape[1] > 1:
            slot = jnp.maximum(parents, 0)[..., None, None, None]
            sources.append(
                Source(
                    jnp.take_along_axis(key, slot, axis=1),
                    jnp.take_along_axis(value, slot, axis=1),
                    (parents >= 0)[..., None, None],
                )
            )
        return attention(query, sources), (key[:, 0], value[:, 0])

    return attend


def attend_blocks(
    prefix_lengths: Int[Array, " B"], clean: Int[Array, "B P"], seen: Bool[Array, "B N P"]
):
    """An `attend` for nodes `[B, N, L]` of several blocks over a prefix cache.

    A node sees its sequence's prefix, the clean blocks between that and its own, and itself. The
    keys of clean blocks are shared like the prefix's: they are never copied per node.

    Args:
      prefix_lengths: cached positions to see, of the memory `(key, value) [B, G, S, K]`.
      clean: slots of the clean blocks; any slot in the place of one that no node sees.
      seen: which clean blocks a node sees.

    Returns:
      The function; what it keeps of a layer is the clean blocks' keys and values,
      `[B, P, G, L, K]` each.
    """

    def attend(query, key, value, memory):
        cached_key, cached_value = memory
        cached = jnp.arange(cached_key.shape[-2])[None] < prefix_lengths[:, None]
        slot = jnp.maximum(clean, 0)[..., None, None, None]
        kept = tuple(jnp.take_along_axis(x, slot, axis=1) for x in (key, value))

        def joined(x):
            return jnp.moveaxis(x, 1, 2).reshape(*cached_key.shape[:2], -1, x.shape[-1])

        sources = [
            Source(cached_key, cached_value, cached[:, None, None, :]),
            Source(key, value, jnp.ones((1, 1, 1, 1), bool)),
            Source(
                joined(kept[0]),
                joined(kept[1]),
                jnp.repeat(seen, key.shape[-2], axis=-1)[:, :, None],
            ),
        ]
        return attention(query, sources), kept

    return attend


def attend_frozen(seen: Bool[Array, "B S"]):
    """An `attend` for nodes `[B, N, L]` over the frozen keys of a whole canvas.

    A node sees itself and the positions `seen` of the memory `(key, value) [B, G, S, K]`.
    """

    def attend(query, key, value, memory):
        cached_key, cached_value = memory
        sources = [
            Source(cached_key, cached_value, seen[:, None, None, :]),
            Source(key, value, jnp.ones((1, 1, 1, 1), bool)),
        ]
        return attention(query, sources), None

    return attend


def attend_doubled(block_length: int, length: int):
    """An `attend` for training on doubled sequences `[B, 2 * length]` = noisy half, clean half.

    A clean token sees the clean tokens of its own and earlier blocks; a noisy token sees the clean
    tokens of earlier blocks and the noisy tokens of its own block (block diffusion, arXiv
    2503.09573). The noisy blocks are nodes over the clean half, so hidden quarters of the doubled
    mask cost nothing.
    """
    positions = jnp.arange(length)
    num_blocks = length // block_length
    clean_visible = block_causal(positions, positions, block_length)
    earlier = jnp.arange(num_blocks)[:, None] * block_length > positions[None, :]

    def to_nodes(x):
        x = x.reshape(*x.shape[:-2], num_blocks, block_length, x.shape[-1])
        return jnp.moveaxis(x, -3, -4)

    def attend(query, key, value, memory):
        del memory
        (noisy_q, clean_q), (noisy_k, clean_k), (noisy_v, clean_v) = (
            jnp.split(x, 2, axis=-2) for x in (query, key, value)
        )
        clean_out = attention(clean_q, [Source(clean_k, clean_v, clean_visible)])
        noisy_out = attention(
            to_nodes(noisy_q),
            [
                Source(clean_k, clean_v, earlier[:, None, :]),
                Source(to_nodes(noisy_k), to_nodes(noisy_v), jnp.ones((1, 1), bool)),
            ],
        )
        noisy_out = jnp.moveaxis(noisy_out, -4, -3).reshape(clean_out.shape)
        return jnp.concatenate([noisy_out, clean_out], axis=-2), None

    return attend
