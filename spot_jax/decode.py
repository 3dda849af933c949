"""Decoding: prefill, passes, and the loop. Plain decoding is the same code with an empty tree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Key

from spot_jax import ahead, costs, rows, verify
from spot_jax.draft.context import DraftContext, Drafter, Evidence
from spot_jax.draft.tree import empty_tree
from spot_jax.forward import Scene, folds, store
from spot_jax.loop import Loop, Request, begin, ends, extend, finish, open_positions
from spot_jax.models.target import TargetModel
from spot_jax.passes import DecodeConfig, Pass, evaluate, widen
from spot_jax.state import DecodeResult, DraftTree, State

__all__ = ["DecodeConfig", "Request", "advance", "begin", "decode", "draft", "finish"]


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
    config = config.settled(target.config)
    if config.budget == 1:
        drafter = None
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
    if drafter is None and config.look_ahead:
        raise ValueError("look_ahead needs a drafter")
    config.check(target.config)
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
    if config.look_ahead:
        loop = ahead.begin(target, loop)

    def one_pass(loop):
        if config.look_ahead and drafter is not None:
            loop, contexts = ahead.advance(target, config, rows_of, loop)
            return ahead.draft(target, config, drafter, rows_of, loop, contexts)
        loop, context = advance(target, config, rows_of, loop)
        return draft(config, drafter, loop, context)

    loop = jax.lax.while_loop(lambda loop: ~jnp.all(loop.done), one_pass, loop)
    return finish(target, config, rows_of, loop)


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
    slot, active = jnp.arange(valid.shape[1])[None], ~loop.done
    table, experience, size = config.costs, loop.experience, None
    if table is not None and experience is not None:
        size = costs.choose_size(table, experience, loop.tree, active, jnp.any(loop.opening))
        valid = valid & (slot < jnp.array(table.sizes)[size])
    result = _evaluate_slots(target, config, request, scene, loop.cache, nodes, folded, size)
    stopped, ended = ends(result.successor, block[:, None], request, shape, config)
    complete = ~jnp.any(result.successor.masked, axis=-1)
    root = (loop.opening & folded).astype(jnp.int32)
    verdict = verify.walk(nodes, valid, result.successor, stopped | ended | complete, root)
    last = verdict.last
    if table is not None and experience is not None and size is not None:
        visited = verdict.order >= 0
        experience = costs.learn(table, experience, loop.tree, active, size, visited)
    successor, parent, reading = jax.tree.map(
        lambda x: rows.pick_slot(x, last), (result.successor, nodes, result.reading)
    )
    block_tokens = rows.take_block(loop.canvas, loop.start, length)
    block_tokens = jnp.where(active[:, None], successor.tokens, block_tokens)
    stopped, done = (rows.pick_slot(x, last) for x in (stopped, stopped | ended))
    finished = rows.pick_slot(complete, last) & ~done & active
    blank = State(
        jnp.full_like(successor.tokens, shape.mask_id),
        open_positions(shape, request, loop.start + length),
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
        drafted=loop.drafted + jnp.where(active, jnp.sum(valid, axis=-1) - 1, 0),
        accepted=loop.accepted + jnp.maximum(steps - 1, 0),
        trace=extend(loop.trace, loop, loop.start, result, verdict, active[:, None, None]),
        experience=experience,
    )
    return loop, context


def draft(config: DecodeConfig, drafter: Drafter | None, loop: Loop, context: DraftContext) -> Loop:
    """Puts the tree of the next pass into the loop; without a drafter, the root alone."""
    if drafter is None:
        return loop._replace(tree=empty_tree(context.root, config.num_slots))
    table, experience = config.costs, loop.experience
    if table is None or experience is None:
        return loop._replace(tree=drafter(context, config.num_slots))
    # The step that completes a block is not drafted.
    fresh = context.fresh & (jnp.sum(context.root.masked, axis=-1) > 1)
    chosen = costs.choose_draft(table, experience, ~loop.done, fresh, jnp.any(loop.opening))

    def grow(budget, context):
        tree = drafter(context, budget) if budget > 1 else empty_tree(context.root, 1)
        return _with_room(tree, config.num_slots)

    branches = [functools.partial(grow, size) for size in table.sizes]
    tree = jax.lax.switch(chosen, branches, context)
    return loop._replace(tree=tree, experience=experience._replace(drafted=chosen))


def _with_room(tree: DraftTree, num_slots: int) -> DraftTree:
    """The tree with empty slots behind its own."""
    more = empty_tree(State(tree.tokens[:, 0], tree.masked[:, 0]), num_slots)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y[:, x.shape[1] :]], axis=1), tree, more)


def _evaluate_slots(
    target, config, request, scene: Scene, cache, nodes: State, folded, size
) -> Pass:
    def run(num_slots):
        result = evaluate(target, config, request.keys, scene, cache, nodes, num_slots)
        return widen(result, config.num_slots)

    if size is not None:
        return jax.lax.switch(size, [functools.partial(run, n) for n in config.costs.sizes])
    if config.budget > 1 or config.reference_shape:
        return run(config.num_slots)
    if not folded:
        return run(1)
    # Plain decoding reads one state, and the finished block too when one opens.
    return jax.lax.cond(jnp.any(scene.opening), lambda: run(2), lambda: run(1))


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
