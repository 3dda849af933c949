"""The sampling head against its slow twin, in chunks of the vocabulary and at its extremes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from spot_jax import noise
from spot_jax.config import Sampling, TargetConfig
from spot_jax.reading import read
from tests import reference

VOCAB, NUM_TOKENS, MASK, LENGTH, NUM_TOP = 61, 57, 50, 4, 8
CONFIG = TargetConfig(
    vocab_size=VOCAB, num_token_ids=NUM_TOKENS, hidden_size=16, num_layers=1, num_heads=1,
    num_kv_heads=1, head_dim=2, intermediate_size=2, block_length=LENGTH, mask_id=MASK,
    eos_ids=(3,), pad_id=2,
)  # fmt: skip
POSITIONS, COUNTS = jnp.array([[8, 9, 10, 11], [0, 1, 2, 3]]), jnp.array([1, 0])
# The identity as head: hidden states are the logits, exactly.
IDENTITY = np.eye(VOCAB, dtype=np.float32)


def run(hidden, head, sampling, *, chunk=VOCAB, num_top=NUM_TOP, seed=0):
    keys = noise.request_keys(seed, len(hidden))

    @jax.jit
    def reading(hidden, head):
        def gumbel(ids):
            assert sampling.temperature > 0, "noise at temperature 0"
            return noise.token_gumbel(keys, POSITIONS, COUNTS, ids[None, None])

        return read(hidden, head, gumbel, sampling, CONFIG, num_top, chunk)

    return jax.device_get(reading(jnp.asarray(hidden), jnp.asarray(head)))


def of_logits(logits, sampling=None, **options):
    """Reads 4 positions given by their logits, in both rows."""
    hidden = np.broadcast_to(np.asarray(logits, np.float32), (2, LENGTH, VOCAB))
    return jax.tree.map(lambda x: x[0], run(hidden, IDENTITY, sampling or Sampling(), **options))


@functools.cache
def random_head():
    random = np.random.default_rng(0)
    hidden = random.normal(size=(2, LENGTH, 16)).astype(np.float32)
    return hidden, (0.6 * random.normal(size=(VOCAB, 16))).astype(np.float32)


CASES = [
    *itertools.product((0.7,), (0, 5), (1.0, 0.8), ("filtered", "raw"), (24,), (False,)),
    (0.0, 0, 1.0, "filtered", 24, False),
    (0.0, 5, 0.8, "raw", 24, False),  # nothing of this matters at temperature 0
    (0.0, 5, 1.0, "filtered", 24, False),
    (0.0, 0, 0.5, "filtered", 61, False),
    (1.3, 5, 0.8, "filtered", 61, False),
    (1.3, 5, 0.8, "filtered", 1, False),
    (1.0, 0, 1.0, "filtered", 24, True),
    (1.0, 40, 0.9, "raw", 24, True),
]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_slow_twin(case):
    temperature, top_k, top_p, confidence, chunk, reference_vocab = case
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        confidence=confidence,
        reference_vocab=reference_vocab,
    )
    hidden, head = random_head()
    logits = hidden.astype(np.float64) @ head.T.astype(np.float64)
    reading = run(hidden, head, sampling, chunk=chunk)
    for row, place in itertools.product(range(2), range(LENGTH)):
        key = reference.key_words(noise.request_keys(0, 2)[row])
        position, count = int(POSITIONS[row, place]), int(COUNTS[row])
        drawn = reference.gumbel(key, position, count, np.arange(VOCAB))
        expected = reference.read(logits[row, place], drawn, sampling, CONFIG)
        mine = jax.tree.map(lambda x, i=(row, place): x[i], reading)
        assert mine.token == expected.token
        for field in ("confidence", "entropy"):
            np.testing.assert_allclose(
                getattr(mine, field), getattr(expected, field), rtol=2e-6, atol=2e-6
            )
        if np.isfinite(expected.log_doubt):
            np.testing.assert_allclose(mine.log_doubt, expected.log_doubt, rtol=1e-5, atol=1e-5)
        top = expected.top[:NUM_TOP]
        assert mine.top_tokens[: len(top)].tolist() == [token for _, token in top]
        np.testing.assert_allclose(
            mine.top_log_probs[: len(top)], [x for x, _ in top], rtol=2e-6, atol=2e-6
        )
        assert (mine.top_log_probs[len(top) :] == -np.inf).all()


def test_confidence_does_not_saturate():
    logits = np.zeros((LENGTH, VOCAB), np.float32)
    logits[:, 40] = gaps = np.array([20.0, 60.0, 30.0, 30.5])
    for chunk in (VOCAB, 24):
        reading = of_logits(logits, chunk=chunk)
        others = NUM_TOKENS - 2
        np.testing.assert_allclose(reading.confidence, -others * np.exp(-gaps), rtol=1e-5)
        assert np.argsort(-reading.confidence).tolist() == [1, 3, 2, 0]
        np.testing.assert_allclose(reading.log_doubt, np.log(others) - gaps, rtol=1e-5)
        np.testing.assert_array_equal(reading.confidence, reading.top_log_probs[:, 0])
        assert (reading.entropy > 0).all() and (np.argsort(reading.entropy) == [1, 3, 2, 0]).all()


@pytest.mark.parametrize("chunk", [VOCAB, 24, 7])
def test_ties_go_to_the_lowest_token_id(chunk):
    logits = np.zeros((LENGTH, VOCAB), np.float32)
    logits[1, [55, 23, 24]] = 2.0  # on both sides of a chunk's end
    logits[2, [56, 48]] = 1.0
    logits[3] = -5.0
    reading = of_logits(logits, chunk=chunk)
    assert reading.token.tolist() == [0, 23, 48, 0]
    assert reading.top_tokens[0].tolist() == list(range(NUM_TOP))
    assert reading.top_tokens[1].tolist() == [23, 24, 55, 0, 1, 2, 3, 4]
    assert reading.top_tokens[2].tolist() == [48, 56, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mask_and_padding_rows_are_never_drawn(temperature):
    logits = np.random.default_rng(1).normal(size=(LENGTH, VOCAB)).astype(np.float32)
    pushed = logits.copy()
    closed = [MASK, *range(NUM_TOKENS, VOCAB)]
    pushed[:, closed] += 50.0
    plain, biased = (of_logits(x, Sampling(temperature=temperature)) for x in (logits, pushed))
    # Neither drawn nor in the distribution: nothing at all changes.
    jax.tree.map(np.testing.assert_array_equal, plain, biased)
    assert not np.isin(biased.top_tokens, closed).any()
    literal = of_logits(pushed, Sampling(temperature=temperature, reference_vocab=True))
    assert np.isin(literal.token, closed).all()
    assert np.isin(literal.top_tokens[:, : len(closed)], closed).all()


def test_only_the_mask_is_likely():
    logits = np.full((LENGTH, VOCAB), -1e9, np.float32)
    logits[:, MASK] = 1e9
    reading = of_logits(logits)
    assert (reading.token == 0).all()
    assert np.isfinite(reading.confidence).all() and np.isfinite(reading.entropy).all()


def test_more_top_tokens_than_tokens():
    reading = of_logits(np.random.default_rng(2).normal(size=(LENGTH, VOCAB)), num_top=200)
    assert reading.top_tokens.shape == (LENGTH, VOCAB)
    kept = np.isfinite(reading.top_log_probs)
    assert (kept.sum(axis=-1) == NUM_TOKENS - 1).all()
    np.testing.assert_allclose(np.exp(reading.top_log_probs).sum(axis=-1), 1.0, rtol=1e-5)


def test_temperature_0_is_the_limit_of_low_temperatures():
    hidden, head = random_head()
    cold = run(hidden, head, Sampling())
    warm = run(hidden, head, Sampling(temperature=1e-6, confidence="raw"))
    jax.tree.map(np.testing.assert_array_equal, cold, warm)


def test_filters_keep_ties_with_the_last_survivor():
    logits = np.full((LENGTH, VOCAB), -20.0, np.float32)
    logits[:, [10, 20, 30]] = 1.0
    logits[:, 40] = 2.0
    reading = of_logits(logits, Sampling(temperature=1.0, top_k=2))
    assert np.isfinite(reading.top_log_probs).sum(axis=-1).tolist() == [4] * LENGTH
    assert reading.top_tokens[0, :4].tolist() == [40, 10, 20, 30]


@pytest.mark.parametrize("chunk", [96, 1000])
def test_the_filters_keep_the_best_token_whatever_the_chunk(chunk):
    # A chunk's logits are computed in another shape than the sorted row's, so they may be off by
    # a rounding; the best token must survive top_k = 1 all the same.
    random = np.random.default_rng(3)
    hidden = random.normal(size=(2, LENGTH, 384)).astype(np.float32)
    head = random.normal(size=(1003, 384)).astype(np.float32)
    config = TargetConfig(
        vocab_size=1003, num_token_ids=1003, hidden_size=384, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=2, intermediate_size=2, block_length=LENGTH, mask_id=0,
        eos_ids=(), pad_id=1,
    )  # fmt: skip

    @jax.jit
    def greedy(hidden, head, sampling):
        def flat(ids):
            return jnp.zeros((2, LENGTH, len(ids)))

        return read(hidden, head, flat, sampling, config, 4, chunk)

    best = greedy(hidden, head, Sampling())
    filtered = greedy(hidden, head, Sampling(temperature=1.0, top_k=1))
    np.testing.assert_array_equal(filtered.token, best.token)
    np.testing.assert_array_equal(filtered.confidence, 0.0)


def test_bits_do_not_depend_on_what_is_looked_at():
    hidden, head = random_head()

    def no_noise(ids):
        return jnp.zeros((2, LENGTH, len(ids)))

    def reading(hidden, head):
        return read(hidden, head, no_noise, Sampling(temperature=1.0), CONFIG, NUM_TOP, 24)

    whole = jax.jit(reading)(hidden, head)
    alone = jax.jit(lambda *x: reading(*x).confidence)(hidden, head)
    np.testing.assert_array_equal(alone.view(jnp.int32), whole.confidence.view(jnp.int32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or more, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_p": 1.5}, "top_p must be in"),
        ({"confidence": "best"}, "confidence must be 'filtered' or 'raw', got 'best'"),
    ],
)
def test_senseless_sampling_is_refused(options, message, monkeypatch):
    # Users do not run with the type checker of the tests.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_suppressed_tokens_are_impossible():
    """In the choice and in the confidence, as if the vocabulary lacked them."""
    logits = np.random.default_rng(1).normal(size=(LENGTH, VOCAB))
    logits[:, 3], logits[:, 7] = 9.0, 8.0
    gone = logits.copy()
    gone[:, [3, 7]] = -1e4
    for temperature in (0.0, 1.0):
        found = of_logits(logits, Sampling(temperature=temperature, suppressed=(3, 7)), chunk=24)
        expected = of_logits(gone, Sampling(temperature=temperature), chunk=24)
        for left, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6)
        assert not np.isin(found.token, (3, 7)).any()


def test_filters_at_temperature_zero_renormalise_the_confidence():
    """Dream's: the same tokens, by the probability that they have among those that stay."""
    probs = np.full(VOCAB, 1e-9)
    probs[:4] = 0.4, 0.3, 0.2, 0.1
    for cold, stay in ((Sampling(top_p=0.65), 0.7), (Sampling(top_k=3), 0.9)):
        reading = of_logits(np.log(probs), cold)
        assert (reading.token == 0).all()
        np.testing.assert_allclose(np.exp(reading.confidence), 0.4 / stay, rtol=1e-5)
        raw = of_logits(np.log(probs), dataclasses.replace(cold, confidence="raw"))
        np.testing.assert_allclose(np.exp(raw.confidence), 0.4, rtol=1e-5)
