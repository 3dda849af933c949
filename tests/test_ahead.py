"""Look-ahead across blocks: plain decoding's path in fewer passes, wherever rows end."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from spot_jax.commit import Rule, Threshold, TopN
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig, decode
from spot_jax.draft import Chain, ConfidenceTree
from tests import tiny
from tests.test_exact import DRAFTERS, AnyOf, check_accounting, check_same_path
from tests.test_grids import FULL, HANDED

TARGET = functools.cache(tiny.target)


class Case(NamedTuple):
    length: int
    budget: int
    sampling: Sampling = tiny.COLD
    rule: Rule = TopN()


CASES = {
    "2 at 16": Case(2, 16),
    "4 at 2": Case(4, 2),
    "4 at 8": Case(4, 8, tiny.WARM),
    "8 at 16": Case(8, 16, tiny.WARM),
    "pairs at 8": Case(4, 8, tiny.WARM, TopN(2)),
    "threshold at 8": Case(8, 8, tiny.COLD, Threshold(0.5)),
}


def target_of(case: Case, closeness: float = 1.0):
    """A target whose readings depend the less on other positions, the smaller `closeness`."""
    target = TARGET(dataclasses.replace(tiny.CONFIG, block_length=case.length))
    outputs = {"layers_o": closeness * target.params["layers_o"]}
    return target._replace(params=target.params | outputs)


def plan(case: Case, **changes):
    # Fourteen tokens end everywhere in a block of two, four and eight.
    config = DecodeConfig(max_new_tokens=14, num_top=8, sampling=case.sampling, rule=case.rule)
    return dataclasses.replace(config, **changes)


@functools.cache
def plain(case: Case, seed: int, closeness: float = 1.0):
    target = target_of(case, closeness)
    return jax.device_get(decode(target, *tiny.requests(seed), plan(case)))


def drafted(case: Case, seed: int, drafter: str, closeness: float = 1.0, look_ahead=True):
    config = plan(case, budget=case.budget, look_ahead=look_ahead)
    step = plain(case, seed, closeness).trace.step
    any_of = AnyOf(tiny.drafters(step), jnp.array(DRAFTERS.index(drafter)))
    target = target_of(case, closeness)
    return jax.device_get(decode(target, *tiny.requests(seed), config, any_of))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_plain_decoding(name):
    case, ended, crossed = CASES[name], set(), 0
    for closeness in (1.0, 0.1):
        for seed in range(2):
            expected = plain(case, seed, closeness)
            for drafter in DRAFTERS:
                mine = drafted(case, seed, drafter, closeness)
                check_same_path(mine, expected)
                np.testing.assert_allclose(
                    mine.trace.confidence, expected.trace.confidence, atol=1e-4
                )
                check_accounting(mine)
                assert (mine.passes <= expected.passes).all()
                crossed += crossings(mine, case.length)
            ends = np.array(tiny.LENGTHS) + expected.lengths
            ended |= {
                (bool(s), int(e) % case.length) for s, e in zip(expected.stopped, ends, strict=True)
            }
    assert (crossed > 0) == (case.budget > 2)
    if case.sampling.temperature:
        assert {stopped for stopped, _ in ended} == {True, False}


def crossings(result, length: int) -> int:
    """Passes that commit in two blocks."""
    block = np.arange(result.tokens.shape[1]) // length
    return sum(
        len(set(block[row == number])) > 1
        for row in result.trace.pass_
        for number in range(row.max() + 1)
    )


def equal_logits(length: int):
    """A target that finds all tokens equally likely: each tie goes to the lowest id and position,
    in every program, so that every draft with the right order is right."""
    target = TARGET(dataclasses.replace(tiny.CONFIG, block_length=length))
    return target._replace(params=jax.tree.map(jnp.zeros_like, target.params))


def test_a_predictable_text_takes_more_steps_a_pass_than_a_block_has():
    """Counted by hand: prompts of 1 and 4 tokens, and 15 new ones in blocks of 4."""
    target, config = equal_logits(4), DecodeConfig(max_new_tokens=15, num_top=8, budget=8)
    requests = tiny.requests(0, lengths=(1, 4))
    mine, without = (
        jax.device_get(
            decode(target, *requests, dataclasses.replace(config, look_ahead=on), Chain())
        )
        for on in (True, False)
    )
    # The first pass has nothing to draft from, but reads the next block blindly. Each later one
    # spends 4 of its 8 slots on the guessed texts of two blocks and the starts behind them.
    steps = [np.bincount(row[row >= 0]).tolist() for row in mine.trace.pass_]
    assert steps == [[1, 5, 6, 3], [1, 5, 5, 4]]
    # Without, every block takes one pass for its start and one for the rest.
    np.testing.assert_array_equal(without.passes, [8, 8])
    for result in (mine, without):
        np.testing.assert_array_equal(result.trace.step[0, 1:16], np.arange(15))
    assert crossings(mine, 4) and not crossings(without, 4)


def test_rows_end_where_plain_ones_do():
    """Many tokens end a text here, so that it ends in every place of a block."""
    config = dataclasses.replace(tiny.CONFIG, eos_ids=tuple(range(3, 9)))
    target = TARGET(config)._replace(params=target_of(Case(4, 8), 0.2).params)
    decoding, seen = plan(Case(4, 8, tiny.WARM)), set()
    ahead = dataclasses.replace(decoding, budget=8, look_ahead=True)
    for seed in range(12):
        requests = tiny.requests(seed)
        expected = jax.device_get(decode(target, *requests, decoding))
        mine = jax.device_get(decode(target, *requests, ahead, ConfidenceTree()))
        check_same_path(mine, expected)
        check_accounting(mine)
        for row, length in enumerate(tiny.LENGTHS):
            end = int(length + mine.lengths[row])
            place = end % 4 if mine.stopped[row] else "limit"
            first = mine.trace.pass_[row, end // 4 * 4 :][:4]
            last_pass = mine.trace.pass_[row, : end // 4 * 4].max(initial=-1)
            seen.add((place, last_pass == mine.passes[row] - 1 and last_pass in first))
    assert {place for place, _ in seen} == {0, 1, 2, 3, "limit"}
    assert {crossed for _, crossed in seen} == {True, False}, (
        "no row ended in the pass of a crossing"
    )


@pytest.mark.parametrize(
    ("config", "drafter", "message"),
    [
        (FULL, Chain(), "look_ahead does not fit full attention"),
        (HANDED, Chain(), "look_ahead does not fit hand-over between blocks"),
        (tiny.CONFIG, None, "look_ahead needs a drafter"),
    ],
)
def test_targets_that_do_not_fit(config, drafter, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    decoding = DecodeConfig(budget=1 if drafter is None else 4, look_ahead=True)
    with pytest.raises(ValueError, match=message):
        decode(TARGET(config), *tiny.requests(), decoding, drafter)
