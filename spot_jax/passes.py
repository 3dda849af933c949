"""One pass: the plain decoder's step on every slot, in one forward of the target."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from spot_jax import commit, noise
from spot_jax.config import Sampling
from spot_jax.draft.context import committed
from spot_jax.models import attention
from spot_jax.models.target import Target, TargetModel, head_weight
from spot_jax.reading import CHUNK, read
from spot_jax.state import Reading, State

PREFILL_CHUNK = 256


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to decode. Two calls with equal configs and shapes compile once.

    Attributes:
      max_new_tokens: longest answer, exact.
      budget: block states a pass may check, the known next one included. 1 drafts nothing.
      sampling: how tokens are drawn.
      rule: which positions a step commits.
      stop_at_eos: whether an end-of-text token ends a row.
      reference_shape: plain decoding only: run through the compiled shape of this budget, so
        that results can be compared with drafted decoding bit for bit.
      num_top: most probable tokens kept of a reading, for drafters.
      chunk: vocabulary rows reduced at a time.
    """

    max_new_tokens: int = 256
    budget: int = 1
    sampling: Sampling = Sampling()
    rule: commit.Rule = commit.TopN()
    stop_at_eos: bool = True
    reference_shape: int = 0
    num_top: int = 32
    chunk: int = CHUNK

    def __post_init__(self):
        for name in ("max_new_tokens", "budget", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_top < 2:
            raise ValueError(f"num_top must be at least 2, got {self.num_top}")
        if self.reference_shape < 0:
            raise ValueError(f"reference_shape must be 0 or more, got {self.reference_shape}")

    @property
    def num_slots(self) -> int:
        """Slots of a pass. Two at least: a pass that opens a block also reads the finished one."""
        return max(self.budget, self.reference_shape, 2)


class Pass(NamedTuple):
    """One evaluation of the step on every slot."""

    successor: State
    chosen: Bool[Array, "B N L"]
    reading: Reading
    kept: tuple[Array, Array]


def prefill(target: TargetModel, canvas, prompt_width: int):
    """Keys and values of the prompt's whole blocks, a few hundred positions at a time.

    Rows with shorter prompts leave junk behind theirs; it is overwritten before it is visible.
    """
    config = target.config
    rows, width = canvas.shape
    whole = prompt_width // config.block_length * config.block_length
    chunk = min(max(PREFILL_CHUNK // config.block_length, 1) * config.block_length, max(whole, 1))
    num_chunks = -(-whole // chunk)
    capacity = max(width, num_chunks * chunk)
    shape = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim)
    dtype = target.params["embed"].dtype
    cache = (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    if not num_chunks:
        return cache
    tokens = jnp.pad(canvas, ((0, 0), (0, capacity - width)), constant_values=config.mask_id)

    def fill(cache, first):
        offset = first + jnp.arange(chunk)
        part = jax.lax.dynamic_slice_in_dim(tokens, first, chunk, axis=1)
        attend = attention.attend_nodes(
            jnp.broadcast_to(first, (rows,)),
            jnp.full((rows, 1), -1),
            attention.block_causal(offset, offset, config.block_length)[None],
        )
        _, kept = _trunk(target)(
            {"params": target.params},
            part[:, None],
            jnp.broadcast_to(offset, (rows, 1, chunk)),
            attend,
            cache,
        )
        return jax.tree.map(
            lambda c, k: jax.lax.dynamic_update_slice_in_dim(c, k, first, axis=3), cache, kept
        ), None

    # Behind a barrier: where there is one chunk, XLA would see that it has no prefix, and spend
    # many seconds of compilation folding attention over nothing.
    starts = jax.lax.optimization_barrier(jnp.arange(num_chunks) * chunk)
    cache, _ = jax.lax.scan(fill, cache, starts)
    return cache


def _trunk(target: TargetModel) -> Callable[..., Any]:
    # A rolled scan decodes twice as slowly on a CPU; unrolling deep models compiles for minutes.
    shallow = target.config.num_layers <= 12
    return Target(target.config, unroll=target.config.num_layers if shallow else 1).apply


def evaluate(
    target: TargetModel,
    config: DecodeConfig,
    keys: Key[Array, " B"],
    cache: tuple[Array, Array],
    start: Int[Array, " B"],
    opening: Bool[Array, " B"],
    nodes: State,
    num_slots: int,
) -> Pass:
    """The plain decoder's step on the first `num_slots` slots, in one forward.

    Args:
      target: the target.
      config: how to decode.
      keys: request keys.
      cache: keys and values of all finished blocks but one that is still to be cached.
      start: first position of the current block.
      opening: rows whose slot 0 is the finished block before `start`, not cached yet: it is the
        clean parent of the other slots, and what is kept of it goes into the cache.
      nodes: states `[B, N, L]`.
      num_slots: slots to evaluate.
    """
    shape = target.config
    length = shape.block_length
    nodes = jax.tree.map(lambda x: x[:, :num_slots], nodes)
    slot = jnp.arange(num_slots)[None]
    behind = opening[:, None] & (slot == 0)
    first = start[:, None] - jnp.where(behind, length, 0)
    positions = first[..., None] + jnp.arange(length)[None, None]
    cached = jnp.where(opening, start - length, start)
    parents = jnp.where(opening[:, None] & (slot > 0), 0, -1)
    attend = attention.attend_nodes(cached, parents, jnp.ones((1, 1, 1), bool))
    hidden, kept = _trunk(target)({"params": target.params}, nodes.tokens, positions, attend, cache)
    counts = committed(nodes.masked)
    reading = read(
        hidden,
        head_weight(target.params),
        lambda ids: noise.token_gumbel(keys, positions, counts, ids[None, None, None]),
        config.sampling,
        shape,
        config.num_top,
        config.chunk,
    )
    successor, chosen = commit.commit(
        nodes, reading, config.rule, lambda: noise.order_uniform(keys, positions, counts)
    )
    return Pass(successor, chosen, reading, kept)


def widen(result: Pass) -> Pass:
    """Pads a one-slot pass to two slots. The second is no valid node and is never visited."""
    kept = result.kept
    return jax.tree.map(
        lambda x: jnp.concatenate([x, x], axis=1), result._replace(kept=None)
    )._replace(kept=kept)


def cache_block(start, opening, cache: Float[Array, "Y B G S K"], kept: Float[Array, "Y B G L K"]):
    """Stores the finished block's keys or values in the rows that are opening one."""

    def row(cached, new, first, write):
        old = jax.lax.dynamic_slice_in_dim(cached, first, new.shape[-2], axis=2)
        new = jnp.where(write, new, old)
        return jax.lax.dynamic_update_slice_in_dim(cached, new, first, axis=2)

    return jax.vmap(row, in_axes=(1, 1, 0, 0), out_axes=1)(
        cache, kept, jnp.maximum(start, 0), opening
    )
