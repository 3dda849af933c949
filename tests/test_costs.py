"""Budget by cost: choices against a slow twin, and decoding that no choice changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax import costs, measure
from spot_jax.commit import Threshold
from spot_jax.costs import MEMORY, PRIOR, Costs, Experience
from spot_jax.decode import DecodeConfig, _decode, decode
from spot_jax.draft import Chain, ConfidenceSets, ConfidenceTree, Spot
from spot_jax.state import NO_PARENT, DraftTree
from tests import reference, test_grids, tiny
from tests.test_drafters import make_context, run, widen
from tests.test_exact import AnyOf, check_accounting, check_same_path

TARGET = functools.cache(tiny.target)
SIZES = (1, 2, 4, 8)
FLAT = Costs(SIZES, (1.0,) * 4, (0.0,) * 4)
LINEAR = Costs(SIZES, (1.0, 2.0, 4.0, 8.0), (0.0,) * 4)
MIXED = Costs(SIZES, (1.0, 1.1, 1.25, 1.5), (0.0, 0.01, 0.02, 0.03))


# The choice.


def random_case(seed):
    """An experience, a tree and rows, as they might be."""
    random = np.random.default_rng(seed)
    valid = random.random((3, 8)) < 0.7
    valid[:, 0] = True
    valid[random.random(3) < 0.3, 1:] = False
    log_value = np.where(valid, np.log(random.random((3, 8)).astype(np.float32)), -np.inf)
    log_value[:, 0] = 0.0
    rows, reached, hoped = 20 * random.random((3, 8)).astype(np.float32)
    seen = {"valid": valid, "log_value": log_value, "rows": rows, "reached": reached}
    seen["hoped"] = hoped
    experience = Experience(
        jnp.int32(random.integers(4)), *map(jnp.asarray, (rows, hoped, reached)),
        jnp.zeros((3, 4), jnp.int32),
    )  # fmt: skip
    nothing = jnp.zeros((3, 8, 2), jnp.int32)
    tree = DraftTree(
        nothing, nothing > 0, jnp.full((3, 8), NO_PARENT), jnp.asarray(valid),
        jnp.asarray(log_value),
    )  # fmt: skip
    return seen, experience, tree, random.random(3) < 0.7, bool(random.random() < 0.3)


def test_choices_equal_the_slow_twin(strict):
    chosen = set()
    for seed in range(60):
        table = (MIXED, LINEAR, Costs(SIZES, (1.0, 1.0, 1.3, 3.1), (0.0, 0.1, 0.3, 0.8)))[seed % 3]
        seen, experience, tree, running, opening = random_case(seed)
        steps = [
            sum(reference.slot_worth(seen, row, slot, PRIOR) for row in range(3) if running[row])
            for slot in range(8)
        ]
        drafting = [table.draft[int(experience.drafted)]] * 4
        expected = max(reference.quickest(table, steps, opening, drafting), int(opening))
        arrays = jnp.asarray(running), jnp.asarray(opening)
        size = costs.choose_size(table, experience, tree, *arrays)
        assert size == expected
        fresh = running & tree.valid[:, 1]
        share = np.log(1 + 1 / np.arange(1, 8))
        share = (seen["reached"][1:] + PRIOR * share) / (seen["rows"][1:] + PRIOR)
        steps = [running.sum(), *(int(fresh.sum()) * share)]
        draft = costs.choose_draft(table, experience, arrays[0], jnp.asarray(fresh), arrays[1])
        assert draft == reference.quickest(table, steps, opening, table.draft)
        chosen |= {("check", int(size)), ("draft", int(draft))}
    assert {("check", i) for i in range(4)} | {("draft", i) for i in range(4)} == chosen


def test_what_is_learnt_equals_the_slow_twin(strict):
    for seed in range(8):
        seen, experience, tree, running, _ = random_case(seed)
        size, visited = seed % 4, np.random.default_rng(seed).random((3, 8)) < 0.5
        after = costs.learn(
            MIXED, experience, tree, jnp.asarray(running), jnp.int32(size), jnp.asarray(visited)
        )
        drafted = [row for row in range(3) if running[row] and seen["valid"][row, 1:].any()]
        for slot in range(8):
            rows, hoped, reached = (MEMORY * seen[n][slot] for n in ("rows", "hoped", "reached"))
            for row in drafted:
                rows += slot < SIZES[int(experience.drafted)]
                hoped += np.exp(seen["log_value"][row, slot])
                # What was not checked counts by its estimate.
                worth = reference.slot_worth(seen, row, slot, PRIOR)
                reached += visited[row, slot] if slot < SIZES[size] else worth
            got = [x[slot] for x in (after.rows, after.hoped, after.reached)]
            np.testing.assert_allclose(got, [rows, hoped, reached], rtol=1e-5)
        np.testing.assert_array_equal(after.passes[:, size], running)
        assert after.passes.sum() == running.sum()


def test_only_sizes_that_can_pay_are_in_use():
    assert LINEAR.in_use(8, 4).sizes == (1,)
    assert FLAT.in_use(8, 32).sizes == (1, 2, 8) and FLAT.in_use(5, 32).sizes == (1, 2, 4)
    assert MIXED.in_use(8, 32) == MIXED == MIXED.in_use(8, 32).in_use(8, 32)
    # A block of two positions makes two steps at most, where 8 states are good for three.
    dear = Costs(SIZES, (1.0, 1.5, 1.9, 2.5), (0.0, 0.0, 0.05, 0.1))
    assert dear.in_use(8, 2).sizes == (1, 2, 4) and dear.in_use(8, 4).sizes == SIZES
    # What only perfect drafts could gain is not tried: choosing takes time.
    dear = Costs(SIZES, (1.0, 1.8, 2.9, 5.3), (0.0, 0.1, 0.1, 0.2))
    assert dear.in_use(8, 32).sizes == (1,)
    # Drafting counts.
    slow = dataclasses.replace(FLAT, draft=(0.0, 0.8, 2.1, 4.4))
    assert slow.in_use(8, 32).sizes == (1,)
    config = DecodeConfig(budget=8, costs=LINEAR)
    assert config.settled(tiny.CONFIG) == DecodeConfig(budget=1)
    assert DecodeConfig(budget=8, costs=FLAT).settled(tiny.CONFIG).costs == FLAT.in_use(8, 4)


def test_about_equal_measurements_are_equal_costs():
    one = Costs.measured([1, 2, 4], [2e-3, 2.5e-3, 7.01e-3], [0.0, 1e-4, 0.9e-4])
    assert one == Costs((1, 2, 4), (1.0, 1.2, 3.5), (0.0, 0.05, 0.05))
    assert one == Costs.measured([1, 2, 4], [1e-3, 1.248e-3, 3.5e-3], [0.0, 5e-5, 5e-5])
    # Larger sizes never take less.
    assert Costs.measured([1, 2], [2.0, 1.0], [0.0, -0.5]) == Costs((1, 2), (1.0, 1.0), (0.0, 0.0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sizes": (1, 3, 4)}, r"sizes must ascend from 1 and 2, got \(1, 3, 4\)"),
        ({"sizes": (1, 2, 2)}, "sizes must ascend from 1 and 2"),
        ({"evaluate": (1.0, 1.0)}, "evaluate must have 3 times, one a size, got 2"),
        ({"evaluate": (1.0, 0.0, 1.0)}, "evaluate must be above 0"),
        ({"evaluate": (1.0, 1.0, float("nan"))}, "evaluate must be finite"),
        ({"draft": (0.1, 0.1, 0.1)}, "draft must be 0 and then 0 or more"),
        ({"draft": (0.0, -0.1, 0.1)}, "draft must be 0 and then 0 or more"),
    ],
)
def test_impossible_costs_are_errors(fields, message):
    possible = {"sizes": (1, 2, 4), "evaluate": (1.0, 1.0, 1.0), "draft": (0.0, 0.1, 0.2)}
    with pytest.raises(ValueError, match=message):
        Costs(**possible | fields)


def test_costs_do_not_go_with_look_ahead():
    with pytest.raises(ValueError, match="costs do not go with look_ahead"):
        DecodeConfig(budget=4, costs=FLAT, look_ahead=True)


# Trees.


@pytest.mark.parametrize("index", range(7))
def test_the_first_slots_of_a_tree_are_a_tree(index):
    step = jnp.broadcast_to(jnp.arange(40), (3, 40))
    drafter = tiny.drafters(step)[index]
    context = widen(make_context(tiny.WARM))
    whole = run(drafter, context, 12)
    slot = np.arange(12)
    if not hasattr(drafter, "options"):  # Formulas are in the order of use, not of depth.
        assert (whole.parent < slot)[whole.valid].all()
    for size in (2, 5):
        part = run(drafter, context, size)
        if getattr(getattr(drafter, "options", None), "prune", False):
            continue  # Fewer slots are other formulas.
        np.testing.assert_array_equal(part.valid, whole.valid[:, :size])
        for name in ("tokens", "masked"):
            mine, other = getattr(part, name), getattr(whole, name)[:, :size]
            np.testing.assert_array_equal(mine[part.valid], other[part.valid])
        # A later node may be one more parent of an earlier one.
        values = part.log_value[part.valid], whole.log_value[:, :size][part.valid]
        assert (values[0] <= values[1] + 1e-5).all()


# Decoding.


@functools.cache
def plain(name, seed):
    return jax.device_get(decode(TARGET(), *tiny.requests(seed), tiny.REFERENCES[name]))


def by_cost(name, seed, table, which):
    """Decodes with nothing, the chain, the confidence tree or SPOT, at most 8 states a pass."""
    drafters = (Chain(), ConfidenceTree(2.0), Spot(tiny.order_params(), tiny.ORDER))
    config = dataclasses.replace(tiny.REFERENCES[name], reference_shape=0, budget=8, costs=table)
    any_of = AnyOf(drafters, jnp.array(which))
    return jax.device_get(decode(TARGET(), *tiny.requests(seed), config, any_of))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_no_choice_changes_an_answer(name):
    used = np.zeros(4, int)
    for seed, which in ((0, 1), (1, 2), (2, 3), (3, 0), (4, 3)):
        mine, expected = by_cost(name, seed, MIXED, which), plain(name, seed)
        check_same_path(mine, expected)
        np.testing.assert_allclose(mine.trace.confidence, expected.trace.confidence, atol=1e-5)
        check_accounting(mine)
        np.testing.assert_array_equal(mine.passes_at.sum(axis=1), mine.passes)
        assert (mine.passes <= expected.passes).all()
        used += mine.passes_at.sum(axis=0)
        if which == 0:
            assert mine.passes.sum() == expected.passes.sum() and not mine.drafted.any()
    assert (used[:3] > 10).all(), "several sizes were to be chosen"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llada", "dream dual", "handed sampled", "sets"])
def test_nor_of_other_families_and_rules(name):
    shape, decoding = test_grids.CASES.get(name, (tiny.CONFIG, None))
    if decoding is None:
        decoding = test_grids.plan(rule=Threshold(0.4), sampling=tiny.WARM)
    drafter = ConfidenceSets() if name == "sets" else ConfidenceTree(2.0)
    config = dataclasses.replace(decoding, reference_shape=0, budget=8, costs=MIXED)
    for seed in (0, 1):
        requests = tiny.requests(seed)
        expected = jax.device_get(decode(TARGET(shape), *requests, decoding))
        mine = jax.device_get(decode(TARGET(shape), *requests, config, drafter))
        check_same_path(mine, expected)
        check_accounting(mine)
        assert mine.accepted.any() and mine.passes_at[:, 1:].any()


@pytest.mark.slow
def test_where_size_is_free_all_is_checked():
    for seed in (0, 1):
        mine, fixed = (by_cost("greedy", seed, table, 3) for table in (FLAT, None))
        check_same_path(mine, fixed)
        # The same trees: nothing is left out but slots that hold no state.
        for field in ("passes", "drafted", "accepted"):
            np.testing.assert_array_equal(getattr(mine, field), getattr(fixed, field))
        assert mine.passes_at.shape[1] == 3 and fixed.passes_at is None


def test_where_no_size_pays_decoding_is_the_plain_program():
    config = dataclasses.replace(tiny.REFERENCES["greedy"], reference_shape=0)
    alone = jax.device_get(decode(TARGET(), *tiny.requests(0), config))
    compiled = _decode._cache_size()
    mine = by_cost("greedy", 0, LINEAR, 1)
    assert _decode._cache_size() == compiled and mine.passes_at is None
    jax.tree.map(np.testing.assert_array_equal, mine, alone)


@pytest.mark.slow
def test_measured_times_are_of_the_runs_asked_for(monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 0.005)
    config = DecodeConfig(max_new_tokens=12, num_top=8)
    times = measure.measure(TARGET(), config, {"chain": (Chain(), 8)}, (1, 2), 2, 8)
    assert len(times.evaluate) == 2 and all(0 < second < 1 for second in times.evaluate)
    assert times.draft.keys() == {"chain"}
    assert times.draft["chain"][0] == 0 and 0 <= times.draft["chain"][1] < 1
