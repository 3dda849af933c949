"""Forwards of nodes in their context: over a prefix cache, over the whole canvas, or over a canvas
whose keys were frozen when the block opened.

Each returns the hidden states that *predict* the block's positions (one row earlier in families
that shift) and what is to be kept in the cache.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spot_jax import rows
from spot_jax.models import attention
from spot_jax.models.target import Target, TargetModel
from spot_jax.state import Layout

PREFILL_CHUNK = 256
CacheKind = Literal["prefix", "none", "dual"]


class Cache(NamedTuple):
    """What is remembered of positions outside the current block.

    Attributes:
      key: of every layer; no positions at all where nothing is cached.
      value: the same.
      edge: hidden state of the position before the block, when the block opened; width 0 where
        it is not needed.
    """

    key: Float[Array, "Y B G S K"]
    value: Float[Array, "Y B G S K"]
    edge: Float[Array, "B D"]


class Scene(NamedTuple):
    """Where a pass stands.

    Attributes:
      canvas: prompt and answer; masks behind what is committed.
      limits: position at which the answer ends at the latest.
      start: first position of the current block.
      opening: rows whose current block opens with this pass.
      layout: of the slots, where the pass reads several blocks.
    """

    canvas: Int[Array, "B C"]
    limits: Int[Array, " B"]
    start: Int[Array, " B"]
    opening: Bool[Array, " B"]
    layout: Layout | None = None


def folds(target: TargetModel, kind: CacheKind) -> bool:
    """Whether a pass that opens a block gives slot 0 to the finished block, whose keys it caches,
    and slot 1 to the new one."""
    return kind == "prefix" and not target.config.hand_over


def empty_cache(target: TargetModel, num_rows: int, capacity: int, edge: bool = False) -> Cache:
    """Zeros for `capacity` positions."""
    config = target.config
    dtype = target.params["embed"].dtype
    shape = (config.num_layers, num_rows, config.num_kv_heads, capacity, config.head_dim)
    width = config.hidden_size if edge else 0
    return Cache(
        jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((num_rows, width), dtype)
    )


def begin_cache(target: TargetModel, canvas, prompt_width: int, kind: CacheKind) -> Cache:
    """The cache before the first pass: the prompt's whole blocks, or room for the canvas."""
    num_rows, width = canvas.shape
    if kind == "prefix":
        return prefill(target, canvas, prompt_width)
    return empty_cache(
        target, num_rows, width if kind == "dual" else 0, kind == "dual" and target.config.shift
    )


