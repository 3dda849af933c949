"""The trunk with all of its switches on: order of the stacks, memory, float32 routers, training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax.config import Experts
from spot_jax.models import attention, layers
from spot_jax.models import experts as experts_lib
from spot_jax.models.target import Target, apply_layer
from tests import tiny
from train import target as trainer
from train.parallel import init_state, train_step

EXPERTS = Experts(
    num_experts=6, top_k=2, intermediate_size=8, router="sigmoid", num_groups=3, top_groups=2,
    scale=1.5, bias=True, shared_size=8, first_dense=1,
)  # fmt: skip
CONFIG = dataclasses.replace(
    tiny.CONFIG, num_layers=3, rotary_dim=4, qkv_bias=True, experts=EXPERTS
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 57, (2, 8)))
POSITIONS = jnp.broadcast_to(jnp.arange(8), TOKENS.shape)
VISIBLE = jnp.ones((8, 8), bool)


@jax.jit
def hidden_states(config, params):
    return Target(config).apply({"params": params}, TOKENS, POSITIONS, whole)[0]


def whole(query, key, value, memory):
    return attention.attend_masked(VISIBLE)(query, key, value, memory)


@pytest.mark.parametrize("unroll", [1, 3])
def test_stacks_run_in_order_each_layer_with_its_own_memory(unroll):
    """Against a loop over layers that slices weights and memory by hand."""
    model = tiny.target(CONFIG)
    memory = {"shift": jnp.asarray(np.random.default_rng(1).normal(size=(3, 1, 1, 1, 1)))}
    memory = jax.tree.map(lambda m: m.astype(jnp.float32), memory)

    def attend(query, key, value, memory):
        mixed, _ = whole(query, key, value, None)
        return mixed + memory["shift"], (memory["shift"].reshape(()), query)

    def run(params):
        return Target(CONFIG, unroll=unroll).apply(
            {"params": params}, TOKENS, POSITIONS, attend, memory
        )

    hidden, (shifts, queries) = jax.jit(run)(model.params)
    np.testing.assert_array_equal(shifts, memory["shift"].reshape(-1))

    def loop(params):
        x, seen = params["embed"][TOKENS], []
        cos, sin = layers.rotary(POSITIONS, CONFIG)
        for layer in range(3):
            stack, row = ("first_", layer) if layer < 1 else ("layers_", layer - 1)
            weights = {
                name.removeprefix(stack): leaf[row]
                for name, leaf in params.items()
                if name.startswith(stack)
            }
            of_layer = {"shift": memory["shift"][layer]}
            x, (_, query) = apply_layer(CONFIG, weights, x, cos, sin, attend, of_layer)
            seen.append(query)
        return layers.rms_norm(x, params["norm"], CONFIG.rms_eps), jnp.stack(seen)

    expected, expected_queries = jax.jit(loop)(model.params)
    np.testing.assert_allclose(queries, expected_queries, rtol=0, atol=2e-5)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=2e-5)


def test_every_leaf_and_switch_reaches_the_hidden_states():
    params = tiny.target(CONFIG).params
    base = hidden_states(CONFIG, params)
    for name, leaf in params.items():
        if name not in ("head", "embed"):
            changed = hidden_states(CONFIG, params | {name: jnp.zeros_like(leaf)})
            assert np.abs(changed - base).max() > 1e-3, name
    for change in ({"rotary_dim": 0}, {"rotary_dim": 2}, {"qk_norm": False}, {"qkv_bias": False}):
        config = dataclasses.replace(CONFIG, **change)
        kept = {name: params[name] for name in params.keys() & tiny.target(config).params.keys()}
        assert np.abs(hidden_states(config, kept) - base).max() > 1e-3, change


@functools.cache
def initial():
    config = dataclasses.replace(CONFIG, num_layers=2)
    run = trainer.TargetTraining(target=config, phases=((4, 8),), warmup_steps=0)
    return run, trainer.make_optimizer(run), jax.jit(lambda: trainer.init_params(run, words=None))()


def test_initial_scales():
    _, _, params = initial()
    for name, leaf in params.items():
        if name.endswith("bias"):
            assert not leaf.any(), name
        elif name.endswith("norm"):
            assert (leaf == 1).all(), name
        else:
            # Back into the stream: attention and every kind of feed-forward.
            residual = name.rpartition("_")[2] in ("o", "down")
            expected = 0.02 / 4**0.5 if residual else 0.02
            assert np.std(leaf) == pytest.approx(expected, rel=0.2), name


@functools.cache
def wide_layer(dtype):
    """A mixture as wide as real matmul kernels have panels, and its weights."""
    experts = dataclasses.replace(
        EXPERTS, num_experts=12, top_k=3, intermediate_size=66, shared_size=66
    )
    random = np.random.default_rng(0)
    shapes = {
        "router": (12, 250), "router_bias": (12,), "experts_gate": (12, 66, 250),
        "experts_up": (12, 66, 250), "experts_down": (12, 250, 66), "shared_gate": (66, 250),
        "shared_up": (66, 250), "shared_down": (250, 66),
    }  # fmt: skip
    weights = {
        name: jnp.asarray(0.3 * random.normal(size=shape), dtype) for name, shape in shapes.items()
    }
    return experts, weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_are_interchangeable_at_real_widths(dtype):
    experts, weights = wide_layer(dtype)
    feed_forward = jax.jit(lambda x: experts_lib.feed_forward(experts, weights, x))
    random = np.random.default_rng(2)
    x = jnp.asarray(random.normal(size=(1, 3, 11, 250)), dtype)
    base = np.asarray(feed_forward(x).astype(jnp.float32))
    # The same slots in another order, and one slot among other neighbours.
    order = np.array([2, 0, 1])
    moved = np.asarray(feed_forward(x[:, order]).astype(jnp.float32))
    np.testing.assert_array_equal(moved, base[:, order])
    others = jnp.asarray(random.normal(size=x.shape), dtype).at[:, 1].set(x[:, 1])
    among = np.asarray(feed_forward(others).astype(jnp.float32))
    np.testing.assert_array_equal(among[:, 1], base[:, 1])
    assert (among[:, 0] != base[:, 0]).any()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_routers_are_float32_on_accelerators_too(platform):
    """Their default for float32 matmuls is less, and rounding there chooses other experts."""
    experts, weights = wide_layer("bfloat16")

    @jax.jit
    def route(x):
        return experts_lib.route(experts, x, weights["router"], weights["router_bias"])

    traced = route.trace(jax.ShapeDtypeStruct((4, 250), jnp.bfloat16))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "precision = [HIGHEST, HIGHEST]" in product
    assert "tensor<4x250xf32>, tensor<12x250xf32>" in product


def test_training_moves_every_kind_of_leaf():
    run, optimizer, params = initial()
    # One of each kind is enough: Muon compiles for seconds for every shape.
    kinds = (
        "embed", "first_gate", "layers_q", "layers_q_bias", "layers_mlp_norm", "layers_router",
        "layers_router_bias", "layers_experts_down",
    )  # fmt: skip
    before = {name: params[name] for name in kinds}
    batch = {
        "tokens": np.random.default_rng(0).integers(6, 50, (4, 12)).astype(np.int32),
        "prompt_lengths": np.full(4, 3, np.int32),
        "lengths": np.full(4, 11, np.int32),
        "key": np.asarray(jax.random.key_data(jax.random.key(0)))[None],
    }
    loss = trainer.loss_of_phase(run, 4)

    @jax.jit
    def step(state, batch):
        def loss_fn(trained, batch):
            return loss(params | trained, batch)

        return train_step(state, batch, loss_fn=loss_fn, optimizer=optimizer, axis_name=None)

    state, losses = init_state(before, optimizer), []
    for _ in range(4):
        state, sums = step(state, batch)
        losses.append(float(sums["loss"] / sums["count"]))
    assert losses[-1] < losses[0]
    for name, leaf in state.params.items():
        assert np.isfinite(leaf).all(), name
        # The router's bias takes part in a choice only, so nothing flows into it.
        assert (leaf != before[name]).any() == (name != "layers_router_bias"), name


def test_muon_takes_each_experts_matrix_for_itself():
    _, optimizer, _ = initial()
    random = np.random.default_rng(0)
    weight, gradient = (
        jnp.asarray(0.01 * random.normal(size=(2, 3, 8, 16)), jnp.float32) for _ in "wg"
    )

    @jax.jit
    def update(weight, gradient):
        params = {"layers_experts_gate": weight}
        updates, _ = optimizer.update(
            {"layers_experts_gate": gradient}, optimizer.init(params), params
        )
        return updates["layers_experts_gate"]

    together = update(weight, gradient)
    for layer, expert in np.ndindex(2, 3):
        pick = np.s_[layer : layer + 1, expert : expert + 1]
        np.testing.assert_allclose(together[pick], update(weight[pick], gradient[pick]), atol=1e-5)
    # As one matrix of all experts it would be another update.
    stacked = update(weight.reshape(2, 1, 24, 16), gradient.reshape(2, 1, 24, 16))
    assert np.abs(stacked.reshape(together.shape) - together).max() > 1e-3


def test_routers_biases_and_norms_are_left_to_adam():
    matrices = {
        name.partition("_")[2]
        for name, leaf in tiny.target(CONFIG).params.items()
        if trainer._matrices(name, leaf.ndim) is not None
    }
    assert matrices == {
        "q", "k", "v", "o", "gate", "up", "down", "experts_gate", "experts_up", "experts_down",
        "shared_gate", "shared_up", "shared_down",
    }  # fmt: skip
