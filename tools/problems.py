"""Held-out problems in batches, and the drafters that the tools compare on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tokenizers

from spot_jax import bundled, convert, noise
from spot_jax.draft import Chain, ConfidenceTree, Drafter
from spot_jax.drafter_io import load_drafter
from spot_jax.models.target import TargetModel
from train import curriculum
from train.documents import pack_prompts
from train.tokenizer import encode_prompt


def load_words(model: Path | None):
    """Target and tokenizer; the bundled ones by default."""
    model = model or bundled.bundled_target()
    words = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    return convert.load_target(model), words


def drafters_of(
    target: TargetModel, spots: Sequence[Path], sharpness: float
) -> dict[str, Drafter | None]:
    """Drafters by name (None: the oracle), fitted ones by their directory.

    Without directories the bundled one is there, as `spot`.
    """
    loaded = {str(path): path for path in spots} or {"spot": bundled.bundled_drafter()}
    return {
        "chain": Chain(),
        "tree": ConfidenceTree(sharpness),
        **{name: load_drafter(path, target.config) for name, path in loaded.items()},
        "oracle": None,
    }


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
