"""The order network: size, support, and what it may look at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax import drafter_io
from spot_jax.models.order import (
    OrderConfig,
    OrderNetwork,
    next_commit_log_probs,
    order_features,
)
from spot_jax.state import Reading

SMALL = OrderConfig(num_top=4, num_alternatives=2, max_block=8, width=16, num_heads=2, num_layers=1)


def inputs(seed=0, length=8):
    keys = jax.random.split(jax.random.key(seed), 4)
    top = jnp.sort(jax.random.normal(keys[0], (2, length, 4)) - 5, axis=-1, descending=True)
    masked = jax.random.bernoulli(keys[1], 0.7, (2, length)).at[:, 0].set(True)
    read = masked | jax.random.bernoulli(keys[2], 0.5, masked.shape)
    root = masked | (read & jax.random.bernoulli(keys[3], 0.5, masked.shape))
    reading = Reading(
        jnp.zeros((2, length), jnp.int32),
        top[..., 0],
        top,
        jnp.zeros(top.shape, jnp.int32),
        top[..., 1],
        -top[..., 0],
    )
    draws = top[..., :2], top[..., :2] - top[..., :1], jnp.zeros((2, length, 2), jnp.int32)
    return reading, draws, (read, root, masked)


def test_it_has_the_published_size():
    shapes = drafter_io.param_shapes(OrderConfig())
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    assert total == 626_947
    assert 600_000 <= total <= 640_000


def test_next_commit_is_a_law_over_masked_positions():
    reading, draws, states = inputs()
    features = order_features(reading, *draws, *states)
    network = OrderNetwork(SMALL)
    params = jax.jit(network.init)(jax.random.key(1), features)
    log_probs = next_commit_log_probs(jax.jit(network.apply)(params, features), states[2])
    masked = np.asarray(states[2])
    assert np.isneginf(log_probs[~masked]).all() and np.isfinite(log_probs[masked]).all()
    np.testing.assert_allclose(np.exp(log_probs).sum((1, 2)), 1.0, rtol=1e-5)


def test_it_reads_distributions_and_never_token_ids():
    reading, draws, states = inputs()
    other = reading._replace(token=reading.token + 7, top_tokens=reading.top_tokens + 7)
    np.testing.assert_array_equal(
        order_features(reading, *draws, *states), order_features(other, *draws, *states)
    )


def test_readings_of_positions_that_were_committed_already_are_ignored():
    reading, draws, (read, root, masked) = inputs()
    hidden = ~np.asarray(read)
    assert hidden.any()
    other = reading._replace(
        top_log_probs=jnp.where(hidden[..., None], -1.0, reading.top_log_probs)
    )
    np.testing.assert_array_equal(
        order_features(reading, *draws, read, root, masked),
        order_features(other, *draws, read, root, masked),
    )


def test_the_drafted_state_changes_what_is_predicted():
    reading, draws, (read, root, masked) = inputs()
    first = order_features(reading, *draws, read, root, masked)
    later = order_features(reading, *draws, read, root, masked.at[:, 0].set(False))
    network = OrderNetwork(SMALL)
    params = jax.jit(network.init)(jax.random.key(1), first)
    scores = [jax.jit(network.apply)(params, x) for x in (first, later)]
    assert (np.abs(scores[0] - scores[1])[:, 1:] > 1e-6).any()


def test_a_block_longer_than_it_can_read_is_an_error():
    with pytest.raises(ValueError, match="block of 9 positions exceeds max_block 8"):
        OrderNetwork(SMALL).init(jax.random.key(0), jnp.zeros((1, 9, 5)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("num_alternatives", 40, "exceeds num_top 32"), ("width", 100, "not a multiple of 8")],
)
def test_shapes_that_do_not_fit_are_errors(field, value, message):
    with pytest.raises(ValueError, match=message):
        OrderConfig(**{field: value})
