"""`tools.gap`: why an accepted path ended, worked out by hand, and the reliability of values."""

import numpy as np
import pytest

from spot_jax.state import DraftTree
from tools import gap

TOKENS, ORDER = np.array([[7, 8, 9, 6]]), np.array([[-1, 2, 3, 4]])


def tree_of(*nodes, values=None):
    """A tree over the block 7 _ _ _ of nodes that commit {position: token}."""
    states = [{}, *nodes]
    tokens, masked = np.full((1, len(states), 4), 0), np.ones((1, len(states), 4), bool)
    tokens[..., 0], masked[..., 0] = 7, False
    for slot, commits in enumerate(states):
        for position, token in commits.items():
            tokens[0, slot, position], masked[0, slot, position] = token, False
    values = np.log([[1.0, *(values or [0.5] * len(nodes))]])
    valid = np.ones((1, len(states)), bool)
    return DraftTree(tokens, masked, np.zeros((1, len(states)), np.int32), valid, values)


@pytest.mark.parametrize(
    ("nodes", "budget", "cause", "came"),
    [
        ([{1: 8}, {1: 8, 2: 9}], 3, "end", [True, True]),
        ([{2: 9}, {1: 8}], 3, "order", [False, True]),
        ([{2: 9}, {1: 8}], 2, "budget", [False]),
        ([{1: 5}, {2: 9}], 3, "token", [False, False]),
        ([{1: 8}, {1: 8, 2: 5}], 3, "token", [True, False]),
        ([{1: 8}, {1: 8, 3: 6}], 3, "order", [True, False]),
    ],
)
def test_causes(nodes, budget, cause, came):
    found = gap.judge(tree_of(*nodes), TOKENS, ORDER, np.array([True]), budget)
    assert gap.CAUSES[found.cause[0]] == cause
    assert found.came.tolist() == [came]
    assert (found.promised == 0.5).all()


def test_rows_that_draft_nothing_do_not_count():
    found = gap.judge(tree_of({1: 8}), TOKENS, ORDER, np.array([False]), 2)
    assert found.cause[0] == -1 and not found.promised.any() and not found.came.any()


def test_reliability():
    promised = np.array([[0.05, 0.55, 0.58, 1.0], [0.0, 0.0, 0.52, 1.0]])
    came = np.array([[False, True, False, True], [False, False, True, True]])
    assert gap.reliability(promised, came) == [
        {"states": 1, "promised": 0.05, "came_true": 0.0},
        {"states": 3, "promised": pytest.approx(0.55), "came_true": pytest.approx(2 / 3)},
        {"states": 2, "promised": 1.0, "came_true": 1.0},
    ]