def prefill(target: TargetModel, canvas, prompt_width: int) -> Cache:
    """Keys and values of the prompt's whole blocks, a few hundred positions at a time.

    Rows with shorter prompts leave junk behind theirs; it is overwritten before it is visible.
    """
    config = target.config
    num_rows, width = canvas.shape
    whole = prompt_width // config.block_length * config.block_length
    chunk = min(max(PREFILL_CHUNK // config.block_length, 1) * config.block_length, max(whole, 1))
    num_chunks = -(-whole // chunk)
    capacity = max(width, num_chunks * chunk)
    cache = empty_cache(target, num_rows, capacity)
    if not num_chunks:
        return cache
    tokens = jnp.pad(canvas, ((0, 0), (0, capacity - width)), constant_values=config.mask_id)

    def fill(cache, first):
        offset = first + jnp.arange(chunk)
        part = jax.lax.dynamic_slice_in_dim(tokens, first, chunk, axis=1)
        attend = attention.attend_nodes(
            jnp.broadcast_to(first, (num_rows,)),
            jnp.full((num_rows, 1), -1),
            attention.block_causal(offset, offset, config.block_length)[None],
        )
        _, kept = _trunk(target)(
            {"params": target.params},
            part[:, None],
            jnp.broadcast_to(offset, (num_rows, 1, chunk)),
            attend,
            cache,
        )
        return jax.tree.map(
            lambda c, k: jax.lax.dynamic_update_slice_in_dim(c, k, first, axis=3), cache, kept
        ), None

    # Behind a barrier: where there is one chunk, XLA would see that it has no prefix, and spend
    # many seconds of compilation folding attention over nothing.
    starts = jax.lax.optimization_barrier(jnp.arange(num_chunks) * chunk)
    (key, value), _ = jax.lax.scan(fill, (cache.key, cache.value), starts)
    return cache._replace(key=key, value=value)


def forward(
    target: TargetModel, kind: CacheKind, scene: Scene, cache: Cache, tokens: Int[Array, "B N L"]
) -> tuple[Float[Array, "B N L D"], Int[Array, "B N L"], Any]:
    """Runs the nodes' tokens through the target.

    Args:
      target: the target.
      kind: which of the three contexts.
      scene: see `Scene`. Where `folds`, slot 0 of opening rows is the finished block before
        `start`, the clean parent of the other slots; it is not cached yet.
      cache: made by `begin_cache`, updated by `store`.
      tokens: of the nodes.

    Returns:
      Hidden states that predict the nodes' positions, these positions, and what `store` takes.
    """
    if scene.layout is not None:
        return _over_blocks(target, scene, scene.layout, cache, tokens)
    work = {"prefix": _over_prefix, "none": _over_canvas, "dual": _over_frozen}[kind]
    return work(target, scene, cache, tokens)


def store(kind: CacheKind, scene: Scene, cache: Cache, kept: Any) -> Cache:
    """The cache after a pass."""
    if kind == "none":
        return cache
    if kind == "dual":
        return kept
    length = kept[0].shape[-2]
    write = functools.partial(_cache_block, scene.start - length, scene.opening)
    return cache._replace(key=write(cache.key, kept[0]), value=write(cache.value, kept[1]))


def store_blocks(scene: Scene, cache: Cache, kept: Any, known: Bool[Array, "B P"]) -> Cache:
    """The cache after a pass over several blocks, with those of its clean blocks that are `known`
    to be right."""
    length = kept[0].shape[-2]
    for index in range(known.shape[1]):
        write = functools.partial(_cache_block, scene.start + (index - 1) * length, known[:, index])
        key, value = (x[:, :, index] for x in kept)
        cache = cache._replace(key=write(cache.key, key), value=write(cache.value, value))
    return cache


def _over_blocks(target, scene: Scene, layout: Layout, cache: Cache, tokens):
    place, clean = layout
    length = target.config.block_length
    first = scene.start[:, None] + place * length
    positions = first[..., None] + jnp.arange(length)[None, None]
    cached = jnp.where(scene.opening, scene.start - length, scene.start)
    before = jnp.arange(clean.shape[1])[None, None] - 1 < place[..., None]
    attend = attention.attend_blocks(cached, clean, before & (clean >= 0)[:, None])
    hidden, kept = _trunk(target)(
        {"params": target.params}, tokens, positions, attend, (cache.key, cache.value)
    )
    return hidden, positions, kept


def _over_prefix(target, scene: Scene, cache: Cache, tokens):
    config = target.config
    length = config.block_length
    slot = jnp.arange(tokens.shape[1])[None]
    behind = scene.opening[:, None] & (slot == 0)
    first = scene.start[:, None] - jnp.where(behind, length, 0)
    positions = first[..., None] + jnp.arange(length)[None, None]
    cached = jnp.where(scene.opening, scene.start - length, scene.start)
    parents = jnp.where(scene.opening[:, None] & (slot > 0), 0, -1)
    if config.hand_over:
        finished = rows.take_block(scene.canvas, jnp.maximum(scene.start - length, 0), length)
        tokens = jnp.where(behind[..., None], finished[:, None], tokens)
    attend = attention.attend_nodes(cached, parents, jnp.ones((1, 1, 1), bool))
    hidden, kept = _trunk(target)(
        {"params": target.params}, tokens, positions, attend, (cache.key, cache.value)
    )
    if config.hand_over:
        # The last row of the finished block predicts the first position of the new one. No other
        # position is read in such a pass, nor the first one in any other.
        handed = jnp.where(behind[..., None, None], hidden[..., -1:, :], hidden[..., :1, :])
        hidden = _shifted(hidden, handed)
        positions = _positions(scene, tokens)
    return hidden, positions, kept


def _over_canvas(target, scene: Scene, cache: Cache, tokens):
    del cache
    length = tokens.shape[-1]
    width = scene.canvas.shape[1]
    sequences = jax.vmap(_with_blocks)(scene.canvas, tokens, scene.start)
    visible = jnp.arange(width)[None] < scene.limits[:, None]
    hidden, _ = _trunk(target)(
        {"params": target.params},
        sequences,
        jnp.broadcast_to(jnp.arange(width), sequences.shape),
        attention.attend_whole(visible[:, None, None]),
    )
    first = scene.start - int(target.config.shift)
    take = jax.vmap(lambda x, s: jax.lax.dynamic_slice_in_dim(x, s, length, axis=1))
    return take(hidden, first), _positions(scene, tokens), None


def _over_frozen(target, scene: Scene, cache: Cache, tokens):
    length = tokens.shape[-1]
    index = jnp.arange(scene.canvas.shape[1])[None]
    visible = index < scene.limits[:, None]

    def freeze(cache: Cache) -> Cache:
        hidden, (key, value) = _trunk(target)(
            {"params": target.params},
            scene.canvas,
            jnp.broadcast_to(index, scene.canvas.shape),
            attention.attend_masked(visible[:, None]),
        )
        edge = rows.pick_slot(hidden, jnp.maximum(scene.start - 1, 0))[:, : cache.edge.shape[1]]
        opening = scene.opening
        return Cache(
            jnp.where(opening[None, :, None, None, None], key, cache.key),
            jnp.where(opening[None, :, None, None, None], value, cache.value),
            jnp.where(opening[:, None], edge, cache.edge),
        )

    cache = jax.lax.cond(jnp.any(scene.opening), freeze, lambda cache: cache, cache)
    own = (index >= scene.start[:, None]) & (index < scene.start[:, None] + length)
    positions = _positions(scene, tokens)
    hidden, _ = _trunk(target)(
        {"params": target.params},
        tokens,
        positions,
        attention.attend_frozen(visible & ~own),
        (cache.key, cache.value),
    )
    if target.config.shift:
        edge = jnp.broadcast_to(cache.edge[:, None, None], hidden[..., :1, :].shape)
        hidden = _shifted(hidden, edge)
    return hidden, positions, cache


def _trunk(target: TargetModel) -> Callable[..., Any]:
    # A rolled scan decodes twice as slowly on a CPU; unrolling deep models compiles for minutes.
    shallow = target.config.num_layers <= 12
    return Target(target.config, unroll=target.config.num_layers if shallow else 1).apply


def _positions(scene: Scene, tokens) -> Int[Array, "B N L"]:
    offset = jnp.arange(tokens.shape[-1])[None, None]
    return jnp.broadcast_to(scene.start[:, None, None] + offset, tokens.shape)


def _shifted(hidden, first):
    """Row i is what was row i - 1; row 0 is `first`."""
    return jnp.concatenate([first, hidden[..., :-1, :]], axis=-2)


def _with_blocks(canvas, blocks, start):
    return jax.vmap(lambda block: jax.lax.dynamic_update_slice_in_dim(canvas, block, start, 0))(
        blocks
    )


def _cache_block(start, opening, cache: Float[Array, "Y B G S K"], kept: Float[Array, "Y B G L K"]):
    """Stores the finished block's keys or values in the rows that are opening one."""

    def row(cached, new, first, write):
        old = jax.lax.dynamic_slice_in_dim(cached, first, new.shape[-2], axis=2)
        new = jnp.where(write, new, old)
        return jax.lax.dynamic_update_slice_in_dim(cached, new, first, axis=2)

    return jax.vmap(row, in_axes=(1, 1, 0, 0), out_axes=1)(
        cache, kept, jnp.maximum(start, 0), opening
    )
