"""Drafters foresee the plain decoder exactly where its distributions stay as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax import noise
from spot_jax.commit import TopN
from spot_jax.config import Sampling
from spot_jax.draft import Chain, ConfidenceTree, DraftContext, Oracle, RandomTree, Spot
from spot_jax.draft.context import Evidence, coupled_draws, evidence_of, nearest
from spot_jax.state import NO_PARENT, Reading, State
from tests import reference, tiny

ROWS, LENGTH, NUM_TOP, MASK, FIRST = 3, 8, 6, 99, 16
KEYS = noise.request_keys(2, ROWS)
# The last row has no reading: it has just opened a block.
FRESH = [True, True, False]


def make_context(sampling=None, rule=None):
    """Distributions over exactly the tokens that a reading keeps, so that it holds them whole."""
    random = np.random.default_rng(5)
    logits = random.normal(scale=1.5, size=(ROWS, LENGTH, NUM_TOP))
    probs = jax.nn.log_softmax(-np.sort(-logits, axis=-1).astype(np.float32))
    ids = np.stack([[random.permutation(60)[:NUM_TOP] for _ in range(LENGTH)] for _ in range(ROWS)])
    masked = np.ones((ROWS, LENGTH), bool)
    masked[0, [0, 3]] = masked[1, :3] = False
    reading = Reading(
        token=jnp.asarray(ids[..., 0]),
        confidence=probs[..., 0],
        top_log_probs=probs,
        top_tokens=jnp.asarray(ids),
        log_doubt=jnp.log1p(-jnp.exp(probs[..., 0])),
        entropy=-jnp.sum(jnp.exp(probs) * probs, axis=-1),
    )
    root = State(jnp.where(masked, MASK, 70 + np.arange(LENGTH)[None]), jnp.asarray(masked))
    return DraftContext(
        root=root,
        parent=root,
        reading=reading,
        evidence=evidence_of(root, reading),
        fresh=jnp.array(FRESH),
        keys=KEYS,
        positions=FIRST + jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH)),
        sampling=sampling or Sampling(),
        rule=rule or TopN(),
    )


def widen(context):
    """The context with two more tokens, of probability 0: as many as `tiny.ORDER` reads."""
    top, ids = context.reading.top_log_probs, context.reading.top_tokens
    more = ((0, 0), (0, 0), (0, 2))
    reading = context.reading._replace(
        top_log_probs=jnp.pad(top, more, constant_values=-jnp.inf), top_tokens=jnp.pad(ids, more)
    )
    return context._replace(reading=reading, evidence=evidence_of(context.parent, reading))


def foreseen(context, row, num_states):
    """States of a row, by the slow twin, if the distributions of its reading stay as they are."""
    key, sampling = reference.key_words(KEYS[row]), context.sampling
    tokens, masked = context.root.tokens[row].tolist(), context.root.masked[row].tolist()
    ids, log_probs = np.asarray(context.reading.top_tokens[row]), context.reading.top_log_probs[row]
    states = [(tokens, masked)]
    while len(states) < num_states:
        tokens, masked = list(states[-1][0]), list(states[-1][1])
        count = LENGTH - sum(masked)
        readings = {}
        for i in range(LENGTH):
            if masked[i]:
                score = np.asarray(log_probs[i], np.float64)
                if sampling.temperature > 0:
                    scale = sampling.temperature if sampling.confidence == "raw" else 1.0
                    score = score / scale + reference.gumbel(key, FIRST + i, count, ids[i])
                best = int(np.argmax(score))
                top = [(float(x), int(v)) for x, v in zip(log_probs[i], ids[i], strict=True)]
                entropy = float(context.reading.entropy[row, i])
                readings[i] = reference.PositionReading(
                    int(ids[i, best]), float(log_probs[i, best]), top, 0.0, entropy
                )

        def uniform(i, count=count):
            return reference.order_uniform(key, FIRST + i, count)

        for i in reference.commit(readings, context.rule, uniform):
            tokens[i], masked[i] = readings[i].token, False
        if not any(masked):
            break  # the step that completes the block needs no check
        states.append((tokens, masked))
    return states


def run(drafter, context, budget):
    return jax.device_get(jax.jit(lambda context: drafter(context, budget))(context))


def valid_states(tree, row):
    slots = np.flatnonzero(tree.valid[row])
    return [(tree.tokens[row, i].tolist(), tree.masked[row, i].tolist()) for i in slots]


@pytest.mark.parametrize(
    ("sampling", "rule", "budget"),
    [
        (Sampling(), TopN(), 4),
        (Sampling(temperature=1.0), TopN(2), 5),
        (Sampling(temperature=0.7, confidence="raw"), TopN(), 9),
        (Sampling(temperature=1.0), TopN(score="random"), 9),
        (Sampling(temperature=1.0), TopN(3, "left_to_right"), 4),
        (Sampling(temperature=1.0), TopN(score="margin"), 3),
        (Sampling(temperature=1.0), TopN(score="entropy"), 3),
    ],
)
def test_a_chain_is_the_future_of_frozen_distributions(sampling, rule, budget):
    context = make_context(sampling, rule)
    tree = run(Chain(), context, budget)
    for row in range(2):
        expected = foreseen(context, row, budget)
        assert valid_states(tree, row) == expected
        parents = [NO_PARENT, *range(len(expected) - 1)]
        assert tree.parent[row, : len(expected)].tolist() == parents
    assert tree.valid[2].tolist() == [True] + [False] * (budget - 1)


def test_a_sharp_confidence_tree_is_the_chain():
    context = make_context(Sampling(temperature=1.0))
    tree = run(ConfidenceTree(sharpness=1e4), context, 4)
    for row in range(2):
        assert valid_states(tree, row) == foreseen(context, row, 4)


def test_the_oracle_follows_the_order_that_it_is_told():
    order = np.random.default_rng(1).permutation(FIRST + LENGTH)
    step = np.broadcast_to(order, (ROWS, FIRST + LENGTH)).copy()
    step[1, -2:] = -1  # decoding ended before these
    tree = run(Oracle(jnp.asarray(step)), make_context(), 9)
    for row, last in ((0, 6), (1, 4)):
        masked = np.asarray(make_context().root.masked[row])
        when = [i for i in np.argsort(step[row, FIRST:]) if masked[i] and step[row, FIRST + i] >= 0]
        states = valid_states(tree, row)
        assert len(states) == last
        for depth, (tokens, open_positions) in enumerate(states):
            committed = set(when[:depth])
            assert open_positions == [bool(m) and i not in committed for i, m in enumerate(masked)]
            likeliest = make_context().reading.top_tokens[row, :, 0]
            assert all(tokens[i] == likeliest[i] for i in committed)


@pytest.mark.parametrize(
    "drafter",
    [RandomTree(jax.random.key(0)), ConfidenceTree(), Spot(tiny.order_params(), tiny.ORDER)],
    ids=["random", "confidence", "spot"],
)
def test_trees_hold_distinct_states_that_grow_from_each_other(drafter, strict):
    context = make_context(Sampling(temperature=1.0))
    tree = run(drafter, widen(context), 12)
    for row in range(2):
        states = valid_states(tree, row)
        assert len({str(state) for state in states}) == len(states) == 12
        assert states[0] == (context.root.tokens[row].tolist(), context.root.masked[row].tolist())
        for slot in range(1, 12):
            (tokens, masked), parent = states[slot], tree.parent[row, slot]
            before, open_before = states[parent]
            (new,) = np.flatnonzero(np.array(masked) != open_before)
            assert parent < slot and open_before[new] and any(masked)
            assert tokens[new] in context.reading.top_tokens[row, new]
            assert np.delete(tokens, new).tolist() == np.delete(before, new).tolist()
    assert tree.valid[2].tolist() == [True] + [False] * 11


def test_coupled_draws_are_ordered_with_their_noise():
    context = make_context(Sampling(temperature=1.0))
    counts = jnp.array([2, 3, 0])
    draws = jax.device_get(coupled_draws(context, counts, 3))
    for row in range(ROWS):
        for i in range(LENGTH):
            ids = np.asarray(context.reading.top_tokens[row, i])
            key = reference.key_words(KEYS[row])
            score = np.asarray(context.reading.top_log_probs[row, i], np.float64)
            score = score + reference.gumbel(key, FIRST + i, int(counts[row]), ids)
            best = np.argsort(-score)[:3]
            assert draws.place[row, i].tolist() == best.tolist()
            assert draws.tokens[row, i].tolist() == ids[best].tolist()
            np.testing.assert_allclose(draws.lead[row, i], score[best] - score[best[0]], atol=1e-5)


def test_a_reading_too_small_for_the_network_is_an_error():
    with pytest.raises(ValueError, match="reads the 8 most probable tokens, the reading holds 6"):
        Spot(tiny.order_params(), tiny.ORDER)(make_context(), 4)


def test_the_nearest_evidence_is_the_largest_evaluated_subset():
    """Random families of states, many of them subsets of others, against the slow twin."""
    random = np.random.default_rng(3)
    rows, slots, length = 64, 6, 5
    tokens = random.integers(2, size=(rows, slots + 1, length))
    masked = random.random((rows, slots + 1, length)) < random.random((rows, 1, 1))
    tokens, masked = np.where(masked, MASK, tokens), masked.copy()
    tokens[:, 0], masked[:, 0] = MASK, True  # a subset of every state
    valid = random.random((rows, slots)) < 0.8
    valid[:, 0] = True
    reading = Reading(*(np.arange(rows * slots).reshape(rows, slots, 1),) * 6)
    evidence = Evidence(State(tokens[:, :-1], masked[:, :-1]), reading, valid)
    context = make_context()._replace(evidence=jax.tree.map(jnp.asarray, evidence))
    state = State(jnp.asarray(tokens[:, -1]), jnp.asarray(masked[:, -1]))
    found = nearest(context, state)
    chosen = np.asarray(found.reading.token)[:, 0] % slots
    expected = [
        reference.nearest(
            tokens[row, :-1], masked[row, :-1], valid[row], tokens[row, -1], masked[row, -1]
        )
        for row in range(rows)
    ]
    assert chosen.tolist() == expected and len(set(expected)) == slots
    np.testing.assert_array_equal(found.parent.masked, masked[np.arange(rows), chosen])


def test_spot_reads_the_branch_that_decoding_did_not_take():
    """After each single commit other tokens were read than before; two commits deep they are
    drafted, one commit deep the old ones are."""
    context = widen(make_context())
    positions = np.flatnonzero(context.root.masked[0])
    here = jnp.repeat(jax.nn.one_hot(positions, LENGTH, dtype=bool), 2, axis=0)[None]
    root, reading = jax.tree.map(lambda x: x[:, None], (context.root, context.reading))
    two = jnp.tile(jnp.moveaxis(context.reading.top_tokens[..., :2], -1, 1), (1, len(positions), 1))
    branches = State(jnp.where(here, two, root.tokens), root.masked & ~here)
    nodes = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), root, branches)
    reading = jax.tree.map(lambda x: jnp.repeat(x, nodes.masked.shape[1], axis=1), reading)
    later = (jnp.arange(nodes.masked.shape[1]) > 0)[None, :, None, None]
    reading = reading._replace(top_tokens=reading.top_tokens + jnp.where(later, 200, 0))
    evidence = Evidence(nodes, reading, jnp.ones(nodes.masked.shape[:2], bool))
    spot = Spot(tiny.order_params(), tiny.ORDER)
    tree = run(spot, context._replace(evidence=evidence), 24)
    states = valid_states(tree, 0)
    old, new = 0, 0
    for slot in range(1, len(states)):
        (tokens, masked), parent = states[slot], tree.parent[0, slot]
        (added,) = np.flatnonzero(np.array(masked) != states[parent][1])
        if parent == 0:
            assert tokens[added] < 200
            old += 1
        else:
            assert tokens[added] >= 200
            new += 1
    assert old > 1 and new > 1
