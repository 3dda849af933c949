"""What the loop carries from pass to pass, how it begins and how it ends."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from spot_jax import costs, rows
from spot_jax.config import TargetConfig
from spot_jax.draft.tree import empty_tree
from spot_jax.forward import Cache, begin_cache
from spot_jax.models.target import TargetModel
from spot_jax.passes import DecodeConfig, Pass
from spot_jax.state import DecodeResult, DraftTree, Layout, State, Trace, Verdict


class Request(NamedTuple):
    """What stays the same for a row while it is decoded.

    Attributes:
      prompt_lengths: tokens of the prompt.
      limits: position at which the answer ends at the latest.
      keys: typed request keys.
    """

    prompt_lengths: Int[Array, " B"]
    limits: Int[Array, " B"]
    keys: Key[Array, " B"]


class Loop(NamedTuple):
    """State of the loop between two passes.

    Attributes:
      cache: see `Cache`.
      canvas: prompt and answer.
      start: first position of the current block.
      opening: rows whose current block opens with the next pass.
      tree: states that the next pass checks.
      layout: of that pass, where it reads several blocks; None without look-ahead.
      done: rows that have ended.
      stopped: rows that an end-of-text token ended.
      steps, passes, drafted, accepted, trace: see `DecodeResult`.
      experience: what sizes are chosen by; None where the budget is fixed.
    """

    cache: Cache
    canvas: Int[Array, "B C"]
    start: Int[Array, " B"]
    opening: Bool[Array, " B"]
    tree: DraftTree
    done: Bool[Array, " B"]
    stopped: Bool[Array, " B"]
    steps: Int[Array, " B"]
    passes: Int[Array, " B"]
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    trace: Trace
    layout: Layout | None = None
    experience: costs.Experience | None = None


def begin(
    target: TargetModel, prompts: Int[Array, "B P"], request: Request, config: DecodeConfig
) -> Loop:
    """Prefills the prompts and stands before the first pass."""
    shape = target.config
    length = shape.block_length
    num_rows, width = prompts.shape
    anchored = shape.grid == "anchored"
    room = config.max_new_tokens if anchored else width + config.max_new_tokens
    width = -(-room // length) * length + (width if anchored else 0)
    lengths = request.prompt_lengths
    known = jnp.arange(width)[None] < lengths[:, None]
    canvas = jnp.pad(prompts, ((0, 0), (0, width - prompts.shape[1])))
    canvas = jnp.where(known, canvas, shape.mask_id).astype(jnp.int32)
    start = lengths if anchored else lengths // length * length
    root = State(
        rows.take_block(canvas, start, length),
        ~rows.take_block(known, start, length) & open_positions(shape, request, start),
    )
    kind = config.cache_of(shape)
    opening = jnp.full(num_rows, kind == "dual")
    if shape.hand_over:  # A prompt of whole blocks hands over the first token.
        opening = start == lengths
    none, zero = jnp.zeros(num_rows, bool), jnp.zeros(num_rows, jnp.int32)
    return Loop(
        cache=begin_cache(target, canvas, prompts.shape[1], kind),
        canvas=canvas,
        start=start,
        opening=opening,
        tree=empty_tree(root, config.num_slots),
        done=none,
        stopped=none,
        steps=zero,
        passes=zero,
        drafted=zero,
        accepted=zero,
        trace=Trace(
            jnp.full((num_rows, width), -1),
            jnp.full((num_rows, width), -1),
            jnp.zeros((num_rows, width), jnp.float32),
        ),
        experience=None if config.costs is None else costs.begin(config.costs, num_rows),
    )


def finish(target: TargetModel, config: DecodeConfig, request: Request, loop: Loop) -> DecodeResult:
    """Cuts the answers at their end."""
    shape = target.config
    index = jnp.arange(loop.canvas.shape[1])[None]
    eos = jnp.isin(loop.canvas, jnp.array(shape.eos_ids, jnp.int32)) & (loop.trace.step >= 0)
    first_eos = jnp.min(jnp.where(eos, index, request.limits[:, None]), axis=1)
    end = jnp.where(loop.stopped, first_eos, request.limits)
    return DecodeResult(
        tokens=jnp.where(index < end[:, None], loop.canvas, shape.pad_id),
        lengths=end - request.prompt_lengths,
        stopped=loop.stopped,
        steps=loop.steps,
        passes=loop.passes,
        drafted=loop.drafted,
        accepted=loop.accepted,
        trace=loop.trace,
        passes_at=None if loop.experience is None else loop.experience.passes,
    )


def open_positions(shape: TargetConfig, request: Request, start: Array) -> Bool[Array, "B L"]:
    """Positions of a new block that are to be filled.

    Under full attention masks behind the limit would be seen, so there are none. A block-causal
    target was trained on whole blocks, and fills them.
    """
    positions = start[:, None] + jnp.arange(shape.block_length)[None]
    if shape.attention == "full":
        return positions < request.limits[:, None]
    return jnp.ones_like(positions, bool)


def ends(
    successor: State,
    positions: Int[Array, " B #N L"],
    request: Request,
    shape: TargetConfig,
    config: DecodeConfig,
) -> tuple[Bool[Array, "B N"], Bool[Array, "B N"]]:
    """Whether a successor ends its row: by an end-of-text token, or by the length limit.

    A row ends as soon as its text is determined: when a committed end-of-text token, or the
    limit, has nothing masked before it. Positions behind are left as they are.
    """
    answer = (positions >= request.prompt_lengths[:, None, None]) & (
        positions < request.limits[:, None, None]
    )
    unsettled = jnp.cumsum(successor.masked, axis=-1) > 0
    eos = jnp.isin(successor.tokens, jnp.array(shape.eos_ids, jnp.int32))
    stopped = jnp.any(eos & answer & ~unsettled, axis=-1) & config.stop_at_eos
    open_answer = jnp.any(successor.masked & answer, axis=-1)
    full = ~open_answer & (positions[..., -1] + 1 >= request.limits[:, None])
    return stopped, full


def extend(
    trace: Trace, loop: Loop, start, result: Pass, verdict: Verdict, counted: Bool[Array, " B #N 1"]
) -> Trace:
    """Adds what the visited ones among the `counted` slots committed in the block at `start`."""
    newly = result.chosen & (verdict.order >= 0)[..., None] & counted
    when = (loop.steps[:, None] + verdict.order)[..., None]
    return Trace(
        _record(trace.step, start, newly, when),
        _record(trace.pass_, start, newly, loop.passes[:, None, None]),
        _record(trace.confidence, start, newly, result.reading.confidence),
    )


def _record(x: Array, start, newly: Bool[Array, "B N L"], value) -> Array:
    """Writes `value` where a visited slot committed; each position has at most one such slot."""
    block = rows.take_block(x, start, newly.shape[-1])
    value = jnp.sum(jnp.where(newly, value, 0), axis=1).astype(x.dtype)
    return rows.put_block(x, jnp.where(jnp.any(newly, axis=1), value, block), start)
