"""What drafting costs beside a pass of a published target, in operations that XLA counts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import traverse_util

from spot_jax import drafter_io, hf_config, noise
from spot_jax.commit import TopN
from spot_jax.config import Sampling
from spot_jax.draft import Spot
from spot_jax.draft.context import DraftContext, evidence_of
from spot_jax.models.order import OrderConfig
from spot_jax.models.target import num_params
from spot_jax.state import Reading, State
from tests.test_families import PUBLISHED


def draft_operations(length: int, budget: int, order: OrderConfig) -> float:
    """Floating-point operations of drafting one tree for one row, counted from above.

    XLA counts the body of a loop once. The tree's loop runs `budget - 2` times, and what surrounds
    it is one more expansion and one more node.
    """
    shapes = drafter_io.param_shapes(order)

    def draft(params, keys, log_probs, tokens, masked):
        value = log_probs[..., 0]
        reading = Reading(tokens[..., 0], value, log_probs, tokens, value, value)
        root = State(tokens[..., 0], masked)
        context = DraftContext(
            root=root,
            parent=root,
            reading=reading,
            evidence=evidence_of(root, reading),
            fresh=jnp.ones(1, bool),
            keys=keys,
            positions=jnp.arange(length)[None],
            sampling=Sampling(temperature=1.0),
            rule=TopN(),
        )
        return Spot(traverse_util.unflatten_dict(params, sep="/"), order)(context, budget)

    shape = (1, length, order.num_top)
    lowered = jax.jit(draft).lower(
        {name: jax.ShapeDtypeStruct(leaf, jnp.float32) for name, leaf in shapes.items()},
        jax.eval_shape(lambda: noise.request_keys(0, 1)),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct((1, length), bool),
    )
    return lowered.cost_analysis()["flops"] * (budget - 1)


@pytest.mark.parametrize("length", [4, 32])
@pytest.mark.parametrize("budget", [16, 32])
def test_drafting_is_little_beside_a_pass_of_sdar_8b(length, budget):
    order = OrderConfig()
    config = hf_config.target_config(PUBLISHED["SDAR-8B"][0])
    config = dataclasses.replace(config, block_length=length)
    # Attention is left out, which makes the share larger.
    matrices = num_params(config) - config.vocab_size * config.hidden_size
    one_pass = 2 * matrices * budget * length
    found = draft_operations(length, budget, order)
    # At least the network, once a drafted state but the last.
    network = sum(map(math.prod, drafter_io.param_shapes(order).values()))
    assert found > 1.8 * network * length * (budget - 1)
    assert found < 0.05 * one_pass
    assert found < 0.0005 * one_pass, "the README says so"
