"""Reference samplers: presets against re-statements of the references, which share no code.

Each re-statement follows the published sampler's own loop (scheduled transfers, whole canvases,
sub-blocks, hand-over) on logits of whole sequences, greedily, without a cache.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax import noise, samplers
from spot_jax.commit import TopN
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig, decode
from spot_jax.forward import CacheKind
from spot_jax.rules import Release
from spot_jax.state import Reading
from tests import reference, tiny

BLOCK, NEW = 4, 8
BASE = dataclasses.replace(tiny.CONFIG, block_length=BLOCK)
FULL = dataclasses.replace(BASE, attention="full", grid="anchored")
SHIFTED = dataclasses.replace(FULL, shift=True)
HANDED = dataclasses.replace(BASE, shift=True, hand_over=True)
TARGET = functools.cache(tiny.target)
# Every residue of the block length, in prompts shorter and longer than a block.
LENGTHS = tuple(range(1, 10))


def logits_of(config, tokens):
    """Logits `[T, V]`; what is never drawn here is impossible."""
    index = np.arange(len(tokens))
    visible = np.ones((len(tokens), len(tokens)), bool)
    if config.attention == "block_causal":
        visible = index[:, None] // BLOCK >= index[None] // BLOCK
    logits = reference.sequence_logits(TARGET(config), tokens, index, visible)
    logits[:, [config.mask_id, *range(config.num_token_ids, config.vocab_size)]] = -np.inf
    return logits


def softmax(x):
    weight = np.exp(x - x.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def transfers(number, steps):
    """`get_num_transfer_tokens` of LLaDA and SDAR."""
    return [number // steps + (i < number % steps) for i in range(steps)]


def llada(config, prompt, steps):
    """generate.py of LLaDA: `low_confidence`, `steps` per block, no guidance."""
    x = [*prompt, *[config.mask_id] * NEW]
    masked = np.arange(len(x)) >= len(prompt)
    for block in range(NEW // BLOCK):
        begin = len(prompt) + block * BLOCK
        for number in transfers(BLOCK, steps):
            probs = softmax(logits_of(config, x))
            best = probs.argmax(-1)
            confidence = np.where(masked, probs.max(-1), -np.inf)
            confidence[begin + BLOCK :] = -np.inf
            for i in np.argsort(-confidence, kind="stable")[:number]:
                x[i], masked[i] = int(best[i]), False
    return x[len(prompt) :]


def nucleus(logits, top_p):
    """`top_p_logits` of Dream: a token goes where those before it already exceed `top_p`."""
    order = np.argsort(-logits, axis=-1, kind="stable")
    mass = np.cumsum(np.take_along_axis(softmax(logits), order, -1), axis=-1)
    gone = np.concatenate([np.zeros((len(logits), 1), bool), mass[:, :-1] > top_p], axis=-1)
    result = logits.copy()
    for row, tokens, out in zip(result, order, gone, strict=True):
        row[tokens[out]] = -np.inf
    return result


def dream(config, prompt, steps, alg, eps=1e-3, top_p=1.0):
    """`_sample` of Dream on a canvas of one block; logits shifted by one."""
    x = [*prompt, *[config.mask_id] * BLOCK]
    masked = np.arange(len(x)) >= len(prompt)
    times = np.linspace(1, eps, steps + 1)
    for i in range(steps):
        logits = logits_of(config, x)
        logits = nucleus(np.concatenate([logits[:1], logits[:-1]]), top_p)
        probs = softmax(logits)
        ordered = np.sort(probs, axis=-1)[:, ::-1]
        confidence = {
            "maskgit": ordered[:, 0],
            "margin": ordered[:, 0] - ordered[:, 1],
            "entropy": np.sum(probs * np.log(probs + 1e-10), axis=-1),
        }[alg]
        left = int(masked.sum())
        number = int(left * (1 - times[i + 1] / times[i])) if i < steps - 1 else left
        confidence = np.where(masked, confidence, -np.inf)
        for j in np.argsort(-confidence, kind="stable")[:number]:
            x[j], masked[j] = int(probs[j].argmax()), False
    return x[len(prompt) :]


def block_diffusion(config, prompt, threshold, strict):
    """SDAR, LLaDA2 and Stable-DiffCoder: prompt tail in the first block, one scheduled commit."""
    x = list(prompt)
    start = len(x) // BLOCK * BLOCK
    masked = np.zeros(len(x), bool)
    while len(x) < len(prompt) + NEW:
        add = BLOCK - len(x) % BLOCK
        x += [config.mask_id] * add
        masked = np.concatenate([masked, np.ones(add, bool)])
        while masked[start:].any():
            probs = softmax(logits_of(config, x))
            confidence = np.where(masked, probs.max(-1), -np.inf)
            over = confidence > threshold if strict else confidence >= threshold
            chosen = np.flatnonzero(over) if over.sum() >= 1 else [int(confidence.argmax())]
            for i in chosen:
                x[i], masked[i] = int(probs[i].argmax()), False
        start = len(x)
    return x[len(prompt) : len(prompt) + NEW]


def fast_dllm_v2(config, prompt, threshold, small):
    """`generate` of Fast-dLLM v2: clean forward and hand-over, then sub-blocks left to right."""
    x = list(prompt)
    if len(x) % BLOCK == 0:
        x.append(int(logits_of(config, x)[-1].argmax()))
    while True:
        start = (len(x) - 1) // BLOCK * BLOCK
        masked = np.arange(start + BLOCK) >= len(x)
        x += [config.mask_id] * (start + BLOCK - len(x))
        for sub in range(start, start + BLOCK, small):
            while masked[sub : sub + small].any():
                logits = logits_of(config, x)
                logits = np.concatenate([logits[:1], logits[:-1]])
                probs = softmax(logits)
                confidence = np.where(masked, probs.max(-1), -np.inf)
                confidence[:sub] = confidence[sub + small :] = -np.inf
                chosen = set(np.flatnonzero(confidence > threshold)) | {int(confidence.argmax())}
                for i in chosen:
                    x[i], masked[i] = int(probs[i].argmax()), False
        if len(x) >= len(prompt) + NEW:
            return x[len(prompt) : len(prompt) + NEW]
        x.append(int(logits_of(config, x)[-1].argmax()))


def ours(config, preset, new=NEW, cache: CacheKind | None = None):
    """Greedy texts of all prompts by our decoder."""
    sampling = dataclasses.replace(preset.sampling, temperature=0.0)
    decoding = DecodeConfig(
        max_new_tokens=new, num_top=8, sampling=sampling, rule=preset.rule, stop_at_eos=False,
        cache=cache,
    )  # fmt: skip
    result = jax.device_get(decode(TARGET(config), *requests(), decoding))
    return [result.tokens[row, n : n + new].tolist() for row, n in enumerate(LENGTHS)]


def requests():
    random = np.random.default_rng(4)
    prompts = random.integers(6, tiny.MASK, size=(len(LENGTHS), max(LENGTHS)))
    return jnp.asarray(prompts), jnp.array(LENGTHS), noise.request_keys(0, len(LENGTHS))


def prompts():
    rows, lengths, _ = requests()
    return [rows[row, :n].tolist() for row, n in enumerate(lengths.tolist())]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_llada(steps):
    preset = samplers.preset("llada", BLOCK, steps)
    assert ours(FULL, preset) == [llada(FULL, prompt, steps) for prompt in prompts()]


@pytest.mark.slow
@pytest.mark.parametrize("alg", ["maskgit", "margin", "entropy"])
def test_dream(alg):
    for steps in (3, 8):
        preset = samplers.preset(f"dream-{alg}", BLOCK, steps)
        expected = [dream(SHIFTED, prompt, steps, alg) for prompt in prompts()]
        assert ours(SHIFTED, preset, new=BLOCK) == expected
        # Filters count at temperature 0 too: they renormalise what ranks the positions.
        narrow = preset._replace(sampling=Sampling(top_p=0.7))
        filtered = [dream(SHIFTED, prompt, steps, alg, top_p=0.7) for prompt in prompts()]
        assert ours(SHIFTED, narrow, new=BLOCK) == filtered
    # The comparison can fail: without the shift it does.
    assert ours(FULL, preset, new=BLOCK) != expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "threshold", "strict"),
    [("sdar", 0.85, True), ("llada2", 0.95, True), ("diffcoder", 0.95, False)],
)
def test_block_diffusion(name, threshold, strict):
    expected = [block_diffusion(BASE, prompt, threshold, strict) for prompt in prompts()]
    assert ours(BASE, samplers.preset(name, BLOCK)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [1.0, 0.3])
def test_fast_dllm_v2(threshold):
    preset = samplers.preset("fast-dllm-v2", BLOCK)
    inner = dataclasses.replace(preset.rule.rule, threshold=threshold)
    preset = preset._replace(rule=dataclasses.replace(preset.rule, rule=inner, length=2))
    expected = [fast_dllm_v2(HANDED, prompt, threshold, 2) for prompt in prompts()]
    assert ours(HANDED, preset) == expected


def test_even_schedules():
    for length, steps in ((8, 8), (8, 4), (8, 3), (32, 5), (4, 1)):
        found = samplers.even_schedule(length, steps)
        found = (found,) * steps if isinstance(found, int) else found
        assert list(found) == transfers(length, steps)


def test_dream_schedules():
    # Step by step as the reference computes it; steps without a release are left out.
    assert samplers.dream_schedule(4, 4) == (1, 1, 2)
    for length, steps in ((16, 16), (64, 32), (32, 100)):
        counts = samplers.dream_schedule(length, steps)
        assert sum(counts) == length and min(counts) >= 1
    assert samplers.dream_schedule(16, 16)[-1] > 1, "the last step releases what is left"


def test_release_has_the_references_law():
    """Shares released at each step, against the product of the reference's probabilities."""
    steps, eps, draws = 5, 1e-3, 200_000
    rule = Release(steps, eps)
    uniform = jax.random.uniform(jax.random.key(0), (draws,))
    when = -np.asarray(rule.ranking(reading_of(uniform), lambda fixed: uniform))
    times = np.linspace(1, eps, steps + 1)
    left = 1.0
    for step in range(steps):
        share = 1 - times[step + 1] / times[step] if step < steps - 1 else 1.0
        expected, left = left * share, left * (1 - share)
        found = float(np.mean(when == step))
        assert abs(found - expected) < 4 * math.sqrt(expected / draws), step


