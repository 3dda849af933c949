"""SPOT-Sets: the law of the next set, trees of sets, and decoding that they leave as it is."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax.commit import Threshold, TopN
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig, decode
from spot_jax.draft import Chain, ConfidenceSets, ConfidenceTree, Oracle, SpotSets
from spot_jax.draft.context import Draws, evidence_of
from spot_jax.draft.set_tree import best_first_sets
from spot_jax.models.sets import NEVER, Scalars, SetScores, margins, set_log_prob
from spot_jax.rules import Factor, SubBlocks
from tests import reference, tiny
from tests.test_drafters import LENGTH, make_context, run
from tests.test_exact import AnyOf, check_accounting, check_same_bits, check_same_path
from tests.test_tree import make_context as bare_context
from tests.test_tree import states_of

RULES = {
    "threshold": Threshold(0.9),
    "threshold, at least 2": Threshold(0.9, n=2),
    "one": TopN(),
    "pairs": TopN(2),
    "schedule": TopN((2, 1, 1)),
}


def reading_again(context, reading):
    """The context of a pass that read its parent in another way, and nothing else."""
    return context._replace(reading=reading, evidence=evidence_of(context.parent, reading))


def random_scores(seed, shape):
    random = np.random.default_rng(seed)
    return SetScores(*(jnp.asarray(1.5 * random.normal(size=shape), jnp.float32) for _ in range(2)))


def enumerated(scores, positions, rule):
    """`reference.set_law` of one state."""
    number = rule.n
    if isinstance(number, tuple):
        number = reference.next_of_schedule(number, len(positions))
    crosses = isinstance(rule, Threshold)
    arrays = (np.asarray(x, np.float64) for x in scores)
    return reference.set_law(*arrays, positions, number, crosses)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_law_of_a_set(rule):
    """Every set, with every token, of four positions of which one is committed already."""
    scores, candidates = random_scores(0, (1, 4, 2)), jnp.array([[True, True, False, True]])
    choices = [c for c in itertools.product((-1, 0, 1), repeat=4) if c[2] < 0 and max(c) >= 0]
    choice = jnp.array([choices])
    tokens = jax.nn.one_hot(choice, 2, dtype=bool)
    found = set_log_prob(scores, candidates, rule, choice >= 0, tokens)[0]
    expected = enumerated(jax.tree.map(lambda x: x[0], scores), [0, 1, 3], rule)
    for pairs, value in zip(choices, np.asarray(found), strict=True):
        commits = frozenset((i, a) for i, a in enumerate(pairs) if a >= 0)
        if commits in expected:
            assert np.exp(value) == pytest.approx(expected[commits], rel=1e-4), commits
        else:
            assert value < NEVER / 2, commits
    assert np.exp(np.asarray(found)).sum() == pytest.approx(1, rel=1e-4)


def test_a_token_that_nobody_foresaw_counts_as_any():
    scores, candidates = random_scores(1, (1, 3, 2)), jnp.ones((1, 3), bool)
    chosen = jnp.array([[[True, False, True]]])

    def of(*tokens):
        picked = jnp.array([[tokens]], bool)
        return float(set_log_prob(scores, candidates, Threshold(0.9), chosen, picked)[0, 0])

    both = [of((1, 0), (0, 0), (0, 1)), of((0, 1), (0, 0), (0, 1))]
    assert of((1, 1), (0, 0), (0, 1)) == pytest.approx(np.logaddexp(*both), rel=1e-5)


def test_its_gradient_is_finite_where_nothing_can_be_committed():
    scores = random_scores(2, (2, 4, 2))
    nothing = jnp.zeros((2, 1, 4), bool)

    def total(scores, rule):
        tokens = jnp.ones((2, 1, 4, 2), bool)
        return jnp.sum(set_log_prob(scores, nothing[:, 0], rule, nothing, tokens))

    for rule in RULES.values():
        value, grad = jax.value_and_grad(total)(scores, rule)
        assert value == 0 and all(jnp.all(leaf == 0) for leaf in grad)


def test_margins_are_measured_from_the_threshold():
    confidence = jnp.log(jnp.array([[0.5, 0.8, 0.9, 0.99]]))[..., None]
    signs = np.sign(np.round(margins(confidence, Threshold(0.9)), 5))[0, :, 0]
    assert signs.tolist() == [-1, -1, 0, 1]
    assert (margins(confidence, Threshold(0.8)) > margins(confidence, Threshold(0.9))).all()
    wrapped = SubBlocks(Threshold(0.9), 2)
    np.testing.assert_array_equal(margins(confidence, wrapped), margins(confidence, Threshold(0.9)))
    assert not margins(confidence, TopN(2)).any()


def grow(scores_of, masked, rule, budget):
    """A tree from scores `scores_of(state) [B, L, A]`; alternative a is token 5 + a."""

    def law(state):
        scores = scores_of(state)
        tokens = jnp.broadcast_to(5 + jnp.arange(scores.cross.shape[-1]), scores.cross.shape)
        return scores, Draws(tokens, scores.cross, scores.cross, tokens)

    context = bare_context(masked)._replace(rule=rule)
    return jax.jit(lambda context: best_first_sets(context, law, budget))(context)


def test_a_tree_worked_by_hand():
    """Positions 0, 1, 2 cross with 0.9, 0.6, 0.2 and are picked 3:2:1; position 3 never is."""
    cross = np.log([0.9 / 0.1, 0.6 / 0.4, 0.2 / 0.8, 1e-9])
    order = np.log([3, 2, 1, 1e-9])
    scores = SetScores(*(jnp.asarray(x, jnp.float32)[None, :, None] for x in (cross, order)))
    found = grow(lambda state: scores, [[True] * 4], Threshold(0.9), 5)
    nodes = states_of(found)
    # Nothing crosses with 0.1 * 0.4 * 0.8 = 0.032, and half of that goes to position 0.
    alone = 0.9 * 0.4 * 0.8 + 0.032 * 3 / 6
    # After 0 one of 1 and 2 crosses, or, with 0.4 * 0.8, the better of them is picked 2:1.
    second, third = 0.6 * 0.8 + 0.32 * 2 / 3, 0.4 * 0.2 + 0.32 * 1 / 3
    expected = {
        (): 1.0,
        ((0, 5), (1, 5)): 0.9 * 0.6 * 0.8 + alone * second,
        # After 0 and 1 comes 2, whether it crosses or not.
        ((0, 5), (1, 5), (2, 5)): 0.9 * 0.6 * 0.2 + 0.9 * 0.6 * 0.8 + alone * 0.6 * 0.2,
        ((0, 5),): alone,
        ((0, 5), (2, 5)): 0.9 * 0.4 * 0.2 + alone * third,
    }
    assert list(nodes) == list(expected)
    assert [value for _, value in nodes.values()] == pytest.approx(list(expected.values()))
    assert found.parent[0].tolist() == [-1, 0, 1, 0, 0]


@pytest.mark.parametrize("budget", [2, 5, 9])
@pytest.mark.parametrize("name", ["threshold", "threshold, at least 2", "one"])
def test_growth_agrees_with_the_slow_twin(name, budget):
    """With four positions of one token each, the candidates are all the sets there are."""
    rule = RULES[name]
    first, drift = random_scores(3, (1, 4, 1)), random_scores(4, (4, 4))

    def scores_of(state):
        # What is committed moves the scores of all positions.
        moved = [jnp.sum(jnp.where(state.masked, 0.0, d.T), -1)[None, :, None] for d in drift]
        return SetScores(*(a + 0.3 * b for a, b in zip(first, moved, strict=True)))

    def law_of(state):
        done = {i for i, _ in state}
        moved = [sum((d[i] for i in done), np.zeros(4))[:, None] for d in np.asarray(drift)]
        scores = SetScores(*(a[0] + 0.3 * b for a, b in zip(first, moved, strict=True)))
        return enumerated(scores, [i for i in range(4) if i not in done], rule)

    found = grow(lambda state: scores_of(state), [[True] * 4], rule, budget)
    mine = {frozenset((i, t - 5) for i, t in k): v for k, (_, v) in states_of(found).items()}
    assert mine == pytest.approx(reference.set_tree(law_of, 4, budget), rel=1e-4)


def test_pairs_and_second_tokens_are_drafted():
    order = jnp.array([[[2.0, 1.9], [1.8, -9], [1.5, -9], [0.0, -9], [-1.0, -9]]])
    found = grow(lambda state: SetScores(order, order), [[True] * 5], TopN(2), 9)
    assert set(states_of(found)) >= {
        (),
        ((0, 5), (1, 5)),
        ((0, 6), (1, 5)),
        ((0, 5), (2, 5)),
        ((1, 5), (2, 5)),
    }


@pytest.mark.parametrize("drafter", [tiny.spot_sets(), ConfidenceSets()], ids=["spot", "tree"])
def test_trees_hold_distinct_states_that_grow_from_each_other(drafter, strict):
    context = make_context(Sampling(temperature=1.0), SubBlocks(Threshold(0.5), 4))
    wide = jnp.full((3, LENGTH, 2), -jnp.inf)
    reading = context.reading
    reading = reading._replace(
        top_log_probs=jnp.concatenate([reading.top_log_probs, wide], axis=-1),
        top_tokens=jnp.concatenate([reading.top_tokens, jnp.zeros(wide.shape, int)], axis=-1),
    )
    tree = run(drafter, reading_again(context, reading), 10)
    for row in range(2):
        slots = np.flatnonzero(tree.valid[row])
        states = {(tuple(tree.tokens[row, i]), tuple(tree.masked[row, i])) for i in slots}
        assert len(states) == len(slots) == 10
        for slot in slots[1:]:
            parent = tree.parent[row, slot]
            new = tree.masked[row, parent] & ~tree.masked[row, slot]
            changed = tree.tokens[row, parent] != tree.tokens[row, slot]
            assert new.any() and not (changed & ~new).any() and tree.masked[row, slot].any()
            part = np.flatnonzero(tree.masked[row, parent])[0] // 4
            assert set(np.flatnonzero(new) // 4) == {part}, "beyond the sub-block"
    assert tree.valid[2].tolist() == [True] + [False] * 9


def test_rules_without_a_law_of_sets_are_errors():
    for drafter in (ConfidenceSets(), tiny.spot_sets()):
        with pytest.raises(ValueError, match=r"not for Factor\(factor=1.0\)"):
            drafter(make_context(rule=Factor(1.0)), 4)


WIDE = dataclasses.replace(tiny.CONFIG, block_length=8)
TARGET = functools.cache(tiny.target)
KINDS = ("none", "chain", "tree", "sets", "oracle")


def plan(rule, budget, temperature):
    sampling = Sampling(temperature=temperature)
    return DecodeConfig(
        max_new_tokens=14, num_top=8, sampling=sampling, rule=rule, reference_shape=budget
    )


CASES = {
    "threshold": plan(Threshold(0.6), 4, 0.0),
    "threshold sampled": plan(Threshold(0.4), 8, 1.0),
    "fallback of two": plan(Threshold(0.5, strict=False, n=2), 3, 1.0),
    "pairs": plan(TopN(2), 6, 0.0),
    "pairs sampled": plan(TopN(2), 4, 1.0),
}


@functools.cache
def plain(name, seed):
    return jax.device_get(decode(TARGET(WIDE), *tiny.requests(seed), CASES[name]))


@functools.cache
def drafted(name, seed, kind):
    config = CASES[name]
    config = dataclasses.replace(config, budget=config.reference_shape, reference_shape=0)
    oracle = Oracle(jnp.asarray(plain(name, seed).trace.step))
    drafters = AnyOf(
        (Chain(), ConfidenceSets(), tiny.spot_sets(), oracle), jnp.array(KINDS.index(kind))
    )
    return jax.device_get(decode(TARGET(WIDE), *tiny.requests(seed), config, drafters))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_drafting_sets_changes_nothing(name):
    used = dict.fromkeys(KINDS, 0)
    several = 0
    for seed in range(3):
        expected = plain(name, seed)
        several += (expected.steps < (expected.trace.step >= 0).sum(axis=1)).sum()
        for kind in KINDS:
            mine = drafted(name, seed, kind)
            check_same_path(mine, expected)
            check_same_bits(mine, drafted(name, seed, "none"))
            check_accounting(mine)
            assert (mine.passes <= expected.passes).all()
            used[kind] += mine.accepted.sum()
    assert several, "no step committed more than one position"
    assert used["none"] == 0 and used["tree"] > 0 and used["sets"] > 0
    # Trees have second tokens as well, which the oracle lacks.
    assert used["oracle"] >= used["chain"] > 0


def test_single_commits_may_be_drafted_as_sets():
    context = make_context()
    one, other = (run(d, context, 4) for d in (ConfidenceTree(1e3), ConfidenceSets(order=1e3)))
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.masked, other.masked)


def test_scalars_move_the_scores():
    scores = random_scores(5, (3, 4, 2))
    assert jax.tree.all(
        jax.tree.map(jnp.array_equal, Scalars()(scores, jnp.array([0, 8, 4])), scores)
    )
    moved = Scalars(2.0, -1.0, 0.5, 3.0)(scores, jnp.array([0, 8, 16]))
    np.testing.assert_allclose(
        moved.cross, 2 * scores.cross + np.array([-1.0, -0.5, 0.0])[:, None, None], rtol=1e-6
    )
    np.testing.assert_allclose(moved.order, 3 * scores.order, rtol=1e-6)
    drafter = tiny.spot_sets()
    context = make_context(rule=Threshold(0.5))
    top = jnp.concatenate([context.reading.top_log_probs, jnp.full((3, LENGTH, 2), -9.0)], axis=-1)
    ids = jnp.concatenate([context.reading.top_tokens, jnp.zeros((3, LENGTH, 2), int)], axis=-1)
    reading = context.reading._replace(top_log_probs=top, top_tokens=ids)
    context = reading_again(context, reading)
    eager = SpotSets(drafter.params, drafter.config, Scalars(bias=20.0))
    shy = SpotSets(drafter.params, drafter.config, Scalars(bias=-20.0))
    # All cross: what completes the block is not drafted. None does: one by one.
    assert run(eager, context, 2).log_value[0, 1] < -5
    assert (~run(shy, context, 2).masked[0, 1]).sum() - (~context.root.masked[0]).sum() == 1
