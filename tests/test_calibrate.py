"""Selection of rank formulas from traces of plain decoding, and the command."""

import numpy as np
import pytest

from spot_jax import ranks_io
from spot_jax.commit import TopN
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig
from spot_jax.draft import RankOptions, make_ranks
from spot_jax.drafter_io import DrafterWarning
from tests import tiny
from train import calibrate, collect, ranks, replay, traces

A, B, C, D = (0, 0), (1, 0), (2, 0), (3, 0)


def paths(*counted):
    """Futures of points: `(number, pairs committed one a step)`."""
    found = [tuple((pair,) for pair in path) for number, path in counted for _ in range(number)]
    return ranks.number(found, depth=3)


def states(found, chosen):
    return [frozenset(pair for step in found.formulas[i] for pair in step) for i in chosen]


def test_paths_in_other_orders_meet():
    found = paths((1, (A, B)), (2, (B, A, C)))
    a, ab, b, abc = range(4)
    assert found.ids.tolist() == [[a, ab, -1], [b, ab, abc], [b, ab, abc]]
    assert states(found, range(4)) == [{A}, {A, B}, {B}, {A, B, C}]
    # Written in the order that was seen more often.
    assert found.formulas[ab] == ((B,), (A,))
    assert found.counts().tolist() == [1, 3, 2, 2]
    both = ranks.join([found, paths((1, (C,)), (1, (A, C)))])
    assert states(both, range(6)) == [{A}, {A, B}, {B}, {A, B, C}, {C}, {A, C}]
    assert both.ids.tolist() == [*found.ids.tolist(), [4, -1, -1], [0, 5, -1]]


def test_coverage_takes_what_is_accepted_and_degree_one_what_hangs_on_a_frequent_parent():
    # Six futures begin with A and then part; three are C alone.
    found = paths((2, (A, B)), (2, (A, C)), (2, (A, D)), (3, (C,)))
    # Coverage: A is accepted at 6 points, C at 3, then each child of A at 2: AC too, whose other
    # parent adds nothing, as no future goes from C to AC. The lower number goes first.
    assert states(found, ranks.greedy_coverage(found, 4)) == [{A}, {C}, {A, B}, {A, C}]
    # Degree 1: A has 6. AB and AD have 2 + 6, AC 2 + 6 + 3; C only 3.
    chosen = ranks.SELECTIONS["spiffy"](found, 4)
    assert states(found, chosen) == [{A}, {A, C}, {A, B}, {A, D}]
    # By their own counts alone: 6, 3, then 2 each.
    chosen = ranks.SELECTIONS["counts"](found, 4)
    assert states(found, chosen) == [{A}, {C}, {A, B}, {A, C}]
    accepted = [ranks.covered(found, s(found, 2)).sum() for s in ranks.SELECTIONS.values()]
    assert accepted == [6 + 2, 6 + 3, 6 + 3]


def test_coverage_sees_what_a_formula_connects():
    # After A and AB, B is accepted at two points and leads on to AB there: 4. C: at three points.
    found = paths((4, (A, B)), (2, (B, A)), (3, (C,)))
    chosen = ranks.greedy_coverage(found, 9)
    assert states(found, chosen) == [{A}, {A, B}, {B}, {C}]
    assert ranks.covered(found, chosen[:3]).tolist() == [2] * 6 + [0] * 3


def test_coverage_is_greedy_on_what_brute_force_counts():
    random = np.random.default_rng(0)
    pairs = [(i, j) for i in range(5) for j in range(2)]
    steps = [random.permutation(5)[: random.integers(0, 4)] for _ in range(60)]
    found = paths(*((1, tuple(pairs[2 * i + random.integers(2)] for i in path)) for path in steps))

    def accepted(chosen):
        kept = set(chosen)
        total = 0
        for row in found.ids:
            for i in row:
                if i not in kept:
                    break
                total += 1
        return total

    chosen: list[int] = []
    for _ in range(8):
        totals = [accepted([*chosen, i]) for i in range(len(found.formulas))]
        chosen.append(int(np.argmax(totals)))
    assert ranks.greedy_coverage(found, 8) == chosen
    assert ranks.covered(found, chosen).sum() == accepted(chosen)
    everything = ranks.greedy_coverage(found, 10_000)
    assert sorted(everything) == list(range(len(found.formulas)))


def test_formulas_of_degree_one_have_a_parent_in_the_set():
    random = np.random.default_rng(1)
    found = paths(*((1, tuple((int(i), 0) for i in random.permutation(4)[:3])) for _ in range(20)))
    for degree in (0, 1):
        chosen = states(found, ranks.accumulated(found, 12, degree))
        for i, state in enumerate(chosen):
            assert len(state) == 1 or any(
                len(s) == len(state) - 1 and s < state for s in chosen[:i]
            )


