"""Commit rules on tables small enough to check by eye."""

import jax
import jax.numpy as jnp
import jaxtyping
import ml_dtypes
import numpy as np
import pytest

from spot_jax.commit import Threshold, TopN, commit, rank
from spot_jax.config import Sampling, TargetConfig
from spot_jax.reading import read
from spot_jax.state import Reading, State
from tests import reference

MASK = 9


def log(*probs):
    return jnp.log(jnp.array(probs, jnp.float32))


def make_reading(confidence, top=None, entropy=None):
    """A reading of 4 positions; what is not given is made to disagree with what is."""
    top = jnp.array(top if top is not None else [[0.5, 0.1]] * 4, jnp.float32)
    return Reading(
        token=jnp.array([1, 2, 3, 4]),
        confidence=confidence,
        top_log_probs=jnp.log(top),
        top_tokens=jnp.array([[1, 2]] * 4),
        log_doubt=jnp.log(1 - top[:, 0]),
        entropy=jnp.array(entropy if entropy is not None else [1.0] * 4, jnp.float32),
    )


ALL = (True, True, True, True)
CONFIDENCE = log(0.3, 0.8, 0.8, 0.95)


def no_uniform():
    raise AssertionError("the random order was drawn without need")


@pytest.mark.parametrize(
    ("rule", "masked", "expected"),
    [
        (TopN(), ALL, [3]),
        (TopN(), (True, True, True, False), [1]),  # tie of 1 and 2
        (TopN(n=2), ALL, [1, 3]),
        (TopN(n=2), (True, False, True, False), [0, 2]),
        (TopN(n=3), (True, False, False, False), [0]),  # n exceeds what is masked
        (TopN(n=9), ALL, [0, 1, 2, 3]),
        (TopN(score="left_to_right"), (False, True, True, True), [1]),
        (TopN(n=2, score="left_to_right"), (True, False, True, True), [0, 2]),
        (Threshold(0.7), ALL, [1, 2, 3]),
        (Threshold(0.7), (True, True, False, False), [1]),
        (Threshold(0.96), ALL, [3]),  # nothing crosses: the best
        (Threshold(0.96), (True, True, True, False), [1]),
        (Threshold(1.1), ALL, [3]),
        (Threshold(1.1, n=2), ALL, [1, 3]),
        (Threshold(0.9, n=2), ALL, [1, 3]),  # one crosses, fewer than n: the best n
        (Threshold(0.9, n=2), (True, False, False, False), [0]),
        (Threshold(0.7, n=2), ALL, [1, 2, 3]),  # n is no upper bound
        (Threshold(0.1, n=3), (False, True, True, False), [1, 2]),
        (TopN(), (False,) * 4, []),
        (Threshold(0.7), (False,) * 4, []),
    ],
)
def test_rules_on_a_table(rule, masked, expected):
    chosen = rule(jnp.array(masked), make_reading(CONFIDENCE), no_uniform)
    assert np.flatnonzero(chosen).tolist() == expected


@pytest.mark.parametrize(
    ("score", "masked", "expected"),
    [
        ("confidence", ALL, [3, 1, 2, 0]),
        ("left_to_right", ALL, [0, 1, 2, 3]),
        ("margin", ALL, [2, 0, 3, 1]),
        ("entropy", ALL, [1, 0, 2, 3]),
        ("random", ALL, [2, 1, 3, 0]),
        ("margin", (True, True, False, True), [0, 3, 1]),
        ("random", (True, False, False, True), [3, 0]),
    ],
)
def test_order_of_every_score(score, masked, expected):
    reading = make_reading(
        CONFIDENCE,
        top=[[0.5, 0.3], [0.6, 0.5], [0.4, 0.1], [0.9, 0.7]],  # margins .2 .1 .3 .2
        entropy=[1.5, 0.5, 2.0, 2.0],
    )
    state = State(jnp.full(4, MASK), jnp.array(masked))
    order = []
    for _ in expected:
        state, chosen = commit(
            state, reading, TopN(score=score), lambda: jnp.array([0.1, 0.7, 0.9, 0.2])
        )
        order += np.flatnonzero(chosen).tolist()
    assert order == expected


