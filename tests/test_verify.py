"""The walk: whatever was drafted, it follows the plain decoder (L0)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_jax import verify
from spot_jax.state import State
from tests import reference

LENGTH, ALPHABET, MASK = 4, 3, 9


def toy_step(salt, state):
    """A deterministic step: which masked position, or two, and which tokens, depend on it all."""
    tokens, masked = state
    mixed = hash((salt, *tokens, *masked))
    rng = np.random.default_rng(mixed % 2**32)
    open_positions = [i for i in range(LENGTH) if masked[i]]
    count = min(len(open_positions), 1 + int(rng.random() < 0.3))
    tokens, masked = list(tokens), list(masked)
    for i in rng.choice(open_positions, size=count, replace=False) if open_positions else ():
        tokens[i], masked[i] = int(rng.integers(ALPHABET)), False
    return tuple(tokens), tuple(masked)


def toy_final(salt, successor):
    """Ends when the block is complete, and now and then before."""
    return not any(successor[1]) or hash((successor, salt)) % 11 == 0


def orbit(salt, state):
    """States after each step of the plain decoder, up to the final one."""
    states = []
    while True:
        state = toy_step(salt, state)
        states.append(state)
        if toy_final(salt, state):
            return states


def adversarial_node(rng, ahead, state):
    """A true successor, a wrong state of the same shape, the root again, or a whole other one."""
    kind = rng.integers(5)
    tokens, masked = map(list, ahead[rng.integers(len(ahead))])
    where = int(rng.integers(LENGTH))
    if kind == 1:
        tokens[where] = int(rng.integers(ALPHABET))
    elif kind == 2:
        masked[where] = not masked[where]
    elif kind == 3:
        tokens, masked = map(list, state)
    elif kind == 4:
        tokens, masked = tokens[::-1], masked[::-1]
    return tuple(tokens), tuple(masked)


@jax.jit
def jitted_walk(tokens, masked, valid, next_tokens, next_masked, final, root):
    successors = State(next_tokens, next_masked)
    return verify.walk(State(tokens, masked), valid, successors, final, root)


def run_walk(rows):
    """`rows`: lists of (nodes, valid, successors, final, root), all of one budget."""
    nodes, valid, successors, final, root = zip(*rows, strict=True)
    tokens, masked = (np.array([[s[i] for s in row] for row in nodes]) for i in (0, 1))
    after, open_after = (np.array([[s[i] for s in row] for row in successors]) for i in (0, 1))
    arrays = (tokens, masked, np.array(valid), after, open_after, np.array(final), np.array(root))
    return jax.device_get(jitted_walk(*map(jnp.asarray, arrays)))


def visited_slots(order):
    return [int(np.flatnonzero(order == k)[0]) for k in range(int(order.max()) + 1)]


@given(seed=st.integers(0, 2**32 - 1), budget=st.integers(1, 8))
@settings(max_examples=60)
def test_walk_is_the_plain_decoder_whatever_is_drafted(seed, budget):
    rng = np.random.default_rng(seed)
    num_rows = 3
    blank = ((MASK,) * LENGTH, (True,) * LENGTH)
    plain = [orbit(seed + row, blank) for row in range(num_rows)]
    state, made, passes = [blank] * num_rows, [[] for _ in range(num_rows)], 0
    done = [False] * num_rows
    while not all(done):
        rows = []
        for row in range(num_rows):
            ahead = [state[row], *plain[row][len(made[row]) :]]
            nodes = [adversarial_node(rng, ahead, state[row]) for _ in range(budget)]
            valid = list(rng.random(budget) < 0.7)
            root = int(rng.integers(budget))
            nodes[root], valid[root] = state[row], bool(rng.random() < 0.5)
            successors = [toy_step(seed + row, node) for node in nodes]
            final = [toy_final(seed + row, s) for s in successors]
            rows.append((nodes, valid, successors, final, root))
        verdict = run_walk(rows)
        for row, (nodes, valid, successors, final, root) in enumerate(rows):
            path = visited_slots(verdict.order[row])
            assert path[0] == root and path[-1] == verdict.last[row]
            assert len(path) == verdict.num_steps[row] >= 1
            # Of equal nodes any may be taken; the states are the decoder's.
            expected = reference.walk(nodes, valid, successors, final, root)
            assert [nodes[i] for i in path] == [nodes[i] for i in expected]
            assert not any(final[i] for i in path[:-1]), "went on beyond the end"
            if not done[row]:
                made[row] += [successors[i] for i in path]
                state[row] = made[row][-1]
                done[row] = final[path[-1]]
        passes += 1
    assert made == plain
    assert passes <= max(map(len, plain)), "more passes than plain decoding has steps"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_a_complete_tree_is_walked_to_its_end_in_any_order_of_slots(order):
    chain = [((MASK,) * LENGTH, (True,) * LENGTH)]
    while any(chain[-1][1]):
        done = LENGTH - sum(chain[-1][1]) + 1
        tokens = tuple(range(done)) + (MASK,) * (LENGTH - done)
        chain.append((tokens, tuple(i >= done for i in range(LENGTH))))
    nodes = [chain[i] for i in order]
    successors = [chain[i + 1] for i in order]
    final = [i == 3 for i in order]
    verdict = run_walk([(nodes, [True] * 4, successors, final, order.index(0))])
    assert verdict.order[0].tolist() == list(order)
    assert verdict.num_steps[0] == 4 and verdict.last[0] == order.index(3)


def test_tokens_and_masks_must_both_agree():
    tokens = (MASK, MASK, 1, 1)
    start = (tokens, (True, True, False, False))
    # The decoder drew the mask token literally: same ids, one position less masked.
    after = (tokens, (False, True, False, False))
    last = ((MASK, 0, 1, 1), (False, False, False, False))
    other = ((MASK, 0, 1, 1), after[1])
    for drafted, steps in ((after, 2), (start, 1), (other, 1)):
        rows = [([start, drafted], [True, True], [after, last], [False, True], 0)]
        assert run_walk(rows).num_steps[0] == steps


def test_an_invalid_slot_is_never_reached():
    start = ((MASK,) * LENGTH, (True,) * LENGTH)
    after = toy_step(0, start)
    nodes, successors = [start, after, after], [after, toy_step(0, after), toy_step(0, after)]
    none = run_walk([(nodes, [True, False, False], successors, [False] * 3, 0)])
    assert none.order[0].tolist() == [0, -1, -1]
    second = run_walk([(nodes, [True, False, True], successors, [False] * 3, 0)])
    assert second.order[0].tolist() == [0, -1, 1]
