"""Drafting changes no bit (L1), rows do not see each other, and samples have the right law (L3)."""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from spot_jax import noise
from spot_jax.config import TargetConfig
from spot_jax.decode import DecodeConfig, decode
from spot_jax.draft import Chain, ConfidenceTree, Drafter, Oracle, RandomTree, Spot
from tests import reference, tiny

TARGET = functools.cache(tiny.target)
DRAFTERS = ("chain", "confidence", "random", "spot", "oracle")


class AnyOf(NamedTuple):
    """Several drafters in one program: compiled once for all of them."""

    drafters: tuple[Drafter, ...]
    which: jax.Array

    def __call__(self, context, budget):
        calls = [functools.partial(_call, drafter, budget) for drafter in self.drafters]
        return jax.lax.switch(self.which, calls, context)


def _call(drafter, budget, context):
    return drafter(context, budget)


@functools.cache
def plain(name, seed):
    return jax.device_get(decode(TARGET(), *tiny.requests(seed), tiny.REFERENCES[name]))


def drafted(name, seed, drafter):
    """Decodes with one of `DRAFTERS` at the budget that `plain` has slots for."""
    config = tiny.REFERENCES[name]
    config = dataclasses.replace(config, budget=config.reference_shape, reference_shape=0)
    drafters = (
        Chain(),
        ConfidenceTree(2.0),
        RandomTree(jax.random.key(11)),
        Spot(tiny.order_params(), tiny.ORDER),
        Oracle(jnp.asarray(plain(name, seed).trace.step)),
    )
    any_of = AnyOf(drafters, jnp.array(DRAFTERS.index(drafter)))
    return jax.device_get(decode(TARGET(), *tiny.requests(seed), config, any_of))


def check_same_bits(mine, expected):
    for name in ("tokens", "lengths", "stopped", "steps"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(expected, name))
    np.testing.assert_array_equal(mine.trace.step, expected.trace.step)
    np.testing.assert_array_equal(
        mine.trace.confidence.view(np.int32), expected.trace.confidence.view(np.int32)
    )


def check_accounting(mine):
    np.testing.assert_array_equal(mine.passes + mine.accepted, mine.steps)
    assert (mine.accepted <= mine.drafted).all()
    steps, passes = mine.trace.step, mine.trace.pass_
    for row in range(len(steps)):
        decoded = steps[row] >= 0
        assert ((passes[row] >= 0) == decoded).all()
        assert passes[row].max() == mine.passes[row] - 1
        order = np.argsort(steps[row][decoded], kind="stable")
        assert (np.diff(passes[row][decoded][order]) >= 0).all(), "a later step in an earlier pass"


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.REFERENCES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafting_changes_no_bit(name, drafter):
    accepted = 0
    for seed in range(4):
        expected, mine = plain(name, seed), drafted(name, seed, drafter)
        check_same_bits(mine, expected)
        check_accounting(mine)
        assert (mine.passes <= expected.passes).all()
        accepted += mine.accepted.sum()
    # Where a step commits two positions, only the chain drafts what can come true.
    assert accepted or (name == "pairs" and drafter != "chain"), "no draft was ever used"


@pytest.mark.slow
def test_the_oracle_saves_the_most():
    saved = {
        drafter: sum(drafted("sampled", seed, drafter).accepted.sum() for seed in range(4))
        for drafter in DRAFTERS
    }
    assert saved["oracle"] == max(saved.values()) > saved["random"] > 0


@pytest.mark.slow
def test_drafting_changes_no_bit_in_bfloat16():
    target = tiny.target(dtype=jnp.bfloat16)
    requests, config = tiny.requests(), tiny.REFERENCES["greedy"]
    expected = jax.device_get(decode(target, *requests, config))
    config = dataclasses.replace(config, budget=config.reference_shape, reference_shape=0)
    mine = jax.device_get(decode(target, *requests, config, Chain()))
    check_same_bits(mine, expected)
    check_accounting(mine)
    assert mine.accepted.any()
    assert (expected.tokens != plain("greedy", 0).tokens).any(), "as float32: not bfloat16"


