"""Attention over nodes and doubled sequences against explicit masks and plain loops."""

import jax
import jax.numpy as jnp
import numpy as np

from spot_jax.models import attention


def brute_force(query, key, value, visible):
    """Softmax attention of one head by loops: query `[T, K]`, key and value `[S, K]`."""
    out = np.zeros_like(query)
    for t in range(len(query)):
        seen = np.flatnonzero(visible[t])
        score = np.array([query[t] @ key[s] for s in seen]) / np.sqrt(query.shape[1])
        weight = np.exp(score - score.max())
        out[t] = (weight / weight.sum()) @ value[seen]
    return out


def normal(seed, *shape):
    return np.asarray(jax.random.normal(jax.random.key(seed), shape))


def test_nodes_see_their_prefix_their_clean_parent_and_themselves():
    rows, slots, heads, groups, length, width, capacity = 2, 3, 4, 2, 4, 8, 12
    query = normal(0, rows, slots, heads, length, width)
    key, value = (
        normal(1, rows, slots, groups, length, width),
        normal(2, rows, slots, groups, length, width),
    )
    memory = tuple(jnp.asarray(normal(s, rows, groups, capacity, width)) for s in (3, 4))
    prefix, parents = np.array([4, 8]), np.array([[-1, 0, 0], [-1, -1, 1]])
    attend = attention.attend_nodes(
        jnp.asarray(prefix), jnp.asarray(parents), jnp.ones((1, 1, 1), bool)
    )
    out, kept = jax.jit(attend)(*map(jnp.asarray, (query, key, value)), memory)
    for b in range(rows):
        for n in range(slots):
            for h in range(heads):
                g, p = h // (heads // groups), parents[b, n]
                parts = [(memory[0][b, g, : prefix[b]], memory[1][b, g, : prefix[b]])]
                parts += [(key[b, n, g], value[b, n, g])]
                parts += [(key[b, p, g], value[b, p, g])] if p >= 0 else []
                keys, values = (np.concatenate(x) for x in zip(*parts, strict=True))
                expected = brute_force(
                    query[b, n, h], keys, values, np.ones((length, len(keys)), bool)
                )
                np.testing.assert_allclose(out[b, n, h], expected, atol=1e-5)
    np.testing.assert_array_equal(kept[0], key[:, 0])
    np.testing.assert_array_equal(kept[1], value[:, 0])


def test_nodes_of_several_blocks_see_the_clean_blocks_between():
    rows, slots, heads, groups, length, width, capacity = 2, 5, 4, 2, 3, 8, 6
    query = normal(0, rows, slots, heads, length, width)
    key, value = (normal(s, rows, slots, groups, length, width) for s in (1, 2))
    memory = tuple(jnp.asarray(normal(s, rows, groups, capacity, width)) for s in (3, 4))
    prefix, clean = np.array([3, 6]), np.array([[0, 2], [-1, 4]])
    seen = np.random.default_rng(5).random((rows, slots, 2)) < 0.5
    seen[1, :, 0] = False
    attend = attention.attend_blocks(*map(jnp.asarray, (prefix, clean, seen)))
    out, kept = jax.jit(attend)(*map(jnp.asarray, (query, key, value)), memory)
    for b in range(rows):
        for n in range(slots):
            for h in range(heads):
                g = h // (heads // groups)
                parts = [(memory[0][b, g, : prefix[b]], memory[1][b, g, : prefix[b]])]
                parts += [(key[b, n, g], value[b, n, g])]
                parts += [(key[b, c, g], value[b, c, g]) for c in clean[b][seen[b, n]]]
                keys, values = (np.concatenate(x) for x in zip(*parts, strict=True))
                expected = brute_force(
                    query[b, n, h], keys, values, np.ones((length, len(keys)), bool)
                )
                np.testing.assert_allclose(out[b, n, h], expected, atol=1e-5)
    for mine, of_slots in zip(kept, (key, value), strict=True):
        np.testing.assert_array_equal(mine[0], of_slots[0, [0, 2]])
        np.testing.assert_array_equal(mine[1, 1], of_slots[1, 4])


def test_doubled_sequences_follow_the_block_diffusion_mask():
    block, length, heads, groups, width = 2, 6, 2, 1, 4
    visible = np.array(
        [
            # noisy half     clean half
            [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
            [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
        ],
        bool,
    )
    query = normal(0, 1, heads, 2 * length, width)
    key, value = normal(1, 1, groups, 2 * length, width), normal(2, 1, groups, 2 * length, width)
    attend = jax.jit(attention.attend_doubled(block, length))
    out, _ = attend(*map(jnp.asarray, (query, key, value)), None)
    for h in range(heads):
        expected = brute_force(query[0, h], key[0, 0], value[0, 0], visible)
        np.testing.assert_allclose(out[0, h], expected, atol=1e-5)


def test_block_causal_by_hand():
    positions = jnp.arange(5)
    assert attention.block_causal(positions, positions, 2).astype(int).tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
