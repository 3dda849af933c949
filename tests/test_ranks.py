"""Rank formulas: their states, pruning, and the file that holds them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax import ranks_io
from spot_jax.checkpoint import CheckpointError
from spot_jax.commit import TopN
from spot_jax.config import Sampling
from spot_jax.decode import decode
from spot_jax.draft import RankOptions, make_ranks
from spot_jax.drafter_io import DrafterWarning
from spot_jax.rules import HandOver, SubBlocks
from spot_jax.state import NO_PARENT, Reading
from tests import reference, tiny
from tests.test_drafters import FIRST, KEYS, LENGTH, MASK, make_context, run, valid_states

A, B, C = (0, 0), (1, 0), (2, 0)
# Pairs of ranks that no state has (position 8, token 9), one that only the fuller row lacks, and
# one that completes a row of five.
FORMULAS = (
    ((A,),),
    ((A,), (B,)),
    ((B,),),
    ((A,), ((1, 1),)),
    ((A, B), (C,)),
    ((A,), (B,), ((8, 0),)),
    (((0, 9),),),
    (((5, 0),),),
    ((A,), (B,), (C,), ((3, 0),), ((4, 0),)),
    ((B,), (C,)),
    (((0, 2),), (B,)),
)
KEY_WORDS = [reference.key_words(key) for key in KEYS]


def shares(formulas):
    return [1 / (2 + i) for i in range(len(formulas))]


def twin(context, row, coupled):
    """The slow twin's states of a row; distributions are whole in a reading of `make_context`."""
    reading, key = context.reading, KEY_WORDS[row]
    probs, ids = np.asarray(reading.top_log_probs[row]), np.asarray(reading.top_tokens[row])
    tops = [
        [(float(x), int(v)) for x, v in zip(*pair, strict=True)]
        for pair in zip(probs, ids, strict=True)
    ]

    def draw(i, commits):
        noise = np.zeros(len(ids[i]))
        if context.sampling.temperature > 0:
            noise = reference.gumbel(key, FIRST + i, commits, ids[i])
        return [tops[i][j] for j in np.argsort(-(probs[i] + noise), kind="stable")]

    def score(readings, commits):
        return reference.scores(context.rule.score, readings, lambda i: 0.0)

    root = (context.root.tokens[row].tolist(), context.root.masked[row].tolist())
    return root, reference.rank_states(FORMULAS, coupled, root, tops, draw, score)


WARM = Sampling(temperature=1.0)


@pytest.mark.parametrize(
    ("sampling", "rule", "coupled", "prune", "budget"),
    [
        (Sampling(), TopN(), False, False, 12),
        (WARM, TopN(), True, False, 12),
        (WARM, TopN(), True, True, 5),
        (WARM, TopN(), False, True, 3),
        (WARM, TopN(2, "left_to_right"), True, False, 4),
        (Sampling(), TopN(score="margin"), False, True, 6),
    ],
)
def test_states_are_the_twins(sampling, rule, coupled, prune, budget, strict):
    context = make_context(sampling, rule)
    options = RankOptions(coupled=coupled, prune=prune)
    tree = run(make_ranks(FORMULAS, shares(FORMULAS), options), context, budget)
    for row in range(2):
        root, found = twin(context, row, coupled)
        if prune:
            kept = reference.prune(FORMULAS, [f and f[1] for f in found], budget - 1)
            found = [f if i in kept else None for i, f in enumerate(found)]
        expected, values = [root], [0.0]
        for share, node in zip(shares(FORMULAS), found, strict=True):
            if node and node[0] not in expected:
                expected.append(node[0])
                values.append(np.log(share))
        assert valid_states(tree, row) == expected[:budget]
        np.testing.assert_allclose(tree.log_value[row, : len(expected)], values[:budget], rtol=1e-6)
        if not prune and budget == 12:
            # Row 0 has six masked positions, row 1 five: there the last pair completes it.
            assert len(expected) == (10 if row == 0 else 8)
    assert tree.valid[2].tolist() == [True] + [False] * (budget - 1)


