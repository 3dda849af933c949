"""Best-first trees: merged states, values, order, and rows without a reading."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax.commit import TopN
from spot_jax.config import Sampling
from spot_jax.draft import tree
from spot_jax.draft.context import DraftContext, evidence_of
from spot_jax.state import NO_PARENT, Reading, State

MASK = 0


def make_context(masked, fresh=None):
    masked = jnp.asarray(masked)
    rows, length = masked.shape
    zeros = jnp.zeros((rows, length))
    top = jnp.zeros((rows, length, 2))
    reading = Reading(
        jnp.full((rows, length), 5), zeros, top, top.astype(jnp.int32) + 5, zeros, zeros
    )
    state = State(jnp.where(masked, MASK, 9), masked)
    return DraftContext(
        root=state,
        parent=state,
        reading=reading,
        evidence=evidence_of(state, reading),
        fresh=jnp.ones(rows, bool) if fresh is None else jnp.asarray(fresh),
        keys=jax.random.split(jax.random.key(0), rows),
        positions=jnp.zeros((rows, length), jnp.int32),
        sampling=Sampling(),
        rule=TopN(),
    )


def grow(context, propose, budget):
    return jax.jit(lambda context: tree.best_first(context, propose, budget))(context)


def weighted(weights, tokens=((5, 6),)):
    """Next commit in proportion to fixed weights `[L, A]`, over what is still masked."""
    weights = jnp.asarray(weights, jnp.float32)
    tokens = jnp.asarray(tokens)

    def propose(state):
        w = jnp.where(state.masked[..., None], jnp.log(weights)[None], -jnp.inf)
        w = w - jax.nn.logsumexp(w, axis=(1, 2), keepdims=True)
        shape = (len(state.masked), *weights.shape)
        return w, jnp.broadcast_to(tokens[:, : weights.shape[1]], shape)

    return propose


def states_of(found, row=0):
    """Valid nodes as (committed positions with their tokens) -> (slot, value)."""
    nodes = {}
    for slot in np.flatnonzero(np.asarray(found.valid[row])):
        masked = np.asarray(found.masked[row, slot])
        tokens = np.asarray(found.tokens[row, slot])
        key = tuple((int(p), int(tokens[p])) for p in np.flatnonzero(~masked))
        assert key not in nodes, f"{key} is in the tree twice"
        nodes[key] = (slot, float(np.exp(found.log_value[row, slot])))
    return nodes


def test_equal_states_are_one_node_whose_value_sums_its_parents():
    # Three positions, next in proportion to 3:2:1. {0, 1} is reached as 0-1 and as 1-0.
    context = make_context([[True, True, True]])
    nodes = states_of(grow(context, weighted([[3.0], [2.0], [1.0]]), 4))
    assert list(nodes) == [(), ((0, 5),), ((1, 5),), ((0, 5), (1, 5))]
    assert [v for _, v in nodes.values()] == pytest.approx(
        [1.0, 3 / 6, 2 / 6, 3 / 6 * 2 / 3 + 2 / 6 * 3 / 4]
    )


def brute_force(weights, budget):
    """Greedy growth over explicit sets; a late parent adds to its child, not to what is below."""
    positions = range(len(weights))

    def probability(state, p):
        return weights[p] / sum(weights[q] for q in positions if q not in state)

    value = {frozenset(): 1.0}
    while len(value) < budget:
        edges = [
            (value[s] * probability(s, p), s | {p})
            for s in value
            for p in positions
            if p not in s and s | {p} not in value and len(s) + 1 < len(weights)
        ]
        if not edges:
            break
        _, new = max(edges, key=lambda e: e[0])
        value[new] = sum(
            value[new - {p}] * probability(new - {p}, p) for p in new if new - {p} in value
        )
        # The last node fills the budget and is not expanded.
        for p in positions if len(value) < budget else ():
            if p not in new and new | {p} in value:
                value[new | {p}] += value[new] * probability(new, p)
    return value


@pytest.mark.parametrize("budget", [2, 3, 5, 7])
def test_growth_and_values_agree_with_brute_force(budget):
    weights = [8.0, 3.0, 1.0, 0.5]
    context = make_context([[True] * 4])
    found = grow(context, weighted([[w] for w in weights]), budget)
    expected = brute_force(weights, budget)
    nodes = {frozenset(p for p, _ in k): v for k, (_, v) in states_of(found).items()}
    assert nodes == pytest.approx(expected)


def test_every_node_hangs_below_its_parent_and_values_never_rise():
    weights = np.random.default_rng(0).uniform(0.1, 5, size=(6, 2))
    context = make_context([[True] * 6, [True, False, True, True, False, True]])
    found = grow(context, weighted(weights), 12)
    for row in range(2):
        assert found.parent[row, 0] == NO_PARENT
        for slot in np.flatnonzero(np.asarray(found.valid[row]))[1:]:
            parent = int(found.parent[row, slot])
            assert found.valid[row, parent] and parent < slot
            change = np.asarray(found.masked[row, parent]) & ~np.asarray(found.masked[row, slot])
            assert change.sum() == 1
            assert (np.asarray(found.masked[row, parent]) >= found.masked[row, slot]).all()
        committed = (~np.asarray(found.masked[row])).sum(-1) - (~context.root.masked[row]).sum()
        by_depth = [
            np.exp(np.asarray(found.log_value[row]))[
                (committed == d) & np.asarray(found.valid[row])
            ]
            for d in range(1, 6)
        ]
        # States of one depth exclude each other.
        assert all(v.sum() <= 1 + 1e-5 for v in by_depth)


def test_token_alternatives_are_states_of_their_own():
    nodes = states_of(
        grow(make_context([[True, True, True]]), weighted([[5, 4], [1, 0.5], [1, 1]]), 3)
    )
    assert set(nodes) == {(), ((0, 5),), ((0, 6),)}


def test_rows_without_a_reading_keep_the_root_alone():
    context = make_context([[True] * 4, [True] * 4], fresh=[False, True])
    found = grow(context, weighted([[1.0]] * 4), 4)
    assert np.asarray(found.valid).tolist() == [[True, False, False, False], [True] * 4]


def test_a_full_budget_is_no_more_than_the_states_there_are():
    # Three positions: the root and the 3 + 3 states that leave something masked.
    found = grow(make_context([[True] * 3]), weighted([[1.0]] * 3), 10)
    sizes = [len(k) for k in states_of(found)]
    assert sorted(sizes) == [0, *itertools.repeat(1, 3), *itertools.repeat(2, 3)]
