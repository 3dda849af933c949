"""Many prompts in few shapes: answers that do not depend on the batch, counts, comparisons."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax import compare, convert, hf_config, noise
from spot_jax.commit import Threshold, TopN
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig
from spot_jax.draft import Chain
from spot_jax.generate import Answer, Batch, Stats, generate, plan_batches
from spot_jax.state import Trace
from tests import fixtures

CONFIG = DecodeConfig(max_new_tokens=10, budget=3, sampling=Sampling(temperature=1.0), num_top=8)
LENGTHS = (1, 3, 8, 5, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    config = {"num_hidden_layers": 1}
    fixtures.write_hf(directory, config=config, scale=0.3, tokenizer=False)
    return convert.load_target(directory)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(0)
    return [random.integers(0, 290, length).tolist() for length in LENGTHS]


def run(target, prompts, keys, **options):
    return generate(target, prompts, keys, CONFIG, Chain(), **options)


def test_batches_are_few_and_full():
    assert plan_batches([1, 8, 9, 16, 17, 40, 41], 8, 2) == [
        Batch(8, [0, 1]), Batch(16, [2, 3]), Batch(48, [4, 5]), Batch(48, [6]),
    ]  # fmt: skip
    assert plan_batches([3, 100, 20], 8, 3) == [Batch(128, [0, 2, 1])]
    assert [b.width for b in plan_batches([8 * n for n in range(1, 10)], 8, 1)] == [
        8, 16, 24, 32, 48, 48, 64, 64, 96,
    ]  # fmt: skip
    assert plan_batches([], 8, 4) == []


def test_an_answer_does_not_depend_on_its_batch(target, prompts):
    keys = noise.request_keys(7, len(prompts))
    seen = []
    together, stats = run(target, prompts, keys, on_batch=lambda places, _: seen.append(places))
    assert seen == [[0, 1, 2, 3, 4]]
    alone, _ = run(target, prompts, keys, batch_size=1)
    backwards, _ = run(target, prompts[::-1], keys[::-1])
    for one, other, third in zip(together, alone, backwards[::-1], strict=True):
        assert compare.same_answer(one, other) and compare.same_answer(one, third)
    assert stats.requests == 5 and stats.tokens == sum(len(a.tokens) for a in together)
    assert stats.steps == sum(a.steps for a in together)
    assert stats.passes == sum(a.passes for a in together) <= stats.steps
    assert stats.drafted >= stats.accepted == stats.steps - stats.passes
    assert stats.tokens_per_second > 0 and stats.compile_seconds > 0


def test_every_token_of_an_answer_has_its_trace(target, prompts):
    answers, _ = run(target, prompts, noise.request_keys(7, len(prompts)))
    for answer in answers:
        assert answer.stopped or len(answer.tokens) == CONFIG.max_new_tokens
        trace = Trace(*(x[: len(answer.tokens)] for x in answer.trace))
        assert np.all(trace.step >= 0) and np.all(trace.step < answer.steps)
        assert np.all(trace.pass_ <= trace.step) and np.all(trace.confidence <= 0)
        assert len(np.unique(trace.step)) == len(trace.step)


def test_few_compilations_and_none_twice(target):
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.append(name) if "backend_compile" in name else None
    )
    random = np.random.default_rng(1)
    prompts = [[5] * int(length) for length in random.integers(1, 17, 12)]
    keys = noise.request_keys(0, len(prompts))
    run(target, prompts[:1], keys[:1], batch_size=1)
    assert len({batch.width for batch in plan_batches([len(p) for p in prompts], 8, 1)}) == 2
    backwards = keys[::-1]
    _, first = run(target, prompts, keys, batch_size=1)
    del events[:]
    _, second = run(target, prompts[::-1], backwards, batch_size=1)
    assert not events
    assert second.compile_seconds < 0.1
    assert second[:6] == first[:6]


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "prompt 1: the prompt is empty"),
        ([320], "prompt 1: token id 320 is outside the vocabulary of 320"),
        ([-1], "prompt 1: token id -1"),
        ([1] * 503, "prompt 1: prompt of 503 tokens and 10 new ones exceed the 512 positions"),
    ],
)
def test_prompts_that_cannot_be_decoded(target, prompt, message):
    with pytest.raises(ValueError, match=message):
        run(target, [[1], prompt], noise.request_keys(0, 2))


def test_wrong_calls(target):
    with pytest.raises(ValueError, match=r"noise_keys must be \[1\] typed keys"):
        run(target, [[1]], noise.request_keys(0, 2))
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        run(target, [[1]], noise.request_keys(0, 1), batch_size=0)
    answers, stats = run(target, [], noise.request_keys(0, 0))
    assert (answers, stats) == ([], Stats())


def answer(tokens, step, confidence):
    step = np.array(step)
    return Answer(
        np.array(tokens, np.int32), False, int(step.max()) + 1, 3, 2, 1,
        Trace(step, step, np.array(confidence, np.float32)),
    )  # fmt: skip


def divergence(plain, drafted, config=CONFIG):
    return compare.first_divergence(
        [plain], [drafted], [3], noise.request_keys(0, 1), config, SHAPE
    )


GREEDY = DecodeConfig()
SHAPE = hf_config.target_config(fixtures.CONFIG_JSON)
PLAIN = answer([5, 6, 7], [2, 0, 1], [-0.5, -0.1, -0.25])


def test_equal_answers_do_not_diverge():
    assert divergence(PLAIN, PLAIN, GREEDY) is None


def test_the_margin_of_another_order():
    found = divergence(PLAIN, answer([5, 6, 7], [1, 0, 2], [-0.75, -0.1, -0.2]), GREEDY)
    assert found is not None
    assert found[:5] == (0, 1, 0, None, 5)
    assert found.margin == pytest.approx(0.5)
    rule = Threshold(0.5)
    found = divergence(
        PLAIN,
        answer([5, 6, 7], [0, 0, 1], [math.log(0.51), -0.1, -0.25]),
        DecodeConfig(rule=rule),
    )
    assert found is not None and found[:5] == (0, 0, 0, None, 5)
    assert found.margin == pytest.approx(math.log(0.51 / 0.5), abs=1e-6)
    left = DecodeConfig(rule=TopN(score="left_to_right"))
    found = divergence(PLAIN, answer([5, 6, 7], [1, 0, 2], [0, 0, 0]), left)
    assert found is not None and math.isinf(found.margin)


def test_the_margin_of_another_token():
    other = answer([5, 6, 8], [2, 0, 1], [-0.5, -0.1, -0.375])
    found = divergence(PLAIN, other, GREEDY)
    assert found is not None
    assert found[:5] == (0, 1, 2, 7, 8) and found.margin == pytest.approx(0.125)
    # The prompt's 3 tokens fill the block's first 3 places: at step 1, 4 of it are committed.
    draws = noise.token_gumbel(
        noise.request_keys(0, 1), jnp.array([[5]]), jnp.array([4]), jnp.array([[[7, 8]]])
    )
    draws = draws[0, 0].tolist()
    found = divergence(PLAIN, other)
    assert found is not None
    assert found.margin == pytest.approx(abs(-0.25 + draws[0] - (-0.375 + draws[1])), abs=1e-5)


def test_answers_that_end_differently_are_not_the_same():
    longer = answer([5, 6, 7, 8], [2, 0, 1, 3], [-0.5, -0.1, -0.25, 0])
    assert not compare.same_answer(PLAIN, longer)
    assert not compare.same_answer(PLAIN, PLAIN._replace(stopped=True))
    found = divergence(PLAIN._replace(stopped=True), PLAIN)
    assert found is not None and found.step is None and math.isinf(found.margin)
