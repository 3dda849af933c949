"""Best-first draft trees in fixed storage, with equal states merged."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spot_jax.draft.context import DraftContext
from spot_jax.state import NO_PARENT, DraftTree, State

# propose(states [B, L]) -> log P(next commit) [B, L, A] and its token [B, L, A]
Propose = Callable[[State], tuple[Float[Array, "B L A"], Int[Array, "B L A"]]]
# propose(states [B, L]) -> log P(child) [B, K] and the children
ProposeChildren = Callable[[State], tuple[Float[Array, "B K"], "Children"]]


@runtime_checkable
class Children(Protocol):
    """The K states that a state may become next: a pytree of arrays with the axes of states."""

    def become(self, parent: State, index: Int[Array, " B"]) -> State:
        """The child `index` of `parent [B, L]`."""
        ...

    def same(self, parent: State, child: State) -> Bool[Array, "*n K"]:
        """Which children of `parent [*n, L]` are the state `child [*n, L]`; axes broadcast."""
        ...


class Commits(NamedTuple):
    """Children that commit one position each, `K = L * A`."""

    tokens: Int[Array, "*n L A"]

    def become(self, parent: State, index: Int[Array, " B"]) -> State:
        rows, length, num = self.tokens.shape
        token = jnp.take_along_axis(self.tokens.reshape(rows, -1), index[:, None], axis=-1)
        here = jnp.arange(length)[None] == (index // num)[:, None]
        return State(jnp.where(here, token, parent.tokens), parent.masked & ~here)

    def same(self, parent: State, child: State) -> Bool[Array, "*n K"]:
        differs = (parent.tokens != child.tokens) | (parent.masked != child.masked)
        one = jnp.sum(differs, axis=-1, keepdims=True) == 1
        here = differs & one & parent.masked & ~child.masked
        same = here[..., None] & (self.tokens == child.tokens[..., None])
        return same.reshape(*same.shape[:-2], -1)


class Sets(NamedTuple):
    """Children that commit any set of positions, as whole states."""

    tokens: Int[Array, "*n K L"]
    masked: Bool[Array, "*n K L"]

    def become(self, parent: State, index: Int[Array, " B"]) -> State:
        del parent
        index = index[:, None, None]
        return State(*(jnp.take_along_axis(x, index, axis=1)[:, 0] for x in self))

    def same(self, parent: State, child: State) -> Bool[Array, "*n K"]:
        del parent
        same = (self.tokens == child.tokens[..., None, :]) & (
            self.masked == child.masked[..., None, :]
        )
        return jnp.all(same, axis=-1)


class _Growth(NamedTuple):
    tree: DraftTree
    log_prob: Float[Array, "B N K"]
    children: Children


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
    """Grows a tree whose nodes differ from their parents by one commit: see `grow_tree`.

    Args:
      context: see `DraftContext`.
      propose: next commits of one state a row; -inf where there is none.
      budget: slots, root included.
    """

    def children(state: State):
        log_prob, token = propose(state)
        # The step that completes the block needs no check: its successor is known to be complete.
        inner = jnp.sum(state.masked, axis=-1)[:, None, None] > 1
        log_prob = jnp.where(inner & state.masked[..., None], log_prob, -jnp.inf)
        return log_prob.reshape(len(log_prob), -1), Commits(token)

    return grow_tree(context, children, budget)


def grow_tree(context: DraftContext, propose: ProposeChildren, budget: int) -> DraftTree:
    """Grows a tree by the most probable next state, one node at a time.

    A node's value is the probability that decoding passes through it: the sum over its parents in
    the tree of the parent's value times the probability of the commit. States reached by several
    paths are one node; a parent found later adds to its value, but not to the values below it.

    Args:
      context: see `DraftContext`.
      propose: distinct children of one state a row, none of them a completed block; -inf where
        there is none. Called `budget - 1` times.
      budget: slots, root included.
    """
    tree = empty_tree(context.root, budget)
    log_prob, children = propose(context.root)

    def slots(x, fill):
        return jnp.full((len(x), budget, *x.shape[1:]), fill, x.dtype)

    growth = _Growth(tree, slots(log_prob, -jnp.inf), jax.tree.map(lambda x: slots(x, 0), children))
    growth = _expand(growth, 0, log_prob, children)

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
    rows, _, num = growth.log_prob.shape
    value = tree.log_value[..., None] + growth.log_prob
    flat = value.reshape(rows, -1)
    best = jnp.argmax(flat, axis=-1)
    found = jnp.isfinite(jnp.take_along_axis(flat, best[:, None], axis=-1))[:, 0]
    parent = best // num

    def of_parent(x):
        index = parent.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.take_along_axis(x, index, axis=1)[:, 0]

    children, before = jax.tree.map(of_parent, (growth.children, State(tree.tokens, tree.masked)))
    state = children.become(before, best % num)
    # Every child of any node that is the same state: merged, and used up.
    same = _same(tree, growth.children, State(tree.tokens, tree.masked), _each(state))
    merged = jax.nn.logsumexp(jnp.where(same, value, -jnp.inf), axis=(1, 2))
    tree = DraftTree(
        tokens=tree.tokens.at[:, slot].set(state.tokens),
        masked=tree.masked.at[:, slot].set(state.masked),
        parent=tree.parent.at[:, slot].set(jnp.where(found, parent, NO_PARENT)),
        valid=tree.valid.at[:, slot].set(found),
        log_value=tree.log_value.at[:, slot].set(jnp.where(found, merged, -jnp.inf)),
    )
    return growth._replace(tree=tree, log_prob=jnp.where(same, -jnp.inf, growth.log_prob))


def _expand(growth: _Growth, slot, log_prob, children) -> _Growth:
    """Stores a node's children; those that are in the tree already only add to its values."""
    tree = growth.tree
    state = State(tree.tokens[:, slot], tree.masked[:, slot])
    same = _same(tree, _each(children), _each(state), State(tree.tokens, tree.masked))
    gain = jax.nn.logsumexp(jnp.where(same, log_prob[:, None], -jnp.inf), axis=2)
    gain = gain + tree.log_value[:, slot, None]
    log_prob = jnp.where(jnp.any(same, axis=1), -jnp.inf, log_prob)
    log_prob = jnp.where(tree.valid[:, slot, None], log_prob, -jnp.inf)
    return _Growth(
        tree._replace(log_value=jnp.logaddexp(tree.log_value, gain)),
        growth.log_prob.at[:, slot].set(log_prob),
        jax.tree.map(lambda x, new: x.at[:, slot].set(new), growth.children, children),
    )


def _each(x):
    """Broadcasts what belongs to a row over the nodes of its tree."""
    return jax.tree.map(lambda leaf: leaf[:, None], x)


def _same(tree: DraftTree, children: Children, parent: State, child: State) -> Array:
    """`[B, N, K]`: equal children and states, of which one side is the nodes of a tree."""
    return children.same(parent, child) & tree.valid[..., None]
