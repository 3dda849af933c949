"""Decoding: prefill, passes, and the loop. Plain decoding is the same code with an empty tree."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Key

from spot_jax import rows, verify
from spot_jax.draft.context import DraftContext, Drafter
from spot_jax.draft.tree import empty_tree
from spot_jax.models.target import TargetModel
from spot_jax.passes import DecodeConfig, Pass, cache_block, evaluate, prefill, widen
from spot_jax.state import DecodeResult, DraftTree, State, Trace

__all__ = ["DecodeConfig", "decode"]


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
      cache: keys and values of the finished blocks, `[layers, B, G, S, K]` each.
      canvas: prompt and answer.
      start: first position of the current block.
      opening: rows whose block before `start` is finished and not in the cache yet.
      tree: states that the next pass checks.
      done: rows that have ended.
      stopped: rows that an end-of-text token ended.
      steps, passes, drafted, accepted, trace: see `DecodeResult`.
    """

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
    if isinstance(prompt_lengths, Tracer):
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
    rows_of = Request(prompt_lengths, prompt_lengths + config.max_new_tokens, noise_keys)
    if drafter is None and not config.reference_shape:
        # Nothing reads them, but a conditional would still compute them.
        config = dataclasses.replace(config, num_top=2)
    loop = begin(target, prompts, rows_of, config)

    def one_pass(loop):
        loop, context = advance(target, config, rows_of, loop)
        return draft(config, drafter, loop, context)

    loop = jax.lax.while_loop(lambda loop: ~jnp.all(loop.done), one_pass, loop)
    return finish(target, config, rows_of, loop)


def begin(
    target: TargetModel, prompts: Int[Array, "B P"], request: Request, config: DecodeConfig
) -> Loop:
    """Prefills the prompts and stands before the first pass."""
    shape = target.config
    length = shape.block_length
    num_rows = prompts.shape[0]
    width = -(-(prompts.shape[1] + config.max_new_tokens) // length) * length
    known = jnp.arange(width)[None] < request.prompt_lengths[:, None]
    canvas = jnp.pad(prompts, ((0, 0), (0, width - prompts.shape[1])))
    canvas = jnp.where(known, canvas, shape.mask_id).astype(jnp.int32)
    start = request.prompt_lengths // length * length
    masked = ~rows.take_block(known, start, length)
    root = State(rows.take_block(canvas, start, length), masked)
    none, zero = jnp.zeros(num_rows, bool), jnp.zeros(num_rows, jnp.int32)
    return Loop(
        cache=prefill(target, canvas, prompts.shape[1]),
        canvas=canvas,
        start=start,
        opening=none,
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
    )


def advance(
    target: TargetModel, config: DecodeConfig, request: Request, loop: Loop
) -> tuple[Loop, DraftContext]:
    """One pass of every row that is not done, and what the next tree can be drafted from.

    The tree of the loop it returns is the one just checked; `draft` replaces it.
    """
    shape = target.config
    length = shape.block_length
    block = loop.start[:, None] + jnp.arange(length)[None]
    nodes, valid = _arrange(loop, length)
    result = _evaluate_slots(target, config, request, loop, nodes)
    stopped, ended = _ends(result.successor, block, request, shape, config)
    complete = ~jnp.any(result.successor.masked, axis=-1)
    root = loop.opening.astype(jnp.int32)
    verdict = verify.walk(nodes, valid, result.successor, stopped | ended | complete, root)
    active = ~loop.done
    last = verdict.last
    successor, parent, reading = jax.tree.map(
        lambda x: rows.pick_slot(x, last), (result.successor, nodes, result.reading)
    )
    block_tokens = rows.take_block(loop.canvas, loop.start, length)
    block_tokens = jnp.where(active[:, None], successor.tokens, block_tokens)
    stopped, done = (rows.pick_slot(x, last) for x in (stopped, stopped | ended))
    finished = rows.pick_slot(complete, last) & ~done & active
    blank = State(jnp.full_like(successor.tokens, shape.mask_id), jnp.ones_like(successor.masked))
    context = DraftContext(
        root=jax.tree.map(lambda a, b: jnp.where(finished[:, None], a, b), blank, successor),
        parent=parent,
        reading=reading,
        fresh=active & ~finished & ~done,
        keys=request.keys,
        positions=block,
        sampling=config.sampling,
        rule=config.rule,
    )
    steps = jnp.where(active, verdict.num_steps, 0)
    loop = loop._replace(
        cache=jax.tree.map(
            functools.partial(cache_block, loop.start - length, loop.opening & active),
            loop.cache,
            result.kept,
        ),
        canvas=rows.put_block(loop.canvas, block_tokens, loop.start),
        start=jnp.where(finished, loop.start + length, loop.start),
        opening=finished,
        done=loop.done | done,
        stopped=jnp.where(active, stopped, loop.stopped),
        steps=loop.steps + steps,
        passes=loop.passes + active.astype(jnp.int32),
        drafted=loop.drafted + jnp.where(active, jnp.sum(loop.tree.valid, axis=-1) - 1, 0),
        accepted=loop.accepted + jnp.maximum(steps - 1, 0),
        trace=_extend(loop, result, verdict, active),
    )
    return loop, context


def draft(config: DecodeConfig, drafter: Drafter | None, loop: Loop, context: DraftContext) -> Loop:
    """Puts the tree of the next pass into the loop; without a drafter, the root alone."""
    if drafter is None:
        return loop._replace(tree=empty_tree(context.root, config.num_slots))
    return loop._replace(tree=drafter(context, config.num_slots))


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
    )


