"""Decoding: prefill, passes, and the loop. Plain decoding is the same code with an empty tree."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Key

from spot_jax import rows, verify
from spot_jax.draft.context import DraftContext, Drafter, Evidence
from spot_jax.draft.tree import empty_tree
from spot_jax.forward import Cache, Scene, begin_cache, folds, store
from spot_jax.models.target import TargetModel
from spot_jax.passes import DecodeConfig, Pass, evaluate, widen
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
      cache: see `Cache`.
      canvas: prompt and answer.
      start: first position of the current block.
      opening: rows whose current block opens with the next pass.
      tree: states that the next pass checks.
      done: rows that have ended.
      stopped: rows that an end-of-text token ended.
      steps, passes, drafted, accepted, trace: see `DecodeResult`.
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
      A `DecodeResult` whose canvas is `P + max_new_tokens`, rounded up to whole blocks (on the
      anchored grid `max_new_tokens` alone is).

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
    config.cache_of(target.config)
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
        ~rows.take_block(known, start, length) & _open(shape, request, start),
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
    kind = config.cache_of(shape)
    folded = folds(target, kind)
    scene = Scene(loop.canvas, request.limits, loop.start, loop.opening)
    nodes, valid = State(loop.tree.tokens, loop.tree.masked), loop.tree.valid
    if folded:
        nodes, valid = _make_room(loop, nodes, length)
    result = _evaluate_slots(target, config, request, scene, loop.cache, nodes, folded)
    stopped, ended = _ends(result.successor, block, request, shape, config)
    complete = ~jnp.any(result.successor.masked, axis=-1)
    root = (loop.opening & folded).astype(jnp.int32)
    slot = jnp.arange(valid.shape[1])[None]
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
    blank = State(
        jnp.full_like(successor.tokens, shape.mask_id), _open(shape, request, loop.start + length)
    )
    context = DraftContext(
        root=jax.tree.map(lambda a, b: jnp.where(finished[:, None], a, b), blank, successor),
        parent=parent,
        reading=reading,
        # Slot 0 of a row that has opened a block is the block before.
        evidence=Evidence(nodes, result.reading, valid & (slot >= root[:, None])),
        # The pass that hands over a token reads no other position.
        fresh=active & ~finished & ~done & ~(loop.opening & shape.hand_over),
        keys=request.keys,
        positions=block,
        sampling=config.sampling,
        rule=config.rule_of(shape),
    )
    steps = jnp.where(active, verdict.num_steps, 0)
    loop = loop._replace(
        cache=store(kind, scene, loop.cache, result.kept),
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


def _open(shape, request: Request, start) -> Bool[Array, "B L"]:
    """Positions of a new block that are to be filled.

    Under full attention masks behind the limit would be seen, so there are none. A block-causal
    target was trained on whole blocks, and fills them.
    """
    positions = start[:, None] + jnp.arange(shape.block_length)[None]
    if shape.attention == "full":
        return positions < request.limits[:, None]
    return jnp.ones_like(positions, bool)


def _evaluate_slots(target, config, request, scene: Scene, cache, nodes: State, folded) -> Pass:
    def run(num_slots):
        return evaluate(target, config, request.keys, scene, cache, nodes, num_slots)

    if config.budget > 1 or config.reference_shape:
        return run(config.num_slots)
    if not folded:
        return widen(run(1))
    # Plain decoding reads one state, and the finished block too when one opens.
    return jax.lax.cond(jnp.any(scene.opening), lambda: run(2), lambda: widen(run(1)))


def _extend(loop: Loop, result: Pass, verdict, active) -> Trace:
    """Adds this pass's commits to the trace."""
    newly = result.chosen & (verdict.order >= 0)[..., None] & active[:, None, None]
    when = (loop.steps[:, None] + verdict.order)[..., None]
    return Trace(
        _record(loop.trace.step, loop.start, newly, when),
        _record(loop.trace.pass_, loop.start, newly, loop.passes[:, None, None]),
        _record(loop.trace.confidence, loop.start, newly, result.reading.confidence),
    )


def _make_room(loop: Loop, nodes: State, length: int) -> tuple[State, Bool[Array, "B N"]]:
    """In opening rows moves the tree up by one slot, behind the finished block."""
    finished = rows.take_block(loop.canvas, jnp.maximum(loop.start - length, 0), length)
    opening = loop.opening

    def shift(x, first):
        moved = jnp.concatenate([first[:, None], x[:, :-1]], axis=1)
        return jnp.where(opening.reshape((-1,) + (1,) * (x.ndim - 1)), moved, x)

    clean = jnp.zeros_like(nodes.masked[:, 0])
    nodes = State(shift(nodes.tokens, finished), shift(nodes.masked, clean))
    return nodes, shift(loop.tree.valid, jnp.zeros_like(opening))


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
