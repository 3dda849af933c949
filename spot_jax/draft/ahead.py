"""Drafts that go on behind the end of the block: one tree over several blocks.

The first reading of a block is that of its all-mask start, which sees the block before it. A pass
therefore carries, beside the tree of the current block, a guess of its whole text and the start of
the next block behind that guess. Where decoding arrives at the guess it goes on from there, in the
same pass. Where it stays, the start's reading is a stale reading of the next block, from which the
next pass drafts the next block's states, its text, and the start of the block after that.

A block without any reading cannot be guessed, but the start of the block behind it can be read all
the same, behind its masks: a *blind* start. Decoding never visits it; its reading, as good as the
target is at skipping a block, only serves to draft. Without it decoding would take one pass a block
at least, however good the drafts are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spot_jax import noise
from spot_jax.draft.context import DraftContext, Drafter, committed, coupled_draws, stale_reading
from spot_jax.state import NO_PARENT, DraftTree, Layout, State

# Blocks that a pass drafts from readings of theirs: the current one and the next.
BLOCKS = 2


class Outlook(NamedTuple):
    """What is drafted of each block; `H` counts blocks from the current one.

    Attributes:
      trees: from the known next state, or from the all-mask start of a later block.
      texts: the likeliest whole text.
      log_reach: log of the estimated probability that decoding passes from the tree's root through
        the tree to that text.
    """

    trees: DraftTree
    texts: Int[Array, "H B L"]
    log_reach: Float[Array, "H B"]


def foresee(drafter: Drafter, contexts: DraftContext, budget: int) -> Outlook:
    """Drafts `BLOCKS` blocks, `contexts` having a leading axis of that size."""

    def one(context: DraftContext):
        tree = drafter(context, budget)
        return Outlook(tree, *likeliest_text(context, tree))

    return jax.vmap(one)(contexts)


def likeliest_text(
    context: DraftContext, tree: DraftTree
) -> tuple[Int[Array, "B L"], Float[Array, " B"]]:
    """The text in which the tree's deepest node ends under the stale reading, and its `log_reach`.

    A token is taken to stay with probability sigmoid(lead over the runner-up).
    """
    rule = context.rule
    left = jnp.sum(tree.masked, axis=-1)
    deepest = tree.valid & (
        left == jnp.min(jnp.where(tree.valid, left, left.shape[-1] + left), axis=-1, keepdims=True)
    )
    leaf = jnp.argmax(jnp.where(deepest, tree.log_value, -jnp.inf), axis=-1)[:, None, None]
    state = State(*(jnp.take_along_axis(x, leaf, axis=1)[:, 0] for x in (tree.tokens, tree.masked)))

    def step(carry):
        count, (tokens, masked), stays = carry
        counts = committed(masked)
        draws = coupled_draws(context, counts, 2)
        order = noise.order_draws(context.keys, context.positions, counts)
        chosen = rule(rule.candidates(masked), stale_reading(context, draws), order)
        stay = jax.nn.log_sigmoid(-draws.lead[..., 1])
        state = State(jnp.where(chosen, draws.tokens[..., 0], tokens), masked & ~chosen)
        return count + 1, state, stays + jnp.sum(jnp.where(chosen, stay, 0.0), axis=-1)

    def going(carry):
        return jnp.any(carry[1].masked) & (carry[0] < state.masked.shape[-1])

    stays = jnp.zeros(leaf.shape[0], jnp.float32)
    _, (text, _), stays = jax.lax.while_loop(going, step, (jnp.int32(0), state, stays))
    agrees = jnp.all((tree.tokens == text[:, None]) | tree.masked, axis=-1)
    value = jnp.where(deepest & agrees, tree.log_value, -jnp.inf)
    return text, stays + jax.nn.logsumexp(value, axis=-1)


def lay_out(
    outlook: Outlook,
    guessed: Bool[Array, "H B"],
    blind: Bool[Array, " B"],
    finished: Int[Array, "B L"],
    opening: Bool[Array, " B"],
    budget: int,
) -> tuple[DraftTree, Layout]:
    """Merges the trees of all blocks into the slots of one pass.

    First come the finished block of opening rows, the root, each guessed text with the start behind
    it, and the blind start. What is left goes to the other states by their values; those of the
    next block are worth what reaching it is. Parents are not kept: nothing reads them.

    Args:
      outlook: see `Outlook`.
      guessed: blocks whose guessed text takes part; see `guesses`.
      blind: rows in which the start behind the block after these takes part.
      finished: the block before the current one.
      opening: rows in which it is not cached yet.
      budget: slots.
    """
    trees, texts, log_reach = outlook
    start = State(trees.tokens[-1, :, :1], trees.masked[-1, :, :1])
    known = jnp.zeros_like(start.masked)
    tokens, masked, place = [finished[:, None]], [known], [-1]
    # Values are at most 0: what has to be in has more, and the same order in the pool as here.
    score = [jnp.where(opening, 3.0, -jnp.inf)[:, None]]
    root, worth = jnp.full((len(finished), 1), 2.0), jnp.zeros((len(finished), 1))
    for h in range(BLOCKS):
        value = jnp.where(trees.valid[h], worth + trees.log_value[h], -jnp.inf)[:, 1:]
        guess = jnp.where(guessed[h], 1.0, -jnp.inf)[:, None]
        tokens += [trees.tokens[h], texts[h][:, None]]
        masked += [trees.masked[h], known]
        score += [root, value, guess]
        place += [h] * (trees.valid.shape[-1] + 1)
        root, worth = guess, worth + jnp.where(guessed[h], log_reach[h], -jnp.inf)[:, None]
    tokens, masked = (
        jnp.concatenate([*x, start_x, start_x], axis=1)
        for x, start_x in zip((tokens, masked), start, strict=True)
    )
    score += [root, jnp.where(blind, 0.5, -jnp.inf)[:, None]]
    score, chosen = jax.lax.top_k(jnp.concatenate(score, axis=1), budget)
    used, last = jnp.isfinite(score), jnp.sum(guessed, axis=0)
    is_blind = chosen == tokens.shape[1] - 1
    place = jnp.where(is_blind, last[:, None] + 1, jnp.array([*place, BLOCKS, 0])[chosen])
    tokens, masked = (jnp.take_along_axis(x, chosen[..., None], axis=1) for x in (tokens, masked))
    valid = used & jnp.any(masked, axis=-1) & ~is_blind
    tree = DraftTree(
        tokens=tokens,
        masked=masked,
        parent=jnp.full_like(chosen, NO_PARENT),
        valid=valid,
        log_value=jnp.where(valid, jnp.minimum(score, 0.0), -jnp.inf),
    )
    # The blind start sees the masks of the last start, or of the root, in the place of a text.
    slots = [jnp.where(opening, 0, -1)]
    for h in range(BLOCKS + 1):
        behind = jnp.where(blind & (last == h), opening + 2 * h, -1)
        slots.append(jnp.where(guessed[h], opening + 1 + 2 * h, behind) if h < BLOCKS else behind)
    return tree, Layout(jnp.where(used, place, 0), jnp.stack(slots, axis=1))


def guesses(
    trees: DraftTree,
    fresh: Bool[Array, "H B"],
    goes_on: Bool[Array, "H B"],
    room: Bool[Array, "G B"],
    opening: Bool[Array, " B"],
    budget: int,
) -> tuple[Bool[Array, "H B"], Bool[Array, " B"]]:
    """Blocks whose guessed text takes part in a pass, with the start of the block behind it; and
    rows in which a blind start does, behind the first block that has no reading.

    They do where a chain of single commits could come that far within the budget: a start that
    is out of reach may still be read for the next pass, but not long before it is needed.

    Args:
      trees: of each block.
      fresh: blocks that had a reading to draft from.
      goes_on: whether the guessed text leaves the row open.
      room: whether the row's limit lies behind each block; `G = BLOCKS + 1`.
      opening: rows whose first slot is taken by the finished block.
      budget: slots.
    """
    _, rows, _, length = trees.masked.shape
    left = jnp.concatenate([jnp.sum(trees.masked[:, :, 0], axis=-1), jnp.full((1, rows), length)])
    needed = opening[None] + 3 + 2 * jnp.arange(BLOCKS + 1)[:, None]
    able = room & (jnp.cumsum(left, axis=0) <= budget) & (needed <= budget)
    guessed = jnp.cumprod(able[:BLOCKS] & fresh & goes_on, axis=0).astype(bool)
    every = jnp.ones((1, rows), bool)
    first = able & jnp.concatenate([every, guessed]) & jnp.concatenate([~fresh, every])
    return guessed, jnp.any(first, axis=0)
