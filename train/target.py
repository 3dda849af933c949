"""Trains a target: autoregressive first, then converted with growing blocks.

The recipe is SDAR's (arXiv 2510.06303): a causal model learns the language cheaply, and block
diffusion on doubled `[noisy | clean]` sequences then teaches it to fill a block in any order. A
target of full attention learns to fill blocks of whole sequences (LLaDA, arXiv 2502.09992).

    python -m train.target --config configs/home.py --out runs/home
"""

import dataclasses
import functools
import itertools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from spot_jax import convert, hf_write
from spot_jax.config import TargetConfig
from spot_jax.models import attention
from spot_jax.models.target import Target, head_weight
from train import curriculum, documents, tokenizer
from train.adapt import adapt
from train.loop import run_steps
from train.optimizer import muon
from train.parallel import init_state, parallel_step, split_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetTraining:
    """One training run.

    Attributes:
      target: shape of the model; its vocabulary must be the tokenizer's.
      start: directory of a target to start from (see `train.adapt`), relative to the checkout;
        its tokenizer is kept where the size of the vocabulary is the same. None starts afresh.
      phases: `(block_length, steps)` in order; block length 0 is the autoregressive objective.
      learning_rate: of Muon on matrices; Adam on the rest takes a tenth.
      decay_share: share of the steps, at the end, over which the rate falls to 0.
      prompt_weight: weight of prompt tokens in the autoregressive loss.
      tasks, extra_share, tail: mixture; see `documents.batches`. Under full attention the padding
        behind an answer is learnt as well, so that a canvas may be longer than its text.
    """

    target: TargetConfig
    phases: tuple[tuple[int, int], ...]
    start: str | None = None
    learning_rate: float = 0.02
    decay_share: float = 0.5
    warmup_steps: int = 50
    tokens_per_batch: int = 3840
    max_length: int = 256
    prompt_weight: float = 0.2
    tasks: tuple[str, ...] = curriculum.TASKS
    extra_share: float = 0.1
    tail: int = 0
    seed: int = 0


def autoregressive_loss(params, batch, *, config: TargetConfig, prompt_weight: float):
    """Next-token cross-entropy under a causal mask; sums over a batch of `Documents` arrays."""
    params = _compute_params(params)
    tokens, prompt_lengths, lengths = batch["tokens"], batch["prompt_lengths"], batch["lengths"]
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    causal = attention.attend_masked(jnp.tril(jnp.ones((length, length), bool)))
    hidden, _ = _model(config).apply({"params": params}, tokens, positions, causal)
    predicted = positions[:, 1:]
    weight = jnp.where(predicted < prompt_lengths[:, None], prompt_weight, 1.0)
    weight = jnp.where(predicted < lengths[:, None], weight, 0.0)
    return _cross_entropy(params, hidden[:, :-1], tokens[:, 1:], weight)


