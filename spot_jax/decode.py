"""Decoding: prefill, passes, and the loop. Plain decoding is the same code with an empty tree."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from spot_jax import rows, verify
from spot_jax.draft.context import DraftContext, Drafter
from spot_jax.draft.tree import empty_tree
from spot_jax.models.target import TargetModel
from spot_jax.passes import DecodeConfig, cache_block, evaluate, prefill, widen
from spot_jax.state import DecodeResult, DraftTree, State, Trace

__all__ = ["DecodeConfig", "decode"]


class _Loop(NamedTuple):
    """Loop state. `start` is the first position of the current block; while `opening`, the block
    before it is finished and its keys are still to be cached."""

    cache: tuple[Array, Array]
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


def decode(
    target: TargetModel,
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    noise_keys: Key[Array, " B"],
    config: DecodeConfig,
    drafter: Drafter | None = None,
) -> DecodeResult:
    """Decodes a batch of prompts, exactly as plain one-state decoding would.

    Jitted; usable under the caller's own `jax.jit`. Rows are independent of each other.

    Args:
      target: parameters and configuration.
      prompts: token ids, padded on the right. Pad to few different widths: each compiles.
      prompt_lengths: true lengths, at least 1.
      noise_keys: typed key of each request (`noise.request_keys`); unused at temperature 0.
      config: see `DecodeConfig`.
      drafter: proposes states to check; needs a budget of 2 or more. None decodes plainly.

    Returns:
      A `DecodeResult` whose canvas is `P + max_new_tokens`, rounded up to whole blocks.

    Raises:
      ValueError: shapes or options that do not fit each other, or more positions than the
        target has; row numbers are named where prompt lengths are concrete.
    """
    _check(target, prompts, prompt_lengths, noise_keys, config, drafter)
    return _decode(target, prompts, prompt_lengths, noise_keys, config, drafter)


def _check(target, prompts, prompt_lengths, noise_keys, config, drafter):
    if prompts.ndim != 2 or prompt_lengths.shape != prompts.shape[:1]:
        raise ValueError(
            f"prompts must be [B, P] and prompt_lengths [B], got {prompts.shape} and "
            f"{prompt_lengths.shape}"
        )
    if noise_keys.shape != prompts.shape[:1]:
        raise ValueError(f"noise_keys must be [{prompts.shape[0]}] typed keys")
    if drafter is None and config.budget > 1:
        raise ValueError(f"budget {config.budget} without a drafter drafts nothing: use budget 1")
    if drafter is not None and config.budget < 2:
        raise ValueError("a drafter needs a budget of 2 or more: slot 0 is the known next state")
    if drafter is not None and config.reference_shape:
        raise ValueError("reference_shape is for plain decoding: leave the drafter out")
    if isinstance(prompt_lengths, jax.core.Tracer):
        return
    lengths = jax.device_get(prompt_lengths)
    for row, length in enumerate(lengths):
        if not 1 <= length <= prompts.shape[1]:
            raise ValueError(
                f"row {row}: prompt length {length} is not in 1..{prompts.shape[1]} (empty "
                "prompts cannot be decoded)"
            )
        if length + config.max_new_tokens > target.config.max_position:
            raise ValueError(
                f"row {row}: prompt of {length} tokens and {config.max_new_tokens} new ones "
                f"exceed the {target.config.max_position} positions of the target"
            )


@jax.jit
def _decode(target, prompts, prompt_lengths, noise_keys, config, drafter):
    shape = target.config
    length = shape.block_length
    num_rows = prompts.shape[0]
    width = -(-(prompts.shape[1] + config.max_new_tokens) // length) * length
    index = jnp.arange(width)[None]
    known = index < prompt_lengths[:, None]
    canvas = jnp.pad(prompts, ((0, 0), (0, width - prompts.shape[1])))
    canvas = jnp.where(known, canvas, shape.mask_id).astype(jnp.int32)
    start = prompt_lengths // length * length
    positions = start[:, None] + jnp.arange(length)[None]
    root = State(rows.take_block(canvas, start, length), positions >= prompt_lengths[:, None])
    if config.reference_shape or drafter is None:
        drafter = _no_draft
    limit = prompt_lengths + config.max_new_tokens
    loop = _Loop(
        cache=prefill(target, canvas, prompts.shape[1]),
        canvas=canvas,
        start=start,
        opening=jnp.zeros(num_rows, bool),
        tree=empty_tree(root, config.num_slots),
        done=jnp.zeros(num_rows, bool),
        stopped=jnp.zeros(num_rows, bool),
        steps=jnp.zeros(num_rows, jnp.int32),
        passes=jnp.zeros(num_rows, jnp.int32),
        drafted=jnp.zeros(num_rows, jnp.int32),
        accepted=jnp.zeros(num_rows, jnp.int32),
        trace=Trace(
            jnp.full((num_rows, width), -1),
            jnp.full((num_rows, width), -1),
            jnp.zeros((num_rows, width), jnp.float32),
        ),
    )
    advance = functools.partial(
        _advance, target, config, drafter, noise_keys, prompt_lengths, limit
    )
    loop = jax.lax.while_loop(lambda x: ~jnp.all(x.done), advance, loop)
    return _result(loop, shape, config, prompt_lengths, limit)


def _advance(target, config, drafter, keys, prompt_lengths, limit, loop: _Loop) -> _Loop:
    """One pass of every row that is not done."""
    shape = target.config
    length = shape.block_length
    num_slots = config.num_slots
    block = loop.start[:, None] + jnp.arange(length)[None]
    nodes, valid = _arrange(loop, length)
    evaluate_slots = functools.partial(
        evaluate, target, config, keys, loop.cache, loop.start, loop.opening, nodes
    )
    if num_slots > 2 or config.budget > 1 or config.reference_shape:
        result = evaluate_slots(num_slots)
    else:
        # Plain decoding reads one state, and the finished block only when one opens.
        result = jax.lax.cond(
            jnp.any(loop.opening), lambda: evaluate_slots(2), lambda: widen(evaluate_slots(1))
        )
    stopped, ended = _ends(result.successor, block, prompt_lengths, limit, shape, config)
    root = loop.opening.astype(jnp.int32)
    complete = ~jnp.any(result.successor.masked, axis=-1)
    verdict = verify.walk(nodes, valid, result.successor, stopped | ended | complete, root)
    active = ~loop.done
    last = verdict.last
    successor = jax.tree.map(lambda x: rows.pick_slot(x, last), result.successor)
    visited = verdict.order >= 0
    newly = result.chosen & visited[..., None] & active[:, None, None]
    when = loop.steps[:, None] + verdict.order
    trace = Trace(
        _record(loop.trace.step, loop.start, newly, when[..., None]),
        _record(loop.trace.pass_, loop.start, newly, loop.passes[:, None, None]),
        _record(loop.trace.confidence, loop.start, newly, result.reading.confidence),
    )
    block_tokens = rows.take_block(loop.canvas, loop.start, length)
    block_tokens = jnp.where(active[:, None], successor.tokens, block_tokens)
    canvas = rows.put_block(loop.canvas, block_tokens, loop.start)
    cache = jax.tree.map(
        functools.partial(cache_block, loop.start - length, loop.opening & active),
        loop.cache,
        result.kept,
    )
    stopped, done = rows.pick_slot(stopped, last), rows.pick_slot(stopped | ended, last)
    finished = rows.pick_slot(complete, last) & ~done & active
    start = jnp.where(finished, loop.start + length, loop.start)
    blank = State(jnp.full_like(successor.tokens, shape.mask_id), jnp.ones_like(successor.masked))
    next_root = jax.tree.map(lambda a, b: jnp.where(finished[:, None], a, b), blank, successor)
    parent = jax.tree.map(lambda x: rows.pick_slot(x, last), nodes)
    context = DraftContext(
        root=next_root,
        parent=parent,
        reading=jax.tree.map(lambda x: rows.pick_slot(x, last), result.reading),
        fresh=active & ~finished & ~done,
        keys=keys,
        positions=block,
        sampling=config.sampling,
        rule=config.rule,
    )
    steps = jnp.where(active, verdict.num_steps, 0)
    return _Loop(
        cache=cache,
        canvas=canvas,
        start=start,
        opening=jnp.where(active, finished, loop.opening) & ~done,
        tree=drafter(context, num_slots),
        done=loop.done | done,
        stopped=jnp.where(active, stopped, loop.stopped),
        steps=loop.steps + steps,
        passes=loop.passes + active.astype(jnp.int32),
        drafted=loop.drafted + jnp.where(active, jnp.sum(loop.tree.valid, axis=-1) - 1, 0),
        accepted=loop.accepted + jnp.maximum(steps - 1, 0),
        trace=trace,
    )


def _arrange(loop: _Loop, length: int) -> tuple[State, Bool[Array, "B N"]]:
    """Slots of the pass: the tree, moved up by one behind the finished block in opening rows."""
    finished = rows.take_block(loop.canvas, jnp.maximum(loop.start - length, 0), length)
    tree, opening = loop.tree, loop.opening

    def shift(x, first):
        moved = jnp.concatenate([first[:, None], x[:, :-1]], axis=1)
        return jnp.where(opening.reshape((-1,) + (1,) * (x.ndim - 1)), moved, x)

    clean = jnp.zeros_like(tree.masked[:, 0])
    nodes = State(shift(tree.tokens, finished), shift(tree.masked, clean))
    return nodes, shift(tree.valid, jnp.zeros_like(opening))


def _ends(successor: State, block, prompt_lengths, limit, shape, config):
    """Whether a successor ends its row: by an end-of-text token, or by the length limit.

    A row ends as soon as its text is determined: when a committed end-of-text token, or the
    limit, has nothing masked before it. Positions behind are left as they are.
    """
    positions = block[:, None]
    answer = (positions >= prompt_lengths[:, None, None]) & (positions < limit[:, None, None])
    unsettled = jnp.cumsum(successor.masked, axis=-1) > 0
    eos = jnp.isin(successor.tokens, jnp.array(shape.eos_ids, jnp.int32))
    stopped = jnp.any(eos & answer & ~unsettled, axis=-1) & config.stop_at_eos
    open_answer = jnp.any(successor.masked & answer, axis=-1)
    full = ~open_answer & (positions[..., -1] + 1 >= limit[:, None])
    return stopped, full


def _no_draft(context: DraftContext, budget: int) -> DraftTree:
    return empty_tree(context.root, budget)


def _record(x: Array, start, newly: Bool[Array, "B N L"], value) -> Array:
    """Writes `value` where a visited slot committed; each position has at most one such slot."""
    block = rows.take_block(x, start, newly.shape[-1])
    value = jnp.sum(jnp.where(newly, value, 0), axis=1).astype(x.dtype)
    return rows.put_block(x, jnp.where(jnp.any(newly, axis=1), value, block), start)


def _result(loop: _Loop, shape, config, prompt_lengths, limit) -> DecodeResult:
    index = jnp.arange(loop.canvas.shape[1])[None]
    answer = (index >= prompt_lengths[:, None]) & (index < limit[:, None])
    decoded = answer & (loop.trace.step >= 0)
    eos = jnp.isin(loop.canvas, jnp.array(shape.eos_ids, jnp.int32)) & decoded
    first_eos = jnp.min(jnp.where(eos, index, limit[:, None]), axis=1)
    end = jnp.where(loop.stopped, first_eos, limit)
    return DecodeResult(
        tokens=jnp.where(index < end[:, None], loop.canvas, shape.pad_id),
        lengths=end - prompt_lengths,
        stopped=loop.stopped,
        steps=loop.steps,
        passes=loop.passes,
        drafted=loop.drafted,
        accepted=loop.accepted,
        trace=loop.trace,
    )