def test_a_hand_worked_block():
    """Position 2 is surest, then 0 and 1, equal: the lower first. Position 3 is known."""
    context = make_context()
    probs = jnp.log(jnp.array([[0.6, 0.3], [0.6, 0.4], [0.9, 0.1], [0.99, 0.01]]))
    top = jnp.array([[10, 11], [20, 21], [30, 31], [40, 41]])
    root = context.root._replace(
        tokens=jnp.array([[MASK, MASK, MASK, 7]]), masked=jnp.array([[True, True, True, False]])
    )
    doubt = jnp.log1p(-jnp.exp(probs[None, :, 0]))
    reading = Reading(top[None, :, 0], probs[None, :, 0], probs[None], top[None], doubt, doubt)
    context = context._replace(
        root=root,
        parent=root,
        reading=reading,
        fresh=jnp.array([True]),
        keys=KEYS[:1],
        positions=jnp.arange(4)[None],
    )
    formulas = [((A,),), ((A,), (B,)), ((A,), (C,)), (((0, 1),),), ((C,), (B,)), ((A,), (B,), (C,))]
    tree = run(make_ranks(formulas, shares(formulas)), context, 8)
    assert tree.valid[0].tolist() == [True] * 6 + [False] * 2
    assert tree.tokens[0, :6].tolist() == [
        [MASK, MASK, MASK, 7],
        [MASK, MASK, 30, 7],
        [10, MASK, 30, 7],
        [MASK, 20, 30, 7],
        [MASK, MASK, 31, 7],
        [10, 20, MASK, 7],
    ]
    assert tree.parent[0].tolist() == [NO_PARENT, 0, 1, 1, 0, 0, NO_PARENT, NO_PARENT]
    # Logs of the pairs: A 0.9, B and C 0.6, the other token of rank 0's position 0.1. Scores, as
    # geometric means: AB and AC (0.9 * 0.6)^(1/2) = 0.73; A with those children 0.79; BC 0.6 but
    # without a parent; (0, 1) alone 0.1.
    pruned = make_ranks(formulas, shares(formulas), RankOptions(prune=True))
    for budget, last in ((2, [[MASK, MASK, 30, 7]]), (3, [[10, MASK, 30, 7]])):
        tree = run(pruned, context, budget)
        assert tree.tokens[0, -1:].tolist() == last
    assert run(pruned, context, 5).tokens[0, 4].tolist() == [MASK, MASK, 31, 7]


def test_near_certainty_does_not_tie():
    """Probabilities that are all 1 in float32 still have an order."""
    context = make_context()
    doubt = jnp.array([1e-12, 1e-20, 1e-9, 1e-15, 1e-30, 1e-11, 1e-10, 1e-16], jnp.float32)
    confidence = jnp.broadcast_to(-doubt, (3, LENGTH))
    assert (jnp.exp(confidence) == 1).all()
    probs = context.reading.top_log_probs.at[..., 0].set(confidence)
    context = context._replace(reading=context.reading._replace(top_log_probs=probs))
    tree = run(tiny.ranks(formulas=[((A,),), ((B,),)]), context, 3)
    assert tree.masked[0].sum(axis=0).tolist() == [0, 2, 3, 0, 2, 3, 3, 3]


def test_equal_states_of_other_draws_are_one_node():
    """Positions whose draws differ from step to step: AB and BA may be two states, or one."""
    context = make_context(Sampling(temperature=1.0))
    # B then A, and each alternative of theirs: all meet in the states of the two positions.
    pairs = [((i, j), (1 - i, k)) for i in range(2) for j in range(6) for k in range(6)]
    formulas = [tuple((pair,) for pair in path) for path in pairs]
    tree = run(tiny.ranks(coupled=True, formulas=formulas), context, 80)
    for row in range(2):
        states = valid_states(tree, row)
        assert len({str(state) for state in states}) == len(states) == 37


@pytest.mark.parametrize("coupled", [False, True])
def test_only_positions_that_the_rule_may_commit_have_ranks(coupled):
    formulas = [((A,),), ((B,),), ((A,), (B,))]
    drafter = tiny.ranks(coupled=coupled, formulas=formulas)
    tree = run(drafter, make_context(rule=HandOver(TopN())), 4)
    # Row 1 has lost its first position: the others are free. Row 0 too, whose mask begins at 1.
    assert tree.valid[:2].sum(axis=1).tolist() == [4, 4]
    tree = run(drafter, make_context(rule=SubBlocks(TopN(), 4)), 4)
    # Row 0 may commit 1 and 2, row 1 position 3 alone.
    assert tree.valid[:2].sum(axis=1).tolist() == [4, 2]


