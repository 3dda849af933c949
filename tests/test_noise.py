"""Noise is a function of its coordinates and of nothing else, and it is Gumbel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from spot_jax import noise
from tests import reference

# Of request 0 at seed 0, position 17, 3 commits, tokens 0, 1 and 151668: a change of these is a
# change of every sampled text.
KNOWN_GUMBEL = [0.18374508, 0.12388760, -1.03390726]
KNOWN_UNIFORM = 0.20197272
POSITIONS = jnp.array([[5, 6, 7], [0, 130, 7]])
COUNTS = jnp.array([2, 0])
IDS = jnp.arange(7)


@pytest.fixture(scope="module")
def keys():
    return noise.request_keys(3, 2)


@pytest.fixture(scope="module")
def draws(keys):
    return np.asarray(noise.token_gumbel(keys, POSITIONS, COUNTS, IDS[None, None]))


def test_known_answer(strict):
    drawn = noise.token_gumbel(
        noise.request_keys(0, 1), jnp.array([[17]]), jnp.array([3]), jnp.array([[[0, 1, 151668]]])
    )
    np.testing.assert_allclose(drawn[0, 0], KNOWN_GUMBEL, rtol=1e-6)
    uniform = noise.order_uniform(noise.request_keys(0, 1), jnp.array([[17]]), jnp.array([3]))
    np.testing.assert_allclose(uniform[0, 0], KNOWN_UNIFORM, rtol=1e-6)


def test_equals_the_slow_twin(keys, draws):
    for row in range(2):
        key = reference.key_words(keys[row])
        for place, position in enumerate(POSITIONS[row].tolist()):
            expected = reference.gumbel(key, position, int(COUNTS[row]), IDS)
            np.testing.assert_allclose(draws[row, place], expected, rtol=2e-6, atol=1e-7)
            uniform = noise.order_uniform(keys, POSITIONS, COUNTS)[row, place]
            assert uniform == reference.order_uniform(key, position, int(COUNTS[row]))


@pytest.mark.parametrize("ids", [(0,), (6, 2), (3, 4, 5, 6), (6, 5, 4, 3, 2, 1, 0), (2, 2)])
def test_any_subset_and_order_of_tokens_gives_the_same_draws(keys, draws, ids):
    part = noise.token_gumbel(keys, POSITIONS, COUNTS, jnp.array(ids)[None, None])
    np.testing.assert_array_equal(part, draws[..., ids])


def test_each_position_may_ask_for_its_own_tokens(keys, draws):
    own = jnp.array([[[0, 3], [1, 1], [6, 5]], [[2, 0], [4, 6], [3, 3]]])
    part = noise.token_gumbel(keys, POSITIONS, COUNTS, own)
    np.testing.assert_array_equal(part, np.take_along_axis(draws, np.asarray(own), axis=-1))


def test_batch_and_slot_do_not_matter(keys, draws):
    alone = noise.token_gumbel(keys[1:], POSITIONS[1:], COUNTS[1:], IDS[None, None])
    np.testing.assert_array_equal(alone, draws[1:])
    # As nodes: the same state in several slots, others between.
    positions = jnp.broadcast_to(POSITIONS[:, None], (2, 3, 3))
    counts = jnp.stack([COUNTS, COUNTS + 1, COUNTS], axis=1)
    nodes = noise.token_gumbel(keys, positions, counts, IDS[None, None, None])
    np.testing.assert_array_equal(nodes[:, 0], draws)
    np.testing.assert_array_equal(nodes[:, 2], draws)
    assert not np.any(np.asarray(nodes[:, 1]) == draws)


def test_every_coordinate_gives_fresh_draws(keys, draws):
    others = {
        "count": (keys, POSITIONS, COUNTS + 1),
        "position": (keys, POSITIONS + 1, COUNTS),
        "key": (noise.request_keys(4, 2), POSITIONS, COUNTS),
        "request": (noise.request_keys(3, 2, first=2), POSITIONS, COUNTS),
    }
    for name, coordinates in others.items():
        fresh = np.asarray(noise.token_gumbel(*coordinates, IDS[None, None]))
        assert not np.any(fresh == draws), name
    # Neighbouring coordinates must not stand for each other: position 6 at count 2, 7 at count 1.
    assert not np.intersect1d(
        noise.token_gumbel(keys, POSITIONS + 1, COUNTS + 1, IDS[None, None]), draws
    ).size


def test_a_request_keeps_its_key_in_any_batch():
    data = jax.random.key_data
    many = data(noise.request_keys(11, 5))
    np.testing.assert_array_equal(data(noise.request_keys(11, 2, first=3)), many[3:])
    assert len({tuple(row) for row in many.tolist()}) == 5


def test_token_and_order_streams_differ(keys):
    uniform = np.asarray(noise.order_uniform(keys, POSITIONS, COUNTS))
    assert np.unique(uniform).size == uniform.size and (0 <= uniform).all() and (uniform < 1).all()
    key = reference.key_words(keys[0])
    tokens, order = (reference.fold(key, stream, 5, 2) for stream in (0, 1))
    assert tokens != order
    # The order draw is not a token's draw in disguise.
    token_bits = np.concatenate(reference.threefry(tokens, np.arange(7), np.zeros(7)))
    assert not np.isclose(token_bits / 2**32, uniform[0, 0], atol=1e-7).any()


def test_extreme_bits_give_finite_noise():
    extreme = jnp.array([0, 1, 0xFFFFFFFE, 0xFFFFFFFF], jnp.uint32)
    high, low = (x.reshape(-1) for x in jnp.meshgrid(extreme, extreme))
    exponential = np.asarray(noise._exponential(high, low))
    assert np.isfinite(exponential).all() and (exponential > 0).all()
    drawn = -np.log(exponential)
    assert drawn.max() == pytest.approx(65 * np.log(2), rel=1e-6) and drawn.min() > -3
    # The small tail that decides an argmax keeps its precision.
    small = noise._exponential(jnp.uint32([0]), jnp.uint32([12345]))
    np.testing.assert_allclose(small, 12345.5 / 2.0**64, rtol=1e-6)


def test_draws_are_gumbel_and_independent():
    keys = noise.request_keys(1, 4)
    positions = jnp.broadcast_to(jnp.arange(10), (4, 10))
    drawn = np.asarray(
        noise.token_gumbel(keys, positions, jnp.zeros(4, int), jnp.arange(500)[None, None])
    )
    assert drawn.dtype == np.float32
    assert scipy.stats.kstest(drawn.reshape(-1), "gumbel_r").pvalue > 1e-3
    flat = drawn.reshape(40, 500)
    between = np.corrcoef(flat)[np.triu_indices(40, 1)]
    assert np.abs(between).max() < 5 / np.sqrt(500)
    neighbours = [np.corrcoef(row[:-1], row[1:])[0, 1] for row in flat]
    assert abs(np.mean(neighbours)) < 4 / np.sqrt(flat.size)
