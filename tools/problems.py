"""Held-out problems in batches, and the drafters that the tools compare on them."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tokenizers

from spot_jax import bundled, convert, noise
from spot_jax.draft import Chain, ConfidenceTree, Drafter
from spot_jax.drafter_io import load_drafter
from train import curriculum
from train.documents import pack_prompts
from train.tokenizer import encode_prompt


def load_pair(model: Path | None, spot: Path | None, sharpness: float):
    """Target, tokenizer and drafters by name (None: the oracle); the bundled ones by default."""
    model = model or bundled.bundled_target()
    target = convert.load_target(model)
    drafters: dict[str, Drafter | None] = {
        "chain": Chain(),
        "tree": ConfidenceTree(sharpness),
        "spot": load_drafter(spot or bundled.bundled_drafter(), target.config),
        "oracle": None,
    }
    return target, tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")), drafters


class Batch(NamedTuple):
    """Prompts of one task."""

    prompts: np.ndarray
    lengths: np.ndarray
    keys: jax.Array


def task_batches(
    words,
    tasks,
    count: int,
    seed: int,
    block_length: int,
    split: str = "test",
    gsm8k: Path | None = None,
) -> dict[str, Batch]:
    """`count` problems a task, and those of a GSM8K file; a request's key is its index over all."""
    examples = {task: curriculum.make_examples(seed, split, count, (task,)) for task in tasks}
    if gsm8k is not None:
        examples["gsm8k"] = curriculum.read_gsm8k(gsm8k)[:count]
    batches = {}
    for index, (task, found) in enumerate(examples.items()):
        prompts, lengths = pack_prompts(
            [encode_prompt(words, e.prompt) for e in found], block_length
        )
        keys = noise.request_keys(seed, len(found), index * count)
        batches[task] = Batch(prompts, lengths, keys)
    return batches
