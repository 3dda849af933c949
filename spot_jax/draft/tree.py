"""Best-first draft trees in fixed storage, with equal states merged."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spot_jax.draft.context import DraftContext
from spot_jax.state import NO_PARENT, DraftTree, State

# propose(states [B, L]) -> log P(next commit) [B, L, A] and its token [B, L, A]
Propose = Callable[[State], tuple[Float[Array, "B L A"], Int[Array, "B L A"]]]


class _Growth(NamedTuple):
    tree: DraftTree
    child_log_prob: Float[Array, "B N L A"]
    child_token: Int[Array, "B N L A"]


def empty_tree(root: State, budget: int) -> DraftTree:
    """A tree of `budget` slots that holds the root alone."""
    rows, length = root.masked.shape

    def slots(x):
        return jnp.broadcast_to(x[:, None], (rows, budget, length))

    first = jnp.broadcast_to(jnp.arange(budget) == 0, (rows, budget))
    return DraftTree(
        tokens=slots(root.tokens),
        masked=slots(root.masked),
        parent=jnp.full((rows, budget), NO_PARENT),
        valid=first,
        log_value=jnp.where(first, 0.0, -jnp.inf),
    )


def best_first(context: DraftContext, propose: Propose, budget: int) -> DraftTree:
    """Grows a tree by the most probable next state, one node at a time.

    A node's value is the probability that decoding passes through it: the sum over its parents in
    the tree of the parent's value times the probability of the commit. States reached by several
    paths are one node; a parent found later adds to its value, but not to the values below it.

    Args:
      context: see `DraftContext`.
      propose: children of one state a row; -inf where there is none. Called `budget - 1` times.
      budget: slots, root included.
    """
    tree = empty_tree(context.root, budget)
    log_prob, token = propose(context.root)
    rows, length, num = log_prob.shape
    growth = _Growth(
        tree,
        jnp.full((rows, budget, length, num), -jnp.inf),
        jnp.zeros((rows, budget, length, num), token.dtype),
    )
    growth = _expand(growth, 0, log_prob, token)

    def grow(slot, growth):
        growth = _add(growth, slot)
        state = State(growth.tree.tokens[:, slot], growth.tree.masked[:, slot])
        return _expand(growth, slot, *propose(state))

    if budget > 1:
        growth = jax.lax.fori_loop(1, budget - 1, grow, growth)
        growth = _add(growth, budget - 1)
    return cut(growth.tree, context)


def cut(tree: DraftTree, context: DraftContext) -> DraftTree:
    """Leaves only the root in rows that have no stale reading to draft from."""
    root = jnp.arange(tree.valid.shape[1])[None] == 0
    return tree._replace(valid=tree.valid & (context.fresh[:, None] | root))


def _add(growth: _Growth, slot) -> _Growth:
    """Fills a slot with the most probable child that is not in the tree."""
    tree = growth.tree
    rows, _, length, num = growth.child_log_prob.shape
    value = tree.log_value[..., None, None] + growth.child_log_prob
    flat = value.reshape(rows, -1)
    best = jnp.argmax(flat, axis=-1)
    found = jnp.isfinite(jnp.take_along_axis(flat, best[:, None], axis=-1))[:, 0]
    parent, position = best // (length * num), best // num % length
    token = jnp.take_along_axis(growth.child_token.reshape(rows, -1), best[:, None], axis=-1)
    here = jnp.arange(length)[None] == position[:, None]
    index = parent[:, None, None]
    tokens = jnp.where(here, token, jnp.take_along_axis(tree.tokens, index, axis=1)[:, 0])
    masked = jnp.take_along_axis(tree.masked, index, axis=1)[:, 0] & ~here
    # Every (node, position, token) that leads to the same state: merged, and used up.
    leads = _leads_to(tree, State(tokens[:, None], masked[:, None]))
    same = leads[..., None] & (growth.child_token == tokens[:, None, :, None])
    merged = jax.nn.logsumexp(jnp.where(same, value, -jnp.inf), axis=(1, 2, 3))
    tree = DraftTree(
        tokens=tree.tokens.at[:, slot].set(tokens),
        masked=tree.masked.at[:, slot].set(masked),
        parent=tree.parent.at[:, slot].set(jnp.where(found, parent, NO_PARENT)),
        valid=tree.valid.at[:, slot].set(found),
        log_value=tree.log_value.at[:, slot].set(jnp.where(found, merged, -jnp.inf)),
    )
    return growth._replace(
        tree=tree, child_log_prob=jnp.where(same, -jnp.inf, growth.child_log_prob)
    )


def _expand(growth: _Growth, slot, log_prob, token) -> _Growth:
    """Stores a node's children; those that are in the tree already only add to its values."""
    tree = growth.tree
    state = State(tree.tokens[:, slot, None], tree.masked[:, slot, None])
    # The step that completes the block needs no check: its successor is known to be complete.
    inner = jnp.sum(state.masked[:, 0], axis=-1)[:, None, None] > 1
    log_prob = jnp.where(inner & state.masked[:, 0, :, None], log_prob, -jnp.inf)
    reached = _reached_from(tree, state)
    same = reached[..., None] & (token[:, None] == tree.tokens[..., None])
    gain = jax.nn.logsumexp(jnp.where(same, log_prob[:, None], -jnp.inf), axis=(2, 3))
    gain = gain + tree.log_value[:, slot, None]
    log_prob = jnp.where(jnp.any(same, axis=1), -jnp.inf, log_prob)
    log_prob = jnp.where(tree.valid[:, slot, None, None], log_prob, -jnp.inf)
    return _Growth(
        tree._replace(log_value=jnp.logaddexp(tree.log_value, gain)),
        growth.child_log_prob.at[:, slot].set(log_prob),
        growth.child_token.at[:, slot].set(token),
    )


def _differs(a: State, b: State) -> Array:
    return (a.tokens != b.tokens) | (a.masked != b.masked)


def _leads_to(tree: DraftTree, child: State) -> Array:
    """`[B, N, L]`: the one position by whose commit a node becomes `child [B, 1, L]`."""
    differs = _differs(State(tree.tokens, tree.masked), child)
    one = jnp.sum(differs, axis=-1, keepdims=True) == 1
    return differs & one & tree.masked & ~child.masked & tree.valid[..., None]


def _reached_from(tree: DraftTree, parent: State) -> Array:
    """`[B, N, L]`: the one position by whose commit `parent [B, 1, L]` becomes a node."""
    differs = _differs(State(tree.tokens, tree.masked), parent)
    one = jnp.sum(differs, axis=-1, keepdims=True) == 1
    return differs & one & parent.masked & ~tree.masked & tree.valid[..., None]
