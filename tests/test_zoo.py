"""The zoo: tiny trained targets of other families, each in its family's own form."""

import importlib

import numpy as np
import pytest
import tokenizers

from spot_jax import bundled, compare, convert, noise
from spot_jax.decode import DecodeConfig
from spot_jax.drafter_io import load_drafter
from spot_jax.generate import generate
from train import curriculum
from train.tokenizer import encode_prompt

TARGETS = {"sdar-b8": "sdar", "sdar-b4": "sdar", "llada": "llada", "dream": "Dream"}
TARGETS["llada2"] = "llada2_moe"


def test_the_zoo_is_whole_and_small():
    assert {path.name for path in bundled.others()} == set(TARGETS)
    assert bundled.problems() == []
    size = sum(p.stat().st_size for p in bundled.ZOO.rglob("*") if p.is_file())
    assert size <= 25e6


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_what_its_config_trains(name):
    config = importlib.import_module(f"configs.{name.replace('-', '_')}").TARGET.target
    directory = bundled.ZOO / name
    target = convert.load_target(directory)
    assert target.config == config
    assert f'"model_type": "{TARGETS[name]}"' in (directory / "config.json").read_text()
    words = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert words.get_vocab_size() == config.vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore::spot_jax.drafter_io.DrafterWarning")
def test_it_answers_and_the_home_drafter_serves_it(name):
    directory = bundled.ZOO / name
    target = convert.load_target(directory)
    words = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    drafter = load_drafter(bundled.bundled_drafter(), target.config)
    examples = curriculum.make_examples(7, "test", 6, ("json",))
    prompts = [encode_prompt(words, e.prompt) for e in examples]
    config = DecodeConfig(max_new_tokens=64)
    keys = noise.request_keys(0, len(prompts))
    plain, stats = generate(target, prompts, keys, config)
    texts = [words.decode(a.tokens.tolist(), skip_special_tokens=False) for a in plain]
    right = [curriculum.is_right(e, t) for e, t in zip(examples, texts, strict=True)]
    assert np.mean(right) >= 0.5
    config = DecodeConfig(max_new_tokens=64, budget=8)
    drafted, faster = generate(target, prompts, keys, config, drafter)
    assert all(map(compare.same_answer, plain, drafted))
    assert faster.passes < 0.75 * stats.passes