def test_positions_are_drawn_in_proportion():
    """`alg_temp`: a multinomial over exp(score / temperature)."""
    rule = TopN(1, "confidence", order_temperature=0.5)
    probs = jnp.array([0.9, 0.5, 0.2])
    draws = jax.random.uniform(jax.random.key(1), (50_000, 3))
    log = jnp.broadcast_to(jnp.log(probs), draws.shape)
    ranking = rule.ranking(reading_of(log), lambda: draws)
    found = np.bincount(np.asarray(jnp.argmax(ranking, axis=-1)), minlength=3) / len(draws)
    expected = softmax(np.asarray(probs) / 0.5)
    np.testing.assert_allclose(found, expected, atol=0.01)


def reading_of(confidence):
    top = jnp.stack([confidence, confidence - 1], axis=-1)
    tokens = jnp.zeros(confidence.shape, jnp.int32)
    return Reading(tokens, confidence, top, jnp.zeros(top.shape, jnp.int32), confidence, confidence)


def test_every_preset_is_there_with_its_defaults():
    for name in samplers.PRESETS:
        preset = samplers.preset(name, 32)
        assert preset.source and isinstance(preset.sampling, Sampling)
    assert samplers.preset("sdar", 32).sampling.temperature == 1.0
    assert samplers.preset("fast-dllm", 32).cache == "dual"
    assert samplers.preset("dream-entropy", 32, order_temperature=0.4).rule.order_temperature == 0.4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lada", 32), "unknown sampler 'lada': did you mean llada?"),
        (("llada2", 32, 4), "sampler llada2 has no number of steps"),
        (("llada", 32, 33), "steps must be in 1..32"),
        (("dream-margin", 32, 0), "steps must be at least 1"),
        (("llada", 32, 8, 0.5), "draws no positions"),
    ],
)
def test_bad_presets(arguments, message):
    with pytest.raises(ValueError, match=message):
        samplers.preset(*arguments)
