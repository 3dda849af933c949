"""Plain decoding against its slow twin, and where and how rows end."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from spot_jax import noise
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig, _decode, decode
from spot_jax.draft import Chain
from tests import reference, tiny

TARGET = functools.cache(tiny.target)


def run(config, seed=0, requests=None):
    return jax.device_get(decode(TARGET(), *(requests or tiny.requests(seed)), config))


def short_requests(seed=0):
    """Of less than a block, so that there is nothing to prefill."""
    prompts, _, keys = tiny.requests(seed, lengths=(1, 2, 3))
    return prompts[:, :3], jnp.array([1, 2, 3]), keys


def check_rows(result, requests, config, target=None):
    """Every row against the slow twin, which decodes it alone and without a cache."""
    target = target or TARGET()
    prompts, lengths, keys = requests
    width = result.tokens.shape[1]
    for row, length in enumerate(lengths.tolist()):
        prompt = prompts[row, :length].tolist()
        expected = reference.decode(target, prompt, keys[row], config, width)
        assert result.tokens[row].tolist() == expected.tokens
        assert result.trace.step[row].tolist() == expected.step
        assert result.lengths[row] == expected.length
        assert result.stopped[row] == expected.stopped
        assert result.steps[row] == expected.steps
        np.testing.assert_allclose(result.trace.confidence[row], expected.confidence, atol=1e-4)


@pytest.mark.parametrize("name", tiny.REFERENCES)
def test_equals_the_slow_twin(name):
    for seed in range(3):
        check_rows(run(tiny.REFERENCES[name], seed), tiny.requests(seed), tiny.REFERENCES[name])


def test_ends_wherever_the_twin_ends():
    seen = set()
    for seed in range(8):
        requests, result = tiny.requests(seed), run(tiny.PLAIN, seed)
        check_rows(result, requests, tiny.PLAIN)
        _, lengths, keys = requests
        for row, length in enumerate(lengths.tolist()):
            end = length + int(result.lengths[row])
            assert (result.tokens[row, end:] == tiny.PAD).all()
            answer = result.tokens[row, length:end]
            assert not np.isin(answer, [*tiny.EOS, tiny.MASK]).any()
            if not result.stopped[row]:
                seen.add("limit")
                assert result.lengths[row] == 10
                continue
            seen.add("first token" if end == length else "later")
            seen.add(f"place {end % 4} of a block")
            seen.add("others still open" if (result.trace.step[row, end:] >= 0).any() else "")
    assert {"limit", "first token", "later", *(f"place {i} of a block" for i in range(4))} <= seen


def test_accounting_of_plain_decoding():
    for seed in range(3):
        result = run(tiny.PLAIN, seed)
        np.testing.assert_array_equal(result.passes, result.steps)
        np.testing.assert_array_equal(result.trace.pass_, result.trace.step)
        assert not result.drafted.any() and not result.accepted.any()
        for row, length in enumerate(tiny.LENGTHS):
            # One commit a step, in steps without gaps; prompts are not decoded.
            steps = result.trace.step[row]
            assert (steps[:length] == -1).all()
            assert sorted(steps[steps >= 0]) == list(range(result.steps[row]))


@pytest.mark.parametrize("num_new", [1, 7, 8, 9])
def test_length_limit_is_exact(num_new):
    config = DecodeConfig(max_new_tokens=num_new, num_top=8, stop_at_eos=False, reference_shape=2)
    seen = set()
    for seed in range(12):
        requests = short_requests(seed)
        result = run(config, requests=requests)
        assert (result.lengths == num_new).all() and not result.stopped.any()
        seen |= set(result.tokens.flatten().tolist())
        if seed < 3:
            check_rows(result, requests, config)
    assert seen & set(tiny.EOS), "no text went on behind an end-of-text token"


def test_literal_mask_tokens_in_the_prompt_stay():
    prompts, lengths, keys = tiny.requests(1)
    prompts = prompts.at[:, ::2].set(tiny.MASK)
    prompts = prompts.at[5].set(tiny.MASK).at[2, 0].set(tiny.EOS[0])
    requests = (prompts, lengths, keys)
    result = run(tiny.PLAIN, requests=requests)
    for row, length in enumerate(tiny.LENGTHS):
        np.testing.assert_array_equal(result.tokens[row, :length], prompts[row, :length])
        assert not (result.tokens[row, length:] == tiny.MASK).any()
    check_rows(result, requests, tiny.PLAIN)


def test_prompts_longer_than_a_chunk_of_prefill(monkeypatch):
    monkeypatch.setattr("spot_jax.forward.PREFILL_CHUNK", 9)  # two blocks of 4 a time
    requests = tiny.requests(2, lengths=(11, 10, 2))
    config = DecodeConfig(max_new_tokens=5, num_top=8, reference_shape=2)
    check_rows(run(config, requests=requests), requests, config)


def test_temperature_0_uses_no_keys():
    prompts, lengths, keys = tiny.requests()
    other = noise.request_keys(99, len(lengths))
    jax.tree.map(
        np.testing.assert_array_equal,
        *(run(tiny.REFERENCES["greedy"], requests=(prompts, lengths, k)) for k in (keys, other)),
    )


def test_samples_of_one_prompt_differ():
    prompts, lengths, _ = tiny.requests(0, lengths=(6,) * 6)
    prompts = jnp.broadcast_to(prompts[:1], prompts.shape)
    result = run(tiny.PLAIN, requests=(prompts, lengths, noise.request_keys(5, 6)))
    assert len({tuple(row) for row in result.tokens.tolist()}) == 6


def test_compiles_once():
    run(tiny.PLAIN, 0)
    compiled = _decode._cache_size()
    equal = DecodeConfig(max_new_tokens=10, sampling=Sampling(temperature=1.0), num_top=8)
    run(equal, 1)
    run(equal, requests=tiny.requests(2, lengths=(11, 1, 1, 2, 5, 7)))
    assert _decode._cache_size() == compiled


def test_inside_the_callers_jit(strict):
    config = DecodeConfig(max_new_tokens=8, num_top=8, stop_at_eos=False, reference_shape=2)

    @jax.jit
    def tokens_and_twice(target, prompts, lengths, keys):
        result = decode(target, prompts, lengths, keys, config)
        return result.tokens, 2 * result.steps

    tokens, twice = tokens_and_twice(TARGET(), *short_requests())
    plain = run(config, requests=short_requests())
    np.testing.assert_array_equal(tokens, plain.tokens)
    np.testing.assert_array_equal(twice, 2 * plain.steps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": jnp.zeros(6, int)}, r"prompts must be \[B, P\] and prompt_lengths \[B\]"),
        ({"lengths": jnp.ones(5, int)}, r"got \(6, 11\) and \(5,\)"),
        ({"keys": noise.request_keys(0, 5)}, r"noise_keys must be \[6\] typed keys"),
        ({"lengths": jnp.array([1, 1, 0, 1, 1, 1])}, "row 2: prompt length 0 is not in 1..11"),
        ({"lengths": jnp.array([1, 1, 1, 1, 1, 12])}, "row 5: prompt length 12 is not in 1..11"),
        ({"max_new_tokens": 60}, "row 3: prompt of 6 tokens and 60 new ones exceed the 64 pos"),
        ({"budget": 4}, "budget 4 without a drafter drafts nothing: use budget 1"),
        ({"drafter": Chain()}, "a drafter needs a budget of 2 or more"),
        ({"drafter": Chain(), "budget": 2, "reference_shape": 2}, "leave the drafter out"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"budget": 0}, "budget must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"num_top": 1}, "num_top must be at least 2, got 1"),
        ({"reference_shape": -1}, "reference_shape must be 0 or more, got -1"),
    ],
)
def test_errors_say_what_does_not_fit(changes, message, monkeypatch):
    # Users do not run with the type checker of the tests.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    prompts, lengths, keys = tiny.requests()
    arguments = {"prompts": prompts, "lengths": lengths, "keys": keys, "drafter": None} | changes
    given = [arguments.pop(name) for name in ("prompts", "lengths", "keys", "drafter")]
    with pytest.raises(ValueError, match=message):
        config = DecodeConfig(**{"max_new_tokens": 3} | arguments)
        decode(TARGET(), *given[:3], config, given[3])