def test_steps_of_several_commits():
    """A parent is what the traces show one step before, whatever the step commits."""
    found = ranks.number([((A, B), (C,)), ((A,), (B,), (C,)), ((A, B),)], depth=3)
    ab, abc, a = range(3)
    assert found.ids.tolist() == [[ab, abc, -1], [a, ab, abc], [ab, -1, -1]]
    # AB has 3, and 1 of its parent A; ABC has 2, and 3 of its parent AB; A has 1.
    assert ranks.accumulated(found, 3) == [ab, abc, a]


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def collected(request):
    sampling = Sampling(temperature=request.param)
    config = DecodeConfig(max_new_tokens=10, num_top=61, sampling=sampling)
    found = collect.collect_batch(tiny.target(), *tiny.requests(), config)[0]
    info = traces.TraceInfo(target="tiny", block_length=4, sampling=sampling, rule=TopN())
    return info, found


def followed(found, ids, chosen):
    """Passes of each block if the chosen formulas are drafted: one to open it, then leaps."""
    lengths = np.cumprod(np.isin(ids, chosen), axis=1).sum(axis=1)
    passes = np.ones(len(found.start), int)
    for block in range(len(passes)):
        points, here = np.flatnonzero(found.block == block), 0
        while here < len(points):
            passes[block] += 1
            here += 1 + lengths[points[here]]
    return passes


@pytest.mark.parametrize("coupled", [False, True])
def test_drafted_formulas_are_accepted_where_traces_say(collected, coupled):
    """Rewinding is the inverse of drafting: replay agrees with the futures to the pass."""
    info, found = collected
    future = ranks.futures(found, info, depth=4, coupled=coupled)
    counts = future.counts()
    for size in (2, 1000):
        chosen = ranks.greedy_coverage(future, size)
        formulas = [future.formulas[i] for i in chosen]
        shares = [counts[i] / len(future.ids) for i in chosen]
        drafter = make_ranks(formulas, shares, RankOptions(coupled=coupled))
        steps, passes = replay.replay(drafter, found, info, len(chosen) + 1)
        expected = followed(found, future.ids, chosen)
        assert expected.sum() < steps.sum()
        if coupled and info.sampling.temperature > 0:
            # A state reached in an order other than the one written down has other draws.
            assert (passes >= expected).all() and passes.sum() <= 1.05 * expected.sum()
        else:
            np.testing.assert_array_equal(passes, expected)
    # Every token is in a reading of the whole vocabulary, so that everything was foreseen.
    assert expected.max() == 2


def test_the_command(collected, tmp_path, capsys):
    info, found = collected
    directory, out = tmp_path / "traces", tmp_path / "ranks.json"
    traces.write_info(directory, info)
    traces.write_shard(directory, 0, found)
    calibrate.main([directory], out, method="coverage", budget=5, blocks=6, coupled=True)
    drafter = ranks_io.load_ranks(out, tiny.CONFIG)
    assert drafter.options == RankOptions(coupled=True, prune=False)
    assert 1 <= len(drafter.log_share) <= 4
    part = calibrate.some_blocks(found, 6, seed=0)
    assert len(part.start) == 6 < len(found.start)
    expected = calibrate.calibrate([(info, part)], "coverage", 4, calibrate.DEPTH, coupled=True)
    assert f"{expected.accepted:.2f} drafts accepted a pass" in capsys.readouterr().err
    future = ranks.futures(part, info, calibrate.DEPTH, coupled=True)
    np.testing.assert_allclose(np.exp(drafter.log_share), expected.shares, rtol=1e-6)
    first = future.counts()[future.ids[future.ids[:, 0] >= 0, 0]].max() / len(part.block)
    assert expected.shares[0] == pytest.approx(first)
    calibrate.main([directory], out, method="spiffy", budget=3, blocks=1000)
    assert f"only {len(found.start)} blocks" in capsys.readouterr().err
    assert ranks_io.load_ranks(out).options == RankOptions(prune=True)
    with pytest.warns(DrafterWarning, match="calibrated on blocks of 4 positions"):
        ranks_io.load_ranks(out, tiny.CONFIG.__class__(**vars(tiny.CONFIG) | {"block_length": 8}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 1}, "--budget must be at least 2, got 1"),
        ({"budget": 5000}, "--budget must be at most 4096"),
        ({"blocks": 0}, "--blocks must be at least 1, got 0"),
        ({"depth": 0}, "--depth must be at least 1, got 0"),
        ({}, r"traces\.json: not readable"),
    ],
)
def test_errors_of_the_command(tmp_path, options, message):
    with pytest.raises(SystemExit, match=message):
        calibrate.main([tmp_path / "none"], tmp_path / "ranks.json", **options)
    with pytest.raises(SystemExit, match="absent is not a directory"):
        calibrate.main([tmp_path / "none"], tmp_path / "absent" / "ranks.json")