def _evaluate_slots(target, config, request, loop: Loop, nodes: State) -> Pass:
    run = functools.partial(
        evaluate, target, config, request.keys, loop.cache, loop.start, loop.opening, nodes
    )
    if config.budget > 1 or config.reference_shape:
        return run(config.num_slots)
    # Plain decoding reads one state, and the finished block too when one opens.
    return jax.lax.cond(jnp.any(loop.opening), lambda: run(2), lambda: widen(run(1)))


def _extend(loop: Loop, result: Pass, verdict, active) -> Trace:
    """Adds this pass's commits to the trace."""
    newly = result.chosen & (verdict.order >= 0)[..., None] & active[:, None, None]
    when = (loop.steps[:, None] + verdict.order)[..., None]
    return Trace(
        _record(loop.trace.step, loop.start, newly, when),
        _record(loop.trace.pass_, loop.start, newly, loop.passes[:, None, None]),
        _record(loop.trace.confidence, loop.start, newly, result.reading.confidence),
    )


def _arrange(loop: Loop, length: int) -> tuple[State, Bool[Array, "B N"]]:
    """Slots of the pass: the tree, moved up by one behind the finished block in opening rows."""
    finished = rows.take_block(loop.canvas, jnp.maximum(loop.start - length, 0), length)
    tree, opening = loop.tree, loop.opening

    def shift(x, first):
        moved = jnp.concatenate([first[:, None], x[:, :-1]], axis=1)
        return jnp.where(opening.reshape((-1,) + (1,) * (x.ndim - 1)), moved, x)

    clean = jnp.zeros_like(tree.masked[:, 0])
    nodes = State(shift(tree.tokens, finished), shift(tree.masked, clean))
    return nodes, shift(tree.valid, jnp.zeros_like(opening))


def _ends(successor: State, block, request: Request, shape, config):
    """Whether a successor ends its row: by an end-of-text token, or by the length limit.

    A row ends as soon as its text is determined: when a committed end-of-text token, or the
    limit, has nothing masked before it. Positions behind are left as they are.
    """
    positions = block[:, None]
    answer = (positions >= request.prompt_lengths[:, None, None]) & (
        positions < request.limits[:, None, None]
    )
    unsettled = jnp.cumsum(successor.masked, axis=-1) > 0
    eos = jnp.isin(successor.tokens, jnp.array(shape.eos_ids, jnp.int32))
    stopped = jnp.any(eos & answer & ~unsettled, axis=-1) & config.stop_at_eos
    open_answer = jnp.any(successor.masked & answer, axis=-1)
    full = ~open_answer & (positions[..., -1] + 1 >= request.limits[:, None])
    return stopped, full


def _record(x: Array, start, newly: Bool[Array, "B N L"], value) -> Array:
    """Writes `value` where a visited slot committed; each position has at most one such slot."""
    block = rows.take_block(x, start, newly.shape[-1])
    value = jnp.sum(jnp.where(newly, value, 0), axis=1).astype(x.dtype)
    return rows.put_block(x, jnp.where(jnp.any(newly, axis=1), value, block), start)