def row_of(result, row):
    return jax.tree.map(lambda x: x[row], result)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_rows_do_not_see_each_other(name):
    prompts, lengths, keys = tiny.requests()
    expected = plain(name, 0)
    config, order = tiny.REFERENCES[name], np.array([4, 2, 5, 0, 1, 3])
    moved = jax.device_get(decode(TARGET(), prompts[order], lengths[order], keys[order], config))
    check_same_bits(moved, jax.tree.map(lambda x: x[order], expected))
    # Every row among strangers, with junk behind its prompt; strangers end at other times.
    for row in range(len(lengths)):
        other = tiny.requests(20 + row)
        pairs = zip(other[1:], (lengths, keys), strict=True)
        mixed = [jnp.where(jnp.arange(6) == row, mine, theirs) for theirs, mine in pairs]
        known = jnp.where(jnp.arange(11) < lengths[row], prompts[row], other[0][row])
        mixed = (other[0].at[row].set(known), *mixed)
        result = jax.device_get(decode(TARGET(), *mixed, config))
        assert (np.delete(result.tokens, row, 0) != np.delete(expected.tokens, row, 0)).any()
        check_same_bits(row_of(result, row), row_of(expected, row))


def test_a_row_alone():
    prompts, lengths, keys = tiny.requests()
    expected = plain("greedy", 0)
    for row in range(len(lengths)):
        alone = (prompts[row : row + 1], lengths[row : row + 1], keys[row : row + 1])
        result = jax.device_get(decode(TARGET(), *alone, tiny.REFERENCES["greedy"]))
        np.testing.assert_array_equal(result.tokens[0], expected.tokens[row])
        np.testing.assert_array_equal(result.trace.step[0], expected.trace.step[row])


def test_sampled_texts_follow_the_law_of_the_decoder():
    """Chi-square over all texts of two tokens; their exact law is enumerated."""
    config = TargetConfig(
        vocab_size=6, num_token_ids=5, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=4, intermediate_size=8, block_length=2, mask_id=4, eos_ids=(), pad_id=0,
    )  # fmt: skip
    target = tiny.target(config, seed=3)
    target = target._replace(params=target.params | {"head": 0.4 * target.params["head"]})
    prompt, draws = [1, 2], 4000

    def probs(*block):
        logits = np.asarray(reference._forward(target, jnp.array([*prompt, *block])), np.float64)
        weight = np.exp(logits[2:, :4])
        return weight / weight.sum(axis=-1, keepdims=True)

    law = np.zeros((4, 4))
    first = probs(4, 4)
    for a, b in itertools.product(range(4), repeat=2):
        together = first[0, a] * first[1, b]
        # The more confident position is committed, the other one drawn afresh.
        if first[0, a] >= first[1, b]:
            law[a] += together * probs(a, 4)[1]
        else:
            law[:, b] += together * probs(4, b)[0]
    assert math.isclose(law.sum(), 1) and law.min() * draws > 5

    result = jax.device_get(
        decode(
            target,
            jnp.broadcast_to(jnp.array(prompt), (draws, 2)),
            jnp.full(draws, 2),
            noise.request_keys(17, draws),
            DecodeConfig(max_new_tokens=2, budget=3, sampling=tiny.WARM, num_top=4),
            ConfidenceTree(),
        )
    )
    assert 0 < result.accepted.sum() < draws, "both outcomes of a draft must be in the sample"
    counts = np.zeros((4, 4))
    np.add.at(counts, (result.tokens[:, 2], result.tokens[:, 3]), 1)
    assert scipy.stats.chisquare(counts.ravel(), draws * law.ravel()).pvalue > 1e-3
    # The test has power: drawing both tokens at once has another law.
    once = draws * np.outer(first[0], first[1]).ravel()
    assert scipy.stats.chisquare(counts.ravel(), once).pvalue < 1e-6
