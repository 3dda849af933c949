"""Full attention, the anchored grid, frozen keys, shifted logits and the hand-over between blocks:
each plain decoder against its slow twin, and drafting against each plain decoder."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax.commit import Threshold, TopN
from spot_jax.config import Experts, Sampling
from spot_jax.decode import DecodeConfig, decode
from spot_jax.rules import Factor, Release, SubBlocks
from tests import reference, tiny
from tests.test_decode import check_rows
from tests.test_exact import (
    DRAFTERS,
    AnyOf,
    check_accounting,
    check_same_bits,
    check_same_path,
)

FULL = dataclasses.replace(tiny.CONFIG, attention="full", grid="anchored")
SHIFTED = dataclasses.replace(FULL, shift=True)
HANDED = dataclasses.replace(tiny.CONFIG, shift=True, hand_over=True)
MIXED = dataclasses.replace(
    tiny.CONFIG,
    num_layers=3,
    rotary_dim=4,
    qkv_bias=True,
    experts=Experts(
        num_experts=6, top_k=2, intermediate_size=8, router="sigmoid", num_groups=3, top_groups=2,
        scale=1.5, bias=True, shared_size=8, first_dense=1,
    ),
)  # fmt: skip
RAW = Sampling(temperature=1.0, confidence="raw")
TARGET = functools.cache(tiny.target)


def plan(**changes):
    # Ten tokens end in the middle of a block of four, on either grid.
    return DecodeConfig(**{"max_new_tokens": 10, "num_top": 8, "reference_shape": 4} | changes)


CASES = {
    "llada": (FULL, plan()),
    "llada sampled": (FULL, plan(sampling=RAW, rule=TopN((2, 1, 1)))),
    "llada dual": (FULL, plan(sampling=tiny.WARM, rule=Factor(1.5), cache="dual")),
    "dream": (SHIFTED, plan(rule=TopN(score="entropy"))),
    "dream positions drawn": (
        SHIFTED,
        plan(sampling=tiny.WARM, rule=TopN(score="margin", order_temperature=0.3)),
    ),
    "dream origin": (SHIFTED, plan(sampling=tiny.WARM, rule=Release(6))),
    "dream dual": (SHIFTED, plan(rule=TopN(score="margin"), cache="dual")),
    "experts": (MIXED, plan()),
    "experts sampled": (MIXED, plan(sampling=tiny.WARM)),
    "handed": (HANDED, plan(rule=SubBlocks(Threshold(0.6), 2))),
    "handed sampled": (HANDED, plan(sampling=tiny.WARM, rule=SubBlocks(TopN(), 2))),
}
# Steps commit several positions: the trees, which draft single commits, may find none of them.
SETS = ("llada sampled", "llada dual", "dream origin", "handed")


@functools.cache
def plain(name, seed):
    config, decoding = CASES[name]
    return jax.device_get(decode(TARGET(config), *tiny.requests(seed), decoding))


@functools.cache
def drafted(name, seed, drafter):
    config, decoding = CASES[name]
    decoding = dataclasses.replace(decoding, budget=4, reference_shape=0)
    any_of = AnyOf(tiny.drafters(plain(name, seed).trace.step), jnp.array(DRAFTERS.index(drafter)))
    return jax.device_get(decode(TARGET(config), *tiny.requests(seed), decoding, any_of))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_the_slow_twin(name):
    config, decoding = CASES[name]
    for seed in range(2):
        check_rows(plain(name, seed), tiny.requests(seed), decoding, TARGET(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_drafting_changes_nothing(name):
    used = {}
    for drafter in DRAFTERS:
        used[drafter] = 0
        for seed in range(2):
            expected, mine = plain(name, seed), drafted(name, seed, drafter)
            check_same_path(mine, expected)
            check_same_bits(mine, drafted(name, seed, "none"))
            check_accounting(mine)
            used[drafter] += mine.accepted.sum()
    assert used.pop("none") == 0
    assert used["chain"] > 0, "the chain follows any rule"
    if name not in SETS:
        assert used["oracle"] > 0 and used["oracle"] >= used["random"], "the true order saves most"


@pytest.mark.parametrize("name", ["llada", "dream dual", "handed", "experts"])
def test_rows_do_not_see_each_other(name):
    config, decoding = CASES[name]
    prompts, lengths, keys = tiny.requests()
    expected, order = plain(name, 0), np.array([4, 2, 5, 0, 1, 3])
    moved = jax.device_get(
        decode(TARGET(config), prompts[order], lengths[order], keys[order], decoding)
    )
    check_same_bits(moved, jax.tree.map(lambda x: x[order], expected))


def test_each_switch_changes_the_text():
    texts = {}
    for config in (tiny.CONFIG, FULL, SHIFTED, HANDED):
        result = jax.device_get(decode(TARGET(config), *tiny.requests(), plan()))
        texts[config] = [
            result.tokens[row, n : n + 10].tolist() for row, n in enumerate(tiny.LENGTHS)
        ]
    assert len({str(text) for text in texts.values()}) == 4
    exact, frozen = (
        jax.device_get(decode(TARGET(SHIFTED), *tiny.requests(), plan(cache=cache)))
        for cache in ("none", "dual")
    )
    # In the step that opens a block nothing is stale yet.
    first = exact.trace.step == 0
    np.testing.assert_array_equal(first, frozen.trace.step == 0)
    np.testing.assert_array_equal(exact.tokens[first], frozen.tokens[first])
    assert (exact.tokens != frozen.tokens).any()


@pytest.mark.parametrize(
    ("config", "cache", "message"),
    [
        (tiny.CONFIG, "dual", "cache 'dual' does not fit block_causal attention"),
        (tiny.CONFIG, "none", "cache 'none' does not fit block_causal attention"),
        (FULL, "prefix", "cache 'prefix' does not fit full attention"),
    ],
)
def test_caches_that_do_not_fit(config, cache, message):
    with pytest.raises(ValueError, match=message):
        decode(TARGET(config), *tiny.requests(), plan(cache=cache))


def test_a_first_token_is_handed_over_greedily():
    """A prompt of whole blocks has its first token from its last row, at any temperature."""
    config, decoding = CASES["handed sampled"]
    row = tiny.LENGTHS.index(8)
    prompts, _, keys = tiny.requests()
    logits = reference._forward(TARGET(config), prompts[row, :8].tolist())[-1]
    logits[[config.mask_id, *range(config.num_token_ids, config.vocab_size)]] = -np.inf
    for seed in range(3):
        _, _, keys = tiny.requests(seed)
        result = jax.device_get(
            decode(TARGET(config), prompts[row : row + 1, :8], jnp.array([8]), keys[:1], decoding)
        )
        assert result.trace.step[0, 8] == 0
        token = int(np.argmax(logits))
        assert result.tokens[0, 8] == token or (token in config.eos_ids and not result.lengths[0])
