"""Traces under rules that commit sets: their replay, the fit of the set network, calibration."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax import drafter_io
from spot_jax.commit import Threshold, TopN
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig, decode
from spot_jax.draft import Chain, ConfidenceSets, Oracle
from spot_jax.draft.context import Draws
from spot_jax.models.sets import Scalars, SetScores, set_log_prob
from tests import tiny
from tests.test_sets import TARGET, WIDE
from train import calibrate_sets, collect, fit, fit_sets, replay, traces

RULES = {"threshold": (Threshold(0.5), 0.0), "pairs": (TopN(2), 1.0)}
BUDGET = 4


@pytest.fixture(scope="module", params=RULES)
def collected(request):
    rule, temperature = RULES[request.param]
    config = DecodeConfig(
        max_new_tokens=14, num_top=8, sampling=Sampling(temperature=temperature), rule=rule
    )
    found, _, _ = collect.collect_batch(TARGET(WIDE), *tiny.requests(), config)
    info = traces.TraceInfo(target="tiny", block_length=8, sampling=config.sampling, rule=rule)
    return config, found, info


def test_futures_are_steps_and_hold_what_was_read(collected):
    config, found, info = collected
    points = replay.take_points(found, np.arange(len(found.block)))
    future = found.future()
    sizes = []
    for depth in range(int(future.max()) + 1):
        there = future > depth
        state, after = (
            jax.device_get(replay.future_state(points, jnp.full(len(future), d)))
            for d in (depth, depth + 1)
        )
        new = state.masked & ~after.masked
        assert (new.any(axis=1) == there).all()
        sizes += new[there].sum(axis=1).tolist()
        if isinstance(config.rule, TopN):
            left = state.masked[there].sum(axis=1)
            assert (new[there].sum(axis=1) == np.minimum(2, left)).all()
    assert max(sizes) > 1, "no step committed more than one position"
    # The next point of a block stands where the first step from this one leads.
    for block in np.unique(found.block):
        (here,) = np.nonzero(found.block == block)
        step = replay.future_state(points, jnp.ones(len(future), int))
        roots = np.asarray(step.masked)[here[:-1]]
        np.testing.assert_array_equal(roots, found.root_masked[here[1:]])


@pytest.mark.slow
def test_replay_counts_the_passes_of_decoding(collected):
    config, found, info = collected
    requests = tiny.requests()
    plain = decode(TARGET(WIDE), *requests, config)
    drafting = dataclasses.replace(config, budget=BUDGET)
    saved = {}
    for name, drafter in {
        "chain": Chain(),
        "tree": ConfidenceSets(),
        "spot-sets": tiny.spot_sets(),
        "oracle": Oracle(plain.trace.step),
    }.items():
        steps, passes = replay.replay(None if name == "oracle" else drafter, found, info, BUDGET)
        real = decode(TARGET(WIDE), *requests, drafting, drafter)
        # Blocks that ended with their first step have no point and one pass.
        without = int(real.steps.sum()) - int(steps.sum())
        assert without >= 0
        assert int(passes.sum()) + without == int(real.passes.sum()), name
        saved[name] = int(steps.sum() - passes.sum())
    assert saved["oracle"] >= saved["chain"] and saved["tree"] > 0


def test_traces_remember_their_rule(collected, tmp_path):
    _, found, info = collected
    traces.write_info(tmp_path, info)
    traces.write_shard(tmp_path, 0, found)
    assert traces.read_traces(tmp_path)[0] == info
    path = tmp_path / "traces.json"
    good = json.loads(path.read_text())
    for change, message in {
        ("rule", "confidence"): "rule must be an object with n",
        ("rule", "colour"): "rule has the unknown keys colour",
        ("rule", "n"): "rule has the unexpected n 1.5",
        ("color", ""): "must have the keys target, block_length, sampling, rule",
    }.items():
        key, what = change
        values: dict = {
            "confidence": "confidence",
            "colour": {"n": 1, "colour": 2},
            "n": {"n": 1.5},
        }
        path.write_text(json.dumps(good | {key: values.get(what, what)}))
        with pytest.raises(ValueError, match=rf"traces\.json: {message}"):
            traces.read_traces(tmp_path)


RUN = fit_sets.SetTraining(order=tiny.ORDER, steps=40, batch=32, warmup_steps=2, held_out=0.3)


@pytest.mark.slow
def test_a_fit_lowers_the_loss_and_is_stored(collected, tmp_path):
    _, found, info = collected
    train, test = fit.split_blocks(found, RUN.held_out)
    pairs = calibrate_sets.all_pairs(train)
    loss = jax.jit(RUN.loss(info))
    before, sums = loss(jax.jit(functools.partial(RUN.init, info=info))(pairs), pairs)
    params = fit.fit(RUN, [info], [train], tmp_path)
    after, _ = loss(params, pairs)
    assert float(after) < 0.8 * float(before) and int(sums["count"]) == len(pairs.depth)
    (first, _) = figures = fit.evaluate(params, [test], [info], dataclasses.replace(RUN, batch=4))
    assert 0 <= first["next_set"] <= 1 and first["positions"] >= 1
    (passes,) = fit.compare_passes(params, [test], [info], RUN, budget=4)
    assert min(passes[name] for name in ("spot-sets", "chain", "tree")) >= 1
    RUN.save(tmp_path / "drafter", params, [info, info], [train], figures)
    stored = drafter_io.load_drafter(tmp_path / "drafter", WIDE, rule=info.rule)
    half = jax.tree.map(lambda leaf: leaf.astype(fit.STORED), params)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, stored.params, half))
    assert drafter_io.read_metadata(tmp_path / "drafter")["rules"] == [vars(info.rule)]


def test_questions_are_the_steps_of_the_trace(collected):
    _, found, info = collected
    pairs = calibrate_sets.all_pairs(found)
    depths = np.minimum(found.future(), calibrate_sets.DEPTHS)
    assert len(pairs.depth) == depths.sum()
    ask = functools.partial(
        fit_sets.set_question, config=RUN.order, sampling=info.sampling, rule=info.rule
    )
    asked = jax.device_get(jax.jit(ask)(pairs))
    for row, point in enumerate(np.repeat(np.arange(len(depths)), depths)):
        order = np.where(found.root_masked[point], found.order[found.block[point]], -1)
        step = order[order >= 0].min() + pairs.depth[row]
        np.testing.assert_array_equal(asked.chosen[row], order == step)
        assert asked.drafted[row] == ((order >= 0) & (order < step)).sum()
        np.testing.assert_array_equal(
            asked.right[row], asked.draws.tokens[row] == found.tokens[found.block[point]][:, None]
        )


def synthetic(scalars, rows, rule, seed=0):
    """Scores, and sets drawn from their law under `scalars`."""
    random = np.random.default_rng(seed)
    raw = SetScores(*(jnp.asarray(1.5 * random.normal(size=(rows, 4, 1)), float) for _ in range(2)))
    drafted = jnp.asarray(random.integers(0, 24, size=rows))
    masked = jnp.ones((rows, 4), bool)
    sets = (np.arange(1, 16)[:, None] >> np.arange(4)) & 1 == 1
    choice = jnp.broadcast_to(jnp.asarray(sets)[None], (rows, 15, 4))
    law = set_log_prob(
        scalars(raw, drafted), masked, rule, choice, jnp.ones((rows, 15, 4, 1), bool)
    )
    picked = jax.random.categorical(jax.random.key(seed), law)
    ones = jnp.zeros((rows, 4, 1), int)
    draws = Draws(ones, ones, ones, ones)
    asked = fit_sets.SetQuestion(
        jnp.zeros((rows, 4, 1)), masked, drafted, draws, masked, jnp.asarray(sets)[picked],
        jnp.ones((rows, 4, 1), bool),
    )  # fmt: skip
    return calibrate_sets.Answers(raw, asked, rule)


def test_calibration_recovers_what_the_scores_were_bent_by():
    true = Scalars(0.6, -0.8, 0.3, 1.7)
    found = calibrate_sets.likeliest_scalars([synthetic(true, 30_000, Threshold(0.9))])
    np.testing.assert_allclose(found, true, atol=0.12)
    # Under a rule without a threshold only the order is seen, and the rest stays.
    pairs = calibrate_sets.likeliest_scalars([synthetic(true, 3000, TopN(2), 1)])
    np.testing.assert_allclose(pairs, (1.0, 0.0, 0.0, 1.7), atol=0.12)


def test_few_blocks_do_not_lead_astray():
    found = calibrate_sets.likeliest_scalars([synthetic(Scalars(), 5, Threshold(0.9))])
    assert np.abs(np.subtract(found, Scalars())).max() < 1.0


def test_calibration_writes_a_drafter(collected, tmp_path, capsys):
    _, found, info = collected
    drafter = tiny.spot_sets()
    metadata = {
        "block_lengths": [8], "rules": [{"n": 2}, {"n": 1, "threshold": 0.9}],
        "temperatures": [0.0], "trained_on": "other", "num_blocks": 3,
    }  # fmt: skip
    drafter_io.save_drafter(
        tmp_path / "one", drafter.params, drafter.config, metadata, kind="spot-sets"
    )
    traces.write_info(tmp_path / "traces", info)
    traces.write_shard(tmp_path / "traces", 0, found)
    calibrate_sets.main(tmp_path / "one", [tmp_path / "traces"], tmp_path / "two", budget=3)
    stored = drafter_io.load_drafter(tmp_path / "two")
    assert stored.scalars == calibrate_sets.fit_scalars(drafter, [found], [info])
    assert (
        stored.scalars != Scalars()
        and "tiny" in drafter_io.read_metadata(tmp_path / "two")["notes"]
    )
    assert json.loads(capsys.readouterr().out) == stored.scalars._asdict()
    empty = found.select(np.flatnonzero(np.bincount(found.block) < 0))
    with pytest.raises(ValueError, match="traces of tiny hold no step"):
        calibrate_sets.fit_scalars(drafter, [empty], [info])
