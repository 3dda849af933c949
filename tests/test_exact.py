"""Drafting changes no bit (L1), rows do not see each other, and samples have the right law (L3)."""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from spot_jax import noise
from spot_jax.config import TargetConfig
from spot_jax.decode import DecodeConfig, decode
from spot_jax.draft import Chain, ConfidenceTree, Drafter
from spot_jax.draft.tree import empty_tree
from tests import reference, tiny

TARGET = functools.cache(tiny.target)
DRAFTERS = ("none", "chain", "confidence", "random", "spot", "oracle", "ranks", "pruned")


class AnyOf(NamedTuple):
    """Several drafters, and none at all, in one program."""

    drafters: tuple[Drafter, ...]
    which: jax.Array

    def __call__(self, context, budget):
        calls = [functools.partial(_call, drafter, budget) for drafter in self.drafters]
        calls = [lambda context: empty_tree(context.root, budget), *calls]
        return jax.lax.switch(self.which, calls, context)


def _call(drafter, budget, context):
    return drafter(context, budget)


@functools.cache
def plain(name, seed):
    return jax.device_get(decode(TARGET(), *tiny.requests(seed), tiny.REFERENCES[name]))


@functools.cache
def drafted(name, seed, drafter):
    """Decodes with one of `DRAFTERS` at the budget that `plain` has slots for."""
    config = tiny.REFERENCES[name]
    config = dataclasses.replace(config, budget=config.reference_shape, reference_shape=0)
    any_of = AnyOf(tiny.drafters(plain(name, seed).trace.step), jnp.array(DRAFTERS.index(drafter)))
    return jax.device_get(decode(TARGET(), *tiny.requests(seed), config, any_of))


def check_same_path(mine, expected):
    """Tokens, where rows end, and which step committed what."""
    for name in ("tokens", "lengths", "stopped", "steps"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(expected, name))
    np.testing.assert_array_equal(mine.trace.step, expected.trace.step)


def check_same_bits(mine, expected):
    check_same_path(mine, expected)
    bits = (x.trace.confidence.view(np.int32) for x in (mine, expected))
    np.testing.assert_array_equal(*bits)


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
def test_drafting_changes_nothing(name, drafter):
    accepted = 0
    for seed in range(4):
        expected, mine = plain(name, seed), drafted(name, seed, drafter)
        check_same_path(mine, expected)
        # Another program than that of `plain`, in which a rounding may differ; the same program
        # as without drafts, in which none does.
        np.testing.assert_allclose(mine.trace.confidence, expected.trace.confidence, atol=1e-5)
        check_same_bits(mine, drafted(name, seed, "none"))
        check_accounting(mine)
        assert (mine.passes <= expected.passes).all()
        accepted += mine.accepted.sum()
    # Pairs complete a block of four in two steps, and the last one needs no check.
    drafts = drafter != "none" and name != "pairs"
    assert (accepted > 0) == drafts, "no draft was ever used"


@pytest.mark.slow
def test_a_better_order_saves_more():
    saved = {
        drafter: sum(drafted("sampled", seed, drafter).accepted.sum() for seed in range(4))
        for drafter in DRAFTERS
    }
    assert saved["oracle"] > max(saved["random"], saved["spot"]) > 0


@pytest.mark.slow
def test_drafting_changes_nothing_in_bfloat16():
    target = tiny.target(dtype=jnp.bfloat16)
    requests, config = tiny.requests(), tiny.REFERENCES["greedy"]
    config = dataclasses.replace(config, budget=config.reference_shape, reference_shape=0)
    expected, mine = (
        jax.device_get(decode(target, *requests, config, AnyOf((Chain(),), jnp.array(which))))
        for which in (0, 1)
    )
    check_same_bits(mine, expected)
    check_accounting(mine)
    assert mine.accepted.any() and not expected.accepted.any()
    exact = plain("greedy", 0).trace.confidence
    assert np.abs(mine.trace.confidence - exact).max() > 1e-3, "as float32: not bfloat16"


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


def exact_law(target, prompt, at_once=False):
    """Probability of each text of a block, enumerated from the logits of its states."""
    config = target.config

    @functools.cache
    def law_of(block):
        masked = [i for i, token in enumerate(block) if token == config.mask_id]
        if not masked:
            return {block: 1.0}
        logits = np.asarray(reference._forward(target, jnp.array([*prompt, *block])), np.float64)
        weight = np.exp(logits[len(prompt) :, : config.mask_id])
        probs = weight / weight.sum(axis=-1, keepdims=True)
        law = Counter()
        for draws in itertools.product(range(config.mask_id), repeat=len(masked)):
            drawn = dict(zip(masked, draws, strict=True))
            together = math.prod(probs[i, token] for i, token in drawn.items())
            # The most confident position is committed, the others are drawn afresh.
            best = max(drawn, key=lambda i, p=probs, d=drawn: p[i, d[i]])
            keep = drawn if at_once else {best: drawn[best]}
            after = tuple(keep.get(i, token) for i, token in enumerate(block))
            for text, rest in law_of(after).items():
                law[text] += together * rest
        return law

    return law_of((config.mask_id,) * config.block_length)


def test_sampled_texts_follow_the_law_of_the_decoder():
    """Chi-square over all texts of a block of three positions and three tokens."""
    config = TargetConfig(
        vocab_size=5, num_token_ids=4, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=4, intermediate_size=8, block_length=3, mask_id=3, eos_ids=(), pad_id=0,
    )  # fmt: skip
    target = tiny.target(config, seed=17)
    target = target._replace(params=target.params | {"head": 0.25 * target.params["head"]})
    prompt, draws = (1, 2, 0), 4000
    law = exact_law(target, prompt)
    assert len(law) == 27 and math.isclose(sum(law.values()), 1) and min(law.values()) * draws > 5
    result = jax.device_get(
        decode(
            target,
            jnp.broadcast_to(jnp.array(prompt), (draws, 3)),
            jnp.full(draws, 3),
            noise.request_keys(17, draws),
            DecodeConfig(max_new_tokens=3, budget=3, sampling=tiny.WARM, num_top=3),
            ConfidenceTree(),
        )
    )
    assert 0 < result.accepted.sum() < draws, "both outcomes of a draft must be in the sample"
    texts = Counter(map(tuple, result.tokens[:, 3:].tolist()))
    counts = [texts[text] for text in law]
    assert sum(counts) == draws
    expected = [draws * p for p in law.values()]
    assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3
    # The test has power: three tokens drawn at once have another law.
    once = exact_law(target, prompt, at_once=True)
    assert scipy.stats.chisquare(counts, [draws * once[text] for text in law]).pvalue < 1e-6