def diffusion_loss(params, batch, *, config: TargetConfig, block_length: int):
    """Masked-token cross-entropy of block diffusion; sums over a batch of `Documents` arrays.

    Each block of each row draws its own share of masked positions, uniform on (0, 1]. The answer
    and the padding up to the end of its last block are masked and learnt, the prompt never.
    """
    params = _compute_params(params)
    tokens, prompt_lengths, lengths = batch["tokens"], batch["prompt_lengths"], batch["lengths"]
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    share_key, mask_key = jax.random.split(jax.random.wrap_key_data(batch["key"][0]))
    share = jax.random.uniform(share_key, (rows, length // block_length))
    share = jnp.repeat(share, block_length, axis=1)
    end = -(-lengths // block_length) * block_length
    answer = (positions >= prompt_lengths[:, None]) & (positions < end[:, None])
    masked = answer & (jax.random.uniform(mask_key, (rows, length)) < share)
    noisy = jnp.where(masked, config.mask_id, tokens)
    hidden, _ = _model(config).apply(
        {"params": params},
        jnp.concatenate([noisy, tokens], axis=1),
        jnp.concatenate([positions, positions], axis=1),
        attention.attend_doubled(block_length, length),
    )
    return _cross_entropy(params, hidden[:, :length], tokens, masked.astype(jnp.float32))


def whole_diffusion_loss(params, batch, *, config: TargetConfig):
    """Masked-token cross-entropy under full attention; sums over a batch of `Documents` arrays.

    Three rows of four are what decoding meets: blocks counted from the end of the prompt, those
    before one drawn block clean, those behind it masked, a share of its own positions masked. The
    masks behind are learnt with a tenth of the weight. In the other rows a share of the whole
    answer is masked, as in LLaDA's own training. Padding up to the end is part of the answer.
    """
    params = _compute_params(params)
    tokens, prompt_lengths, lengths = batch["tokens"], batch["prompt_lengths"], batch["lengths"]
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    keys = jax.random.split(jax.random.wrap_key_data(batch["key"][0]), 4)
    share, place, kind = (jax.random.uniform(key, (rows, 1)) for key in keys[:3])
    hit = jax.random.uniform(keys[3], (rows, length)) < share
    block = (positions - prompt_lengths[:, None]) // config.block_length
    size = lengths - prompt_lengths
    current = jnp.floor(place * -(-size[:, None] // config.block_length)).astype(jnp.int32)
    blockwise = jnp.where(block == current, hit, block > current)
    answer = (positions >= prompt_lengths[:, None]) & (lengths > 0)[:, None]
    masked = answer & jnp.where(kind < 0.75, blockwise, hit)
    weight = jnp.where((kind < 0.75) & (block > current), 0.1, 1.0) * masked
    visible = attention.attend_masked(jnp.ones((1, 1, length), bool))
    noisy = jnp.where(masked, config.mask_id, tokens)
    hidden, _ = _model(config).apply({"params": params}, noisy, positions, visible)
    if config.shift:
        return _cross_entropy(params, hidden[:, :-1], tokens[:, 1:], weight[:, 1:])
    return _cross_entropy(params, hidden, tokens, weight)


def _model(config: TargetConfig) -> Target:
    return Target(config, unroll=config.num_layers)


def _compute_params(params):
    # bfloat16 matrices train about 1.4x faster on CPUs that have the instructions, and on TPU.
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def _cross_entropy(params, hidden, labels, weight):
    logits = jnp.einsum(
        "rtd,vd->rtv", hidden, head_weight(params), preferred_element_type=jnp.float32
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = jnp.argmax(logits, axis=-1) == labels
    return jnp.sum(weight * loss), {"count": jnp.sum(weight), "right": jnp.sum(weight * right)}


def make_optimizer(run: TargetTraining) -> optax.GradientTransformation:
    """Muon on the stacked matrices, Adam on embeddings, norms, biases and routers."""

    def dimensions(params):
        # optax also passes the tree with holes where Adam's leaves were; a map leaves them alone.
        return jax.tree.map_with_path(lambda path, p: _matrices(path[-1].key, p.ndim), params)

    return muon(
        run.learning_rate,
        steps=sum(n for _, n in run.phases),
        warmup_steps=run.warmup_steps,
        decay_share=run.decay_share,
        dimensions=dimensions,
    )


def _matrices(name: str, ndim: int) -> optax.contrib.MuonDimensionNumbers | None:
    """Which axes of a leaf are a matrix; those before them, of layers and experts, are a batch."""
    if ndim < 3 or name.endswith("router"):
        return None
    return optax.contrib.MuonDimensionNumbers(reduction_axis=ndim - 1, output_axis=ndim - 2)


def loss_of_phase(run: TargetTraining, block_length: int):
    """Loss function of one phase: autoregressive at block length 0, diffusion above."""
    if run.target.attention == "full" and block_length:
        config = dataclasses.replace(run.target, block_length=block_length)
        return functools.partial(whole_diffusion_loss, config=config)
    if block_length == 0:
        return functools.partial(
            autoregressive_loss, config=run.target, prompt_weight=run.prompt_weight
        )
    return functools.partial(diffusion_loss, config=run.target, block_length=block_length)


def init_params(run: TargetTraining, words):
    """Parameters to begin with, float32: fresh, or out of another target's."""
    if run.start is not None:
        source = convert.load_target(run.start)
        source_words = tokenizer.load_tokenizer(run.start)
        adapted = adapt(source.params, source.config, run.target, source_words, words, run.seed)
        return jax.tree.map(jnp.asarray, adapted)
    tokens = jnp.zeros((1, 2), jnp.int32)
    attend = attention.attend_masked(jnp.ones((2, 2), bool))
    return Target(run.target).init(jax.random.key(run.seed), tokens, tokens, attend)["params"]


def host_batch(batch: documents.Documents, run: TargetTraining, step: int, num_devices: int):
    """A batch with the key of its step, split over devices."""
    arrays = split_batch(batch._asdict(), num_devices)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(run.seed), step), num_devices)
    return arrays | {"key": np.asarray(jax.random.key_data(keys))[:, None]}


def train(run: TargetTraining, out: Path, gsm8k: Path | None, save_every: int = 200):
    """Trains or resumes `run` under `out`; returns final parameters and the tokenizer."""
    extra = curriculum.read_gsm8k(gsm8k) if gsm8k else []
    words = _words(run, extra)
    tokenizer.save_tokenizer(words, out / "tokenizer")
    optimizer = make_optimizer(run)
    ends = list(itertools.accumulate(steps for _, steps in run.phases))

    @functools.cache
    def step_of_phase(phase):
        return parallel_step(loss_of_phase(run, run.phases[phase][0]), optimizer)

    state = run_steps(
        init_state(init_params(run, words), optimizer),
        total_steps=ends[-1],
        batches=documents.batches(
            words,
            seed=run.seed,
            tokens_per_batch=run.tokens_per_batch,
            block_length=run.target.block_length,
            max_length=run.max_length,
            tasks=run.tasks,
            extra=extra,
            extra_share=run.extra_share,
            tail=run.tail,
        ),
        step_for=lambda step: step_of_phase(next(i for i, end in enumerate(ends) if step < end)),
        make_batch=lambda batch, step: host_batch(batch, run, step, jax.local_device_count()),
        out=out,
        save_every=save_every,
    )
    return state.params, words


def _words(run: TargetTraining, extra):
    if run.start is not None:
        words = tokenizer.load_tokenizer(run.start)
        if words.get_vocab_size() == run.target.vocab_size:
            return words
    return tokenizer.train_tokenizer(tokenizer.tokenizer_texts(extra), run.target.vocab_size)


def main(config: Path, out: Path, gsm8k: Path | None = None) -> None:
    """Trains a target, or resumes where `out` left off.

    Args:
      config: Python file that defines `TARGET`, a `TargetTraining`.
      out: directory of checkpoints, metrics, tokenizer and, at the end, the target as `hf`.
      gsm8k: GSM8K training lines to mix in.
    """
    run = runpy.run_path(str(config))["TARGET"]
    params, _ = train(run, out, gsm8k)
    hf_write.save_hf(
        params,
        run.target,
        out / "hf",
        dtype="bfloat16",
        tokenizer_from=out / "tokenizer",
        overwrite=True,
    )


if __name__ == "__main__":
    tyro.cli(main)
