"""Look-ahead: passes that cross from one block into the next, and into the one after that.

What is visited is the plain decoder's own path, as without look-ahead. Two states are the same
only in the same block; and the nodes of a later block see guessed texts of the blocks between, so
the walk enters that block only where decoding arrives at exactly these texts. Their keys, computed
in the same pass, then go into the cache, and the block is not opened again.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spot_jax import rows, verify
from spot_jax.draft.ahead import BLOCKS, foresee, guesses, lay_out
from spot_jax.draft.context import DraftContext, Drafter, Evidence
from spot_jax.forward import Scene, store_blocks
from spot_jax.loop import Loop, Request, ends, extend
from spot_jax.models.target import TargetModel
from spot_jax.passes import DecodeConfig, evaluate
from spot_jax.state import Layout, State


def begin(target: TargetModel, loop: Loop) -> Loop:
    """Adds what the first pass needs: it reads the root, and the next block blindly."""
    tree, (num_rows, num_slots) = loop.tree, loop.tree.valid.shape
    tree = tree._replace(
        tokens=tree.tokens.at[:, 1].set(target.config.mask_id),
        masked=tree.masked.at[:, 1].set(True),
    )
    place = jnp.zeros((num_rows, num_slots), jnp.int32).at[:, 1].set(1)
    clean = jnp.full((num_rows, BLOCKS + 2), -1, jnp.int32).at[:, 1].set(0)
    return loop._replace(tree=tree, layout=Layout(place, clean))


def advance(
    target: TargetModel, config: DecodeConfig, request: Request, loop: Loop
) -> tuple[Loop, DraftContext]:
    """One pass of every row that is not done, and what the next tree can be drafted from.

    As `decode.advance`, except that there is a context of the current block and of each block
    behind it that is drafted: `BLOCKS` of them on a leading axis.
    """
    assert loop.layout is not None
    shape, tree, (place, clean) = target.config, loop.tree, loop.layout
    length = shape.block_length
    scene = Scene(loop.canvas, request.limits, loop.start, loop.opening, loop.layout)
    nodes = State(tree.tokens, tree.masked)
    result = evaluate(target, config, request.keys, scene, loop.cache, nodes, config.num_slots)
    positions = (loop.start[:, None] + place * length)[..., None] + jnp.arange(length)[None, None]
    stopped, ended = ends(result.successor, positions, request, shape, config)
    complete = ~jnp.any(result.successor.masked, axis=-1)
    crossing = complete & ~stopped & ~ended & _arrives(nodes.tokens, loop.layout, result.successor)
    onward = State(
        jnp.where(crossing[..., None], shape.mask_id, result.successor.tokens),
        result.successor.masked | crossing[..., None],
    )
    verdict = verify.walk(
        _in_block(nodes, place),
        tree.valid,
        _in_block(onward, place + crossing),
        stopped | ended | (complete & ~crossing),
        loop.opening.astype(jnp.int32),
    )
    active, last = ~loop.done, verdict.last
    crossed, complete, stopped, done, text = (
        rows.pick_slot(x, last)
        for x in (place, complete, stopped, stopped | ended, result.successor.tokens)
    )
    finished = complete & ~done & active
    moved = jnp.where(active, crossed + finished, 0)
    canvas, trace = loop.canvas, loop.trace
    for h in range(BLOCKS + 1):
        start, reached = loop.start + h * length, active & (crossed >= h)
        here = text
        if h < BLOCKS:
            guess = rows.pick_slot(nodes.tokens, jnp.maximum(clean[:, h + 1], 0))
            here = jnp.where((crossed > h)[:, None], guess, text)
        here = jnp.where(reached[:, None], here, rows.take_block(canvas, start, length))
        canvas = rows.put_block(canvas, here, start)
        trace = extend(
            trace, loop, start, result, verdict, (active[:, None] & (place == h))[..., None]
        )
    known = active[:, None] & (crossed[:, None] > jnp.arange(BLOCKS)[None])
    known = jnp.concatenate([loop.opening[:, None], known], axis=1)
    steps = jnp.where(active, verdict.num_steps, 0)
    successor = jax.tree.map(lambda x: rows.pick_slot(x, last), result.successor)
    slots = _freshest(clean, last, crossed, finished)
    after = loop._replace(
        cache=store_blocks(scene, loop.cache, result.kept, known),
        canvas=canvas,
        start=loop.start + moved * length,
        opening=finished,
        done=loop.done | done,
        stopped=jnp.where(active, stopped, loop.stopped),
        steps=loop.steps + steps,
        passes=loop.passes + active.astype(jnp.int32),
        drafted=loop.drafted + jnp.where(active, jnp.sum(tree.valid, axis=-1) - 1, 0),
        accepted=loop.accepted + jnp.maximum(steps - 1, 0),
        trace=trace,
    )
    blank = State(jnp.full_like(text, shape.mask_id), jnp.ones_like(successor.masked))
    contexts = []
    for h, slot in enumerate(slots):
        opens = finished if h == 0 else jnp.ones_like(finished)
        root = jax.tree.map(lambda a, b, o=opens: jnp.where(o[:, None], a, b), blank, successor)
        parent, reading = _at((nodes, result.reading), slot)
        read = tree.valid & (place == (crossed + finished + h)[:, None])
        read = read | (jnp.arange(config.num_slots)[None] == slot[:, None])
        contexts.append(
            DraftContext(
                root=root,
                parent=parent,
                reading=reading,
                evidence=Evidence(nodes, result.reading, read),
                fresh=active & ~done & (slot >= 0),
                keys=request.keys,
                positions=(after.start + h * length)[:, None] + jnp.arange(length)[None],
                sampling=config.sampling,
                rule=config.rule_of(shape),
            )
        )
    return after, jax.tree.map(lambda *x: jnp.stack(x), *contexts)


def draft(
    target: TargetModel,
    config: DecodeConfig,
    drafter: Drafter,
    request: Request,
    loop: Loop,
    contexts: DraftContext,
) -> Loop:
    """Puts the slots of the next pass into the loop."""
    shape, budget = target.config, config.num_slots
    outlook = foresee(drafter, contexts, budget)
    texts, positions = (jnp.moveaxis(x, 0, 1) for x in (outlook.texts, contexts.positions))
    whole = State(texts, jnp.zeros_like(texts, bool))
    stopped, ended = ends(whole, positions, request, shape, config)
    length = shape.block_length
    after = loop.start[None] + length * jnp.arange(1, BLOCKS + 2)[:, None]
    guessed, blind = guesses(
        outlook.trees,
        contexts.fresh,
        ~(stopped | ended).T,
        after < request.limits[None],
        loop.opening,
        budget,
    )
    finished = rows.take_block(loop.canvas, jnp.maximum(loop.start - length, 0), length)
    tree, layout = lay_out(outlook, guessed, blind, finished, loop.opening, budget)
    return loop._replace(tree=tree, layout=layout)


def _arrives(tokens: Int[Array, "B N L"], layout: Layout, successor: State) -> Bool[Array, "B N"]:
    """Slots whose complete successor is the guessed text of their block."""
    place, clean = layout
    clean = jnp.pad(clean, ((0, 0), (0, 1)), constant_values=-1)
    guess = jnp.take_along_axis(clean, place + 1, axis=1)
    text = jnp.take_along_axis(tokens, jnp.maximum(guess, 0)[..., None], axis=1)
    return (guess >= 0) & jnp.all(successor.tokens == text, axis=-1)


def _in_block(state: State, place: Int[Array, "B N"]) -> State:
    """States that are the same only in the same block."""
    place = place[..., None]
    return State(
        jnp.concatenate([state.tokens, place.astype(state.tokens.dtype)], axis=-1),
        jnp.concatenate([state.masked, jnp.zeros_like(place, bool)], axis=-1),
    )


def _freshest(clean, last, crossed, finished) -> list[Int[Array, " B"]]:
    """Slots whose readings the blocks that come now are drafted from; -1 where there is none.

    The current block has the reading of the state visited last. A block that has not begun has
    that of its start behind the guessed text, right, wrong or missing: that makes worse drafts.
    """
    begun = jnp.full_like(clean[:, :1], -1)
    starts = jnp.where(clean[:, 1:] >= 0, clean[:, 1:] + 1, -1)
    starts = jnp.concatenate([begun, starts, *[begun] * (BLOCKS - 1)], axis=1)
    current = crossed + finished
    slots = [rows.pick_slot(starts, current + h) for h in range(BLOCKS)]
    return [jnp.where(finished, slots[0], last), *slots[1:]]


def _at(values, slot):
    return jax.tree.map(lambda x: rows.pick_slot(x, jnp.maximum(slot, 0)), values)
