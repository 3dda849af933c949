"""Routers and grouped feed-forwards against loops over tokens and experts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax.config import Experts
from spot_jax.models import experts as lib

WIDTH, INNER, NUMBER = 10, 6, 8
SOFTMAX = Experts(num_experts=NUMBER, top_k=3, intermediate_size=INNER)
CASES = {
    "softmax": SOFTMAX,
    "softmax, as it is": dataclasses.replace(SOFTMAX, renormalise=False),
    "sigmoid": dataclasses.replace(SOFTMAX, router="sigmoid", scale=2.5, bias=True),
    "grouped": Experts(
        num_experts=NUMBER, top_k=3, intermediate_size=INNER, router="sigmoid", num_groups=4,
        top_groups=2, scale=2.5, bias=True, shared_size=5,
    ),
    "one": dataclasses.replace(SOFTMAX, top_k=1),
    "all": dataclasses.replace(SOFTMAX, top_k=NUMBER),
}  # fmt: skip


def make_weights(experts, seed=0):
    random = np.random.default_rng(seed)
    shapes = {
        "router": (NUMBER, WIDTH),
        "experts_gate": (NUMBER, INNER, WIDTH),
        "experts_up": (NUMBER, INNER, WIDTH),
        "experts_down": (NUMBER, WIDTH, INNER),
    }
    if experts.bias:
        shapes["router_bias"] = (NUMBER,)
    if size := experts.shared_size:
        shapes |= {"shared_gate": (size, WIDTH), "shared_up": (size, WIDTH)}
        shapes["shared_down"] = (WIDTH, size)
    return {name: random.normal(size=shape) for name, shape in shapes.items()}


def swiglu(x, gate, up, down):
    inner = gate @ x
    return down @ (inner / (1 + np.exp(-inner)) * (up @ x))


def slow_route(experts, weights, x):
    """Expert -> weight of one token."""
    logits = weights["router"] @ x
    if experts.router == "softmax":
        scores = np.exp(logits - logits.max())
        scores = scores / scores.sum()
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores + weights.get("router_bias", 0.0)
    size = NUMBER // experts.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(experts.num_groups)]
    best = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda g: (-best[g], g))[: experts.top_groups]
    allowed = [e for g in kept for e in groups[g]]
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: experts.top_k]
    total = sum(scores[e] for e in chosen) if experts.renormalise else 1.0
    return {e: scores[e] / total * experts.scale for e in chosen}


def slow_feed_forward(experts, weights, x):
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:-1]):
        for e, share in slow_route(experts, weights, x[place]).items():
            parts = (weights[f"experts_{n}"][e] for n in ("gate", "up", "down"))
            out[place] += share * swiglu(x[place], *parts)
        if experts.shared_size:
            parts = (weights[f"shared_{n}"] for n in ("gate", "up", "down"))
            out[place] += swiglu(x[place], *parts)
    return out


@jax.jit
def feed_forward(experts, weights, x):
    return lib.feed_forward(experts, weights, x)


def as_float32(weights):
    return {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loops(name, strict):
    experts = CASES[name]
    weights = make_weights(experts)
    x = np.random.default_rng(1).normal(size=(3, 4, WIDTH))
    ours = feed_forward(experts, as_float32(weights), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(ours, slow_feed_forward(experts, weights, x), rtol=0, atol=2e-4)


def test_each_switch_matters():
    x = np.random.default_rng(1).normal(size=(6, WIDTH))
    base = CASES["grouped"]
    weights = make_weights(base)
    expected = slow_feed_forward(base, weights, x)
    for change in (
        {"router": "softmax"}, {"renormalise": False}, {"top_groups": 4}, {"scale": 1.0},
        {"shared_size": 0}, {"top_k": 2},
    ):  # fmt: skip
        other = dataclasses.replace(base, **change)
        ours = feed_forward(other, as_float32(weights), jnp.asarray(x, jnp.float32))
        assert np.abs(ours - expected).max() > 1e-2, change
    del weights["router_bias"]
    ours = feed_forward(base, as_float32(weights), jnp.asarray(x, jnp.float32))
    assert np.abs(ours - expected).max() > 1e-2


def test_groups_left_out_stay_out_where_every_score_is_negative():
    """A dropped group scored 0 would win over the kept ones, whose biases are below -1."""
    experts = CASES["grouped"]
    weights = make_weights(experts)
    weights["router_bias"] -= 5
    x = np.random.default_rng(1).normal(size=(3, 4, WIDTH))
    ours = feed_forward(experts, as_float32(weights), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(ours, slow_feed_forward(experts, weights, x), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["softmax", "grouped"])
def test_a_token_does_not_see_its_neighbours(name):
    """To the bit, wherever it is and whatever experts the others go to."""
    experts = CASES[name]
    weights = as_float32(make_weights(experts))
    random = np.random.default_rng(2)
    token = random.normal(size=WIDTH)
    seen = set()
    for trial in range(8):
        x = random.normal(size=(2, 8, WIDTH))
        if trial == 7:
            x[:] = x[0, 0]  # all of them to the same experts
        place = (trial % 2, trial)
        x[place] = token
        ours = feed_forward(experts, weights, jnp.asarray(x, jnp.float32))
        seen.add(np.asarray(ours[place]).tobytes())
    assert len(seen) == 1


def test_ties_go_to_the_lowest_expert():
    weights = as_float32(make_weights(SOFTMAX)) | {"router": jnp.zeros((NUMBER, WIDTH))}
    chosen, share = lib.route(SOFTMAX, jnp.ones((2, WIDTH)), weights["router"], None)
    assert np.asarray(chosen).tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(share, 1 / 3, rtol=1e-6)
    assert math.isclose(float(share.sum()), 2.0, rel_tol=1e-6)