@pytest.mark.parametrize(("strict", "expected"), [(True, [2]), (False, [1, 2])])
def test_threshold_compares_as_asked(strict, expected):
    exact = jnp.log(jnp.float32(0.9))
    confidence = jnp.array([-3.0, exact, exact / 2, -1.0])
    chosen = Threshold(0.9, strict=strict)(jnp.array(ALL), make_reading(confidence), no_uniform)
    assert np.flatnonzero(chosen).tolist() == expected


def test_commit_touches_nothing_else():
    state = State(jnp.array([MASK, 7, MASK, MASK]), jnp.array([True, False, True, False]))
    after, chosen = commit(state, make_reading(CONFIDENCE), TopN(), no_uniform)
    assert after.tokens.tolist() == [MASK, 7, 3, MASK]  # the last is a literal mask token
    assert after.masked.tolist() == [True, False, False, False]
    assert chosen.tolist() == [False, False, True, False]


def test_rank_and_rules_agree_with_the_twin_on_ties():
    random = np.random.default_rng(0)
    confidence = np.log(random.choice([0.2, 0.5, 0.8], size=(200, 4)))
    masked = random.random((200, 4)) < 0.7
    for rule in (TopN(2), Threshold(0.6), Threshold(0.3, n=2)):
        readings = jax.vmap(make_reading)(jnp.asarray(confidence, jnp.float32))
        chosen = np.asarray(rule(jnp.asarray(masked), readings, no_uniform))
        for row in range(200):
            table = {
                i: reference.PositionReading(0, confidence[row, i], [], 0.0, 0.0)
                for i in np.flatnonzero(masked[row]).tolist()
            }
            expected = sorted(reference.commit(table, rule, no_uniform)) if table else []
            assert np.flatnonzero(chosen[row]).tolist() == expected
    place = rank(jnp.array([0.5, -jnp.inf, 0.5, 0.9]), jnp.array([True, True, True, False]))
    assert place.tolist() == [0, 2, 1, 4]


def test_confidences_that_tie_in_bfloat16_do_not_tie():
    # Logit 8 + k/256 of one token at position k: bfloat16 keeps steps of 1/16 there.
    hidden = np.array([[8, 0], [8, 1], [8, 3], [8, 2]], ml_dtypes.bfloat16)
    head = np.array([[1, 2**-8], [0, 0], [0, 0]], ml_dtypes.bfloat16)
    assert np.unique((hidden @ head.T)[:, 0].astype(ml_dtypes.bfloat16)).size == 1
    config = TargetConfig(
        vocab_size=3, num_token_ids=3, hidden_size=2, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=2, intermediate_size=2, block_length=4, mask_id=2, eos_ids=(), pad_id=1,
    )  # fmt: skip
    reading = read(jnp.asarray(hidden), jnp.asarray(head), no_uniform, Sampling(), config, 2)
    state = State(jnp.full(4, 2), jnp.array(ALL))
    _, chosen = commit(state, reading, TopN(), no_uniform)
    assert np.flatnonzero(chosen).tolist() == [2]
    # An exact tie goes to the lowest position.
    tied = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), reading)
    _, chosen = commit(state, tied, TopN(), no_uniform)
    assert np.flatnonzero(chosen).tolist() == [0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopN(0), "n must be at least 1, got 0"),
        (lambda: TopN(1, "best"), "unknown score 'best': expected one of confidence, left_to"),
        (lambda: Threshold(0.0), "threshold must be above 0, got 0.0"),
        (lambda: Threshold(float("nan")), "threshold must be above 0, got nan"),
        (lambda: Threshold(0.9, n=0), "n must be at least 1, got 0"),
    ],
)
def test_senseless_rules_are_refused(make, message, monkeypatch):
    # Users do not run with the type checker of the tests.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        make()
