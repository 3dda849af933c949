"""Traces of drafted decoding, and how the order network is fitted to them."""

import dataclasses

import jax
import numpy as np
import pytest

from spot_jax.commit import TopN
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig
from spot_jax.draft import Chain, RandomTree
from tests import reference, tiny
from train import branches, collect, fit, replay, traces


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def drafted(request):
    prompts, lengths, keys = tiny.requests()
    config = DecodeConfig(
        max_new_tokens=10, num_top=8, sampling=Sampling(temperature=request.param), budget=12
    )
    model = tiny.target()
    drafter = RandomTree(jax.random.key(5))
    found = branches.collect_drafted(model, prompts, lengths, keys, config, drafter)
    plain, _, _ = collect.collect_batch(
        model, prompts, lengths, keys, dataclasses.replace(config, budget=1)
    )
    return found, plain, request.param


def test_traces_of_drafted_decoding_hold_the_same_blocks_and_readings(drafted):
    found, plain, temperature = drafted
    for name in ("tokens", "order", "start", "key"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))
    on_path = 0
    for point in range(len(found.block)):
        same = (plain.block == found.block[point]) & np.all(
            plain.read_masked == found.read_masked[point], axis=1
        )
        on_path += same.any()
        for other in np.flatnonzero(same):
            np.testing.assert_allclose(
                found.top_log_probs[point], plain.top_log_probs[other], atol=1e-4
            )
    assert on_path > 0
    # Random tokens hardly ever are the sampled ones, so no branch holds commits of the path alone.
    assert on_path < len(found.block) or temperature > 0


def test_every_depth_of_a_pass_has_the_nearest_reading():
    random = np.random.default_rng(8)
    passes, slots, length, most = 40, 5, 6, 4
    tokens = random.integers(2, size=(passes, length))
    order = np.argsort(random.random((passes, length - 1)), axis=1)
    last = np.where(random.random((passes, 1)) < 0.5, -1, length - 1)
    order = np.concatenate([order, last], axis=1)
    root = (order >= random.integers(4, size=(passes, 1))) | (order < 0)
    masked = root[:, None] | (random.random((passes, slots, length)) < 0.4)
    masked &= root[:, None] & (random.random((passes, slots, length)) < 0.7)
    wrong = random.random((passes, slots, length)) < 0.1
    nodes = np.where(masked, -1, np.where(wrong, 1 - tokens[:, None], tokens[:, None]))
    nodes[:, 0] = np.where(root, -1, tokens)
    masked[:, 0] = root
    valid = random.random((passes, slots)) < 0.8
    valid[:, 0] = True
    found = branches.nearest_slots(nodes, masked, valid, root, tokens, order, most)
    for p in range(passes):
        future = sorted(order[p, i] for i in range(length) if root[p, i] and order[p, i] >= 0)
        for depth in range(most):
            if depth >= len(future):
                assert found[p, depth] == -1
                continue
            state_masked = root[p] & ~((order[p] >= 0) & (order[p] < future[depth]))
            state = np.where(state_masked, -1, tokens[p])
            expected = reference.nearest(nodes[p], masked[p], valid[p], state, state_masked)
            assert found[p, depth] == expected
    row, slot, first, end = branches.ranges(found)
    again = np.full_like(found, -1)
    for r, s, a, b in zip(row, slot, first, end, strict=True):
        assert (again[r, a:b] == -1).all()
        again[r, a:b] = s
    np.testing.assert_array_equal(again, found)
    assert len(set(found.ravel().tolist())) == slots + 1


def test_pairs_are_drawn_at_the_depths_of_their_reading(drafted):
    found = drafted[0]
    picker = fit.Picker(found, decay=0.7)
    pairs = picker.pick(np.random.default_rng(0), 20_000)
    root = np.sum(~pairs.points.root_masked, axis=1)
    counts = np.bincount(pairs.depth, minlength=3)
    # Passes with a future of one commit have depth 0 alone, so it has more than its share.
    assert counts[0] / counts.sum() > 0.3 and counts[1] > 0 and counts[2] > 0
    future = np.sum(pairs.points.root_masked & (pairs.points.order >= 0), axis=1)
    assert (pairs.depth < future).all()
    # What was read never has a commit that the state asked about lacks.
    state = np.asarray(jax.jit(replay.future_state)(pairs.points, pairs.depth).masked)
    assert (pairs.points.read_masked | ~state).all() and (root < 4).all()


def test_traces_of_drafted_decoding_are_not_replayed(drafted):
    info = traces.TraceInfo(
        target="tiny", block_length=4, sampling=Sampling(), rule=TopN(), budget=12
    )
    with pytest.raises(ValueError, match="collect without a drafter"):
        replay.replay(Chain(), drafted[0], info, 4)