def test_coupled_ranks_find_more_at_temperature():
    """Of a flat target's draws the likeliest token is rarely one; the coupled draw often is."""
    target, requests = tiny.target(), tiny.requests()
    config = dataclasses.replace(tiny.PLAIN, num_top=32, budget=4)
    formulas = [((A,),), ((B,),), ((A,), (B,))]
    accepted = [
        int(
            decode(
                target, *requests, config, tiny.ranks(coupled=c, formulas=formulas)
            ).accepted.sum()
        )
        for c in (False, True)
    ]
    assert accepted[1] > accepted[0]


ABOUT = {"targets": ["home"], "temperatures": [0.0, 1.0], "blocks": 50, "points": 1300}


def save(path, formulas=FORMULAS, **changes):
    options = RankOptions(coupled=True, prune=True)
    keys = {"method": "spiffy", "block_length": 32, "calibrated_on": ABOUT} | changes
    ranks_io.save_ranks(path, formulas, shares(formulas), options, **keys)


def test_what_was_saved_is_read(tmp_path):
    path = tmp_path / "ranks.json"
    save(path)
    loaded = ranks_io.load_ranks(path)
    expected = make_ranks(FORMULAS, shares(FORMULAS), RankOptions(coupled=True, prune=True))
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    assert loaded.options == expected.options
    assert json.loads(path.read_text())["calibrated_on"] == ABOUT
    assert list(tmp_path.iterdir()) == [path]
    with pytest.warns(DrafterWarning, match="blocks of 32 positions, the target's have 4"):
        ranks_io.load_ranks(path, tiny.CONFIG)
    ranks_io.load_ranks(path, tiny.CONFIG, allow_mismatch=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "spot"}, "kind 'spot' is not 'ranks'"),
        ({"format_version": 2}, "format_version 2 is not the supported version 1"),
        ({"method": ...}, "has no method"),
        ({"extra": 1}, "unknown key extra"),
        ({"coupled": 1}, "coupled has the unexpected value 1"),
        ({"calibrated_on": {**ABOUT, "blocks": "50"}}, r"calibrated_on\.blocks has the unexpected"),
        ({"block_length": 1}, "block_length 1 is not 2 or more"),
        ({"formulas": []}, "formulas must be 1 to 4095, found 0"),
        ({"formulas": [[]]}, "formula 0 must have the keys steps and share"),
        ({"share": 0}, r"formula 1 has the share 0, not in \(0, 1\]"),
        ({"steps": [[]]}, "formula 1 must have steps of at least one pair each"),
        ({"steps": [[[0, True]]]}, r"formula 1 holds \[0, True\], which is no pair of ranks"),
        ({"steps": [[[0, -1]]]}, r"formula 1 holds the ranks \[0, -1\]"),
        ({"steps": [[[32, 0]]]}, r"holds the ranks \[32, 0\], which blocks of 32 positions"),
        ({"steps": [[[0, 0]], [[0, 1]]]}, "formula 1 commits a position twice"),
        ({"steps": [[[i, 0] for i in range(32)]]}, "formula 1 completes the block"),
        ({"steps": [[[1, 0]], [[0, 0]]]}, "formula 2 is the same state as formula 1"),
    ],
)
def test_files_that_are_refused(tmp_path, change, message):
    path = tmp_path / "ranks.json"
    save(path, formulas=(((A,),), ((C,),), ((A,), (B,))))
    value = json.loads(path.read_text())
    inner = {name: change[name] for name in ("steps", "share") if name in change}
    value["formulas"][1] |= inner
    value |= {name: x for name, x in change.items() if name not in inner}
    path.write_text(json.dumps({name: x for name, x in value.items() if x is not ...}))
    with pytest.raises(CheckpointError, match=message) as error:
        ranks_io.load_ranks(path)
    assert str(error.value).startswith(f"{path}: ")


def test_files_that_cannot_be_written(tmp_path):
    with pytest.raises(CheckpointError, match="cannot write"):
        save(tmp_path / "absent" / "ranks.json")
    with pytest.raises(CheckpointError, match="formula 0 completes the block"):
        save(tmp_path / "ranks.json", formulas=(((A, B),),), block_length=2)
    assert not any(tmp_path.iterdir())
