"""Targets that start from another's weights, and the loss of full attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax.config import Experts
from spot_jax.models import attention
from spot_jax.models.target import Target, param_shapes
from tests import tiny
from train import target, tokenizer
from train.adapt import adapt

TEXTS = ["Mia has 23 pears. She buys 4 more.", "Sort these numbers: 7, 3, 12"] * 3


@pytest.fixture(scope="module")
def words():
    """A larger tokenizer and a smaller one of other merges."""
    return tokenizer.train_tokenizer(TEXTS, 290), tokenizer.train_tokenizer(TEXTS[1:2] * 2, 275)


def source(words):
    size = words[0].get_vocab_size()
    return tiny.target(
        dataclasses.replace(tiny.CONFIG, vocab_size=size, num_token_ids=size, tie_embeddings=True)
    )


def hidden(params, config):
    tokens = jnp.asarray([[7, 9, 30, 12, 41]])
    attend = attention.attend_masked(jnp.ones((1, 1, 5), bool))
    params = jax.tree.map(jnp.asarray, params)
    return Target(config).apply({"params": params}, tokens, jnp.arange(5)[None], attend)[0]


def test_the_same_shape_keeps_every_weight(words):
    model = source(words)
    found = adapt(model.params, model.config, model.config, words[0], words[0])
    assert found.keys() == model.params.keys()
    jax.tree.map(np.testing.assert_array_equal, found, model.params)


def test_a_token_begins_as_the_mean_of_its_text(words):
    model = source(words)
    size = words[1].get_vocab_size()
    config = dataclasses.replace(model.config, vocab_size=size, num_token_ids=size)
    found = adapt(model.params, model.config, config, *words)["embed"]
    table = np.asarray(model.params["embed"])
    np.testing.assert_array_equal(found[:5], table[:5])
    old, several = words[0].get_vocab(), 0
    for name, token in words[1].get_vocab().items():
        if name in old:
            np.testing.assert_array_equal(found[token], table[old[name]])
        elif not name.startswith("<|"):
            ids = words[0].encode(words[1].decode([token]), add_special_tokens=False).ids
            np.testing.assert_allclose(found[token], table[ids].mean(0), rtol=1e-6)
            several += len(ids) > 1
    assert several


def test_dropped_layers_leave_the_first_and_the_last(words):
    model = source(words)
    deep = dataclasses.replace(model.config, num_layers=3)
    deep = tiny.target(deep)
    config = dataclasses.replace(deep.config, num_layers=2)
    found = adapt(deep.params, deep.config, config, words[0], words[0])
    np.testing.assert_array_equal(found["layers_up"], deep.params["layers_up"][jnp.array([0, 2])])


def test_experts_that_hold_all_neurons_compute_what_the_feed_forward_did(words):
    """A router without preference takes the first two, each half of what is not shared."""
    model = source(words)
    experts = Experts(
        num_experts=4, top_k=2, intermediate_size=8, router="sigmoid", scale=2.0, shared_size=8
    )
    config = dataclasses.replace(model.config, experts=experts)
    found = adapt(model.params, model.config, config, words[0], words[0])
    assert np.std(found["layers_router"]) > 0
    found["layers_router"] = np.zeros_like(found["layers_router"])
    np.testing.assert_allclose(
        hidden(found, config), hidden(model.params, model.config), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_array_equal(
        found["layers_experts_up"][:, 0], found["layers_experts_up"][:, 2]
    )


def test_without_norms_attention_is_close_to_what_it_was(words):
    """Wide heads of even weights have norms near their mean; folding beats dropping the norms."""
    config = dataclasses.replace(source(words).config, hidden_size=64, head_dim=64)
    model = tiny.target(config)
    bare = dataclasses.replace(config, qk_norm=False, qkv_bias=True)
    found = adapt(model.params, config, bare, words[0], words[0])
    assert not np.any(found["layers_q_bias"])
    dropped = found | {n: model.params[n] for n in ("layers_q", "layers_k")}
    right = hidden(model.params, config)
    folded, plain = (float(jnp.mean((hidden(p, bare) - right) ** 2)) for p in (found, dropped))
    assert folded < 0.2 * plain


def test_shapes_that_do_not_carry_over_are_named(words):
    model = source(words)
    config = dataclasses.replace(model.config, hidden_size=20)
    with pytest.raises(ValueError, match=r"cannot be started from the source's: embed, norm, "):
        adapt(model.params, model.config, config, words[0], words[0])


@pytest.mark.parametrize("shift", [False, True])
def test_full_attention_learns_blocks_after_clean_ones_and_before_masks(monkeypatch, shift):
    seen = {}

    def keep(params, hidden, labels, weight):
        seen.update(hidden=hidden, labels=labels, weight=weight)
        return jnp.sum(weight), {"count": jnp.sum(weight)}

    monkeypatch.setattr(target, "_cross_entropy", keep)
    config = dataclasses.replace(tiny.CONFIG, attention="full", grid="anchored", shift=shift)
    rows, width, prompt, size = 400, 16, 3, 6
    batch = {
        "tokens": np.tile(np.arange(10, 10 + width, dtype=np.int32), (rows, 1)),
        "prompt_lengths": np.full(rows, prompt, np.int32),
        "lengths": np.array([prompt + size] * (rows - 1) + [0], np.int32),
        "key": np.asarray(jax.random.key_data(jax.random.key(0)))[None],
    }
    params = tiny.target(config).params
    assert params.keys() == param_shapes(config).keys()
    target.whole_diffusion_loss(params, batch, config=config)
    weight = np.asarray(seen["weight"])
    if shift:
        assert seen["hidden"].shape[1] == width - 1 and int(seen["labels"][0, 0]) == 11
        weight = np.pad(weight, ((0, 0), (1, 0)))
    assert not weight[:, :prompt].any() and not weight[-1].any()
    behind = np.isclose(weight, 0.1)
    blockwise = behind.any(axis=1)
    assert 0.6 < blockwise.mean() < 0.9
    # The blocks of the answer are 3-6 and 7-10; the drawn one is never that of 11-14.
    firsts = {int(np.flatnonzero(row)[0]) for row in behind[blockwise]}
    assert firsts == {7, 11}
    for row in weight[blockwise]:
        first = int(np.flatnonzero(np.isclose(row, 0.1))[0])
        assert np.isclose(row[first:], 0.1).all()
        assert not row[: first - 4].any() and set(row[first - 4 : first]) <= {0.0, 1.0}
    assert set(weight[~blockwise].ravel()) == {0.0, 1.0} and weight[~blockwise][:, -1].any()
