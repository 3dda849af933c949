"""Traces of drafted decoding: what was read off the decoder's path, and where that is of use.

A pass reads every node of its tree. `draft.context.nearest` lets the next tree draw on all of them,
so the order network is to learn from them too: for each depth below the root, from the reading that
it will be given there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spot_jax.decode import DecodeConfig, Request, advance, begin, draft, finish
from spot_jax.draft.context import Drafter
from train import traces

MAX_DEPTH = 16

_begin = jax.jit(begin)


def collect_drafted(
    target, prompts, prompt_lengths, keys, config: DecodeConfig, drafter: Drafter
) -> traces.Traces:
    """Decodes one batch with a drafter and keeps the readings that drafting would use.

    Args:
      target: a `TargetModel`.
      prompts: int32 `[B, P]`.
      prompt_lengths: int32 `[B]`.
      keys: typed request keys.
      config: of decoding, with the drafter's budget.
      drafter: whose trees decide what is read.
    """
    request = Request(prompt_lengths, prompt_lengths + config.max_new_tokens, keys)
    loop = _begin(target, prompts, request, config)
    passes = []
    while not bool(jnp.all(loop.done)):
        loop, found = _advance(target, config, request, loop, drafter)
        passes.append(jax.device_get(found))
    step = jax.device_get(finish(target, config, request, loop).trace.step)
    key_data = np.asarray(jax.random.key_data(keys))
    return gather(np.asarray(loop.canvas), step, passes, target.config.block_length, key_data)


@functools.partial(jax.jit, donate_argnums=(3,))
def _advance(target, config, request, loop, drafter):
    loop, context = advance(target, config, request, loop)
    found = dict(
        evidence=context.evidence,
        root_masked=context.root.masked,
        fresh=context.fresh,
        start=context.positions[:, 0],
    )
    return draft(config, drafter, loop, context), found


def gather(canvas, step, passes, length: int, key_data) -> traces.Traces:
    """The nearest readings of each depth of each pass as points of blocks.

    Args:
      canvas: final tokens `[B, C]`.
      step: that committed each position, `[B, C]`.
      passes: of each pass what `_advance` returns.
      length: of a block.
      key_data: of the requests.
    """
    fresh = np.stack([p["fresh"] for p in passes])
    which, row = np.nonzero(fresh)
    start = np.stack([p["start"] for p in passes])[which, row]
    blocks, block = np.unique(np.stack([row, start], axis=1), axis=0, return_inverse=True)
    index = blocks[:, 1, None] + np.arange(length)
    tokens, order = canvas[blocks[:, 0, None], index], step[blocks[:, 0, None], index]
    block = block.reshape(-1)
    root = np.stack([p["root_masked"] for p in passes])[which, row]
    nodes, valid = (
        jax.tree.map(lambda *x: np.stack(x)[which, row], *(get(p["evidence"]) for p in passes))
        for get in (lambda e: e.nodes, lambda e: e.valid)
    )
    slots = nearest_slots(
        nodes.tokens, nodes.masked, valid, root, tokens[block], order[block], MAX_DEPTH
    )
    point, slot, first, end = ranges(slots)
    reading = {
        name: np.stack(
            [
                getattr(passes[w]["evidence"].reading, name)[r, s]
                for w, r, s in zip(which[point], row[point], slot, strict=True)
            ]
        )
        for name in ("top_log_probs", "top_tokens", "log_doubt", "entropy")
    }
    return traces.Traces(
        **reading,
        read_masked=nodes.masked[point, slot],
        root_masked=root[point],
        block=block[point].astype(np.int32),
        depths=np.stack([first, end], axis=1).astype(np.int32),
        tokens=tokens,
        order=order,
        start=blocks[:, 1].astype(np.int32),
        key=key_data[blocks[:, 0]],
    )


def nearest_slots(node_tokens, node_masked, valid, root_masked, tokens, order, max_depth: int):
    """The slot that `draft.context.nearest` picks for the true state at each depth.

    Args:
      node_tokens, node_masked: evaluated states, `[P, N, L]`.
      valid: `[P, N]`.
      root_masked: of the tree that is drafted next, `[P, L]`.
      tokens, order: final tokens, and steps that committed them, `[P, L]`.
      max_depth: depths to look at.

    Returns:
      `[P, max_depth]`; -1 where there is no commit to predict at that depth.
    """
    known = root_masked & (order >= 0)
    future = known.sum(axis=1)
    place = np.argsort(
        np.argsort(np.where(known, order, np.iinfo(order.dtype).max), axis=1), axis=1
    )
    never = np.iinfo(np.int64).max
    since = np.where(known, place + 1, np.where(root_masked, never, 0))
    wrong = node_tokens != tokens[:, None]
    needs = np.where(node_masked, 0, np.where(wrong, never, since[:, None])).max(axis=-1)
    needs = np.where(valid, needs, never)
    count = (~node_masked).sum(axis=-1)
    slots = np.full((len(future), max_depth), -1)
    for depth in range(max_depth):
        slot = np.where(needs <= depth, count, -1).argmax(axis=1)
        slots[:, depth] = np.where(depth < future, slot, -1)
    return slots


def ranges(slots):
    """Runs of equal slots along each row, as arrays: row, slot, first depth, end."""
    change = np.ones(slots.shape, bool)
    change[:, 1:] = slots[:, 1:] != slots[:, :-1]
    row, first = np.nonzero(change)
    last = np.append(row[1:] != row[:-1], True)
    end = np.where(last, slots.shape[1], np.append(first[1:], 0))
    kept = slots[row, first] >= 0
    return row[kept], slots[row, first][kept], first[kept], end[kept]
