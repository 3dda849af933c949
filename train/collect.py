"""Collects traces of plain decoding, from which the order and set networks are fitted.

python -m train.collect --model runs/home-hf --out runs/traces-t0
python -m train.collect --model runs/home-hf --out runs/sets-t0 --rule threshold:0.9
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import tyro
from rich.console import Console
from rich.progress import track

from spot_jax import convert, noise, samplers
from spot_jax.commit import Threshold, TopN
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig, Request, advance, begin, draft, finish
from spot_jax.drafter_io import load_drafter
from train import curriculum, traces
from train.branches import collect_drafted
from train.documents import pack_prompts
from train.tokenizer import encode_prompt


def collect_batch(target, prompts, prompt_lengths, keys, config: DecodeConfig):
    """Plain decoding of one batch, keeping what every pass read.

    Returns the traces, the canvas `[B, C]` and the position at which each row's answer ends.

    Args:
      target: a `TargetModel`.
      prompts: int32 `[B, P]`.
      prompt_lengths: int32 `[B]`.
      keys: typed request keys.
      config: of plain decoding.
    """
    request = Request(prompt_lengths, prompt_lengths + config.max_new_tokens, keys)
    loop = _begin(target, prompts, request, config)
    points = []
    while not bool(jnp.all(loop.done)):
        loop, point = _advance(target, config, request, loop)
        points.append(jax.device_get(point))
    result = jax.device_get(finish(target, config, request, loop))
    length, key_data = target.config.block_length, np.asarray(jax.random.key_data(keys))
    canvas = jax.device_get(loop.canvas)
    found = _gather(canvas, result.trace.step, points, length, key_data)
    return found, canvas, np.asarray(prompt_lengths) + result.lengths


_begin = jax.jit(begin)


@functools.partial(jax.jit, donate_argnums=(3,))
def _advance(target, config, request, loop):
    loop, context = advance(target, config, request, loop)
    reading = context.reading
    point = dict(
        top_log_probs=reading.top_log_probs,
        top_tokens=reading.top_tokens,
        log_doubt=reading.log_doubt,
        entropy=reading.entropy,
        read_masked=context.parent.masked,
        root_masked=context.root.masked,
        fresh=context.fresh,
        start=context.positions[:, 0],
    )
    return draft(config, None, loop, context), point


def _gather(canvas, step, points, length, key_data) -> traces.Traces:
    """Turns passes over rows into points of blocks."""
    stacked = {name: np.stack([p[name] for p in points]) for name in points[0]}
    passes, rows = np.nonzero(stacked.pop("fresh"))
    starts = stacked.pop("start")[passes, rows]
    pairs, block = np.unique(np.stack([rows, starts], axis=1), axis=0, return_inverse=True)
    row, start = pairs[:, 0], pairs[:, 1]
    index = start[:, None] + np.arange(length)
    return traces.Traces(
        **{name: value[passes, rows] for name, value in stacked.items()},
        block=block.reshape(-1).astype(np.int32),
        depths=np.tile(np.array([0, length], np.int32), (len(passes), 1)),
        tokens=canvas[row[:, None], index],
        order=step[row[:, None], index],
        start=start.astype(np.int32),
        key=key_data[row],
    )


def main(
    model: Path,
    out: Path,
    num_prompts: int = 2048,
    temperature: float = 0.0,
    rule: str = "confidence",
    batch_size: int = 64,
    max_new_tokens: int = 96,
    seed: int = 1000,
    gsm8k: Path | None = None,
    gsm8k_share: float = 0.15,
    drafter: Path | None = None,
    budget: int = 16,
) -> None:
    """Collects traces, or goes on where `out` left off.

    Args:
      model: target directory.
      out: directory of shards, one a batch.
      num_prompts: training problems of the curriculum to decode.
      temperature: of plain decoding.
      rule: of plain decoding, as `spot-jax generate --rule` names it: confidence, n:K or
        threshold:[>=]P, among others.
      batch_size: prompts a shard.
      max_new_tokens: longest answer.
      seed: of the problems and of the noise.
      gsm8k: GSM8K training lines to mix in.
      gsm8k_share: their share.
      drafter: drafter directory: decode with it, and keep what was read off the decoder's path.
      budget: states a pass, with a drafter.
    """
    commits = samplers.parse_rule(rule)
    if not isinstance(commits, TopN | Threshold):
        raise ValueError(f"--rule {rule}: traces are collected under n:K and threshold:P only")
    target = convert.load_target(model)
    words = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    examples = curriculum.make_examples(seed, "train", num_prompts)
    if gsm8k is not None:
        extra = curriculum.read_gsm8k(gsm8k)
        rng = np.random.default_rng(seed)
        for index in rng.choice(num_prompts, int(num_prompts * gsm8k_share), replace=False):
            examples[index] = extra[int(rng.integers(len(extra)))]
    encoded = [encode_prompt(words, e.prompt) for e in examples]
    # Batches of like length pad least; the seed of a request is its index, wherever it lands.
    order = np.argsort([len(ids) for ids in encoded], kind="stable")
    config = DecodeConfig(
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature),
        rule=commits,
        budget=1 if drafter is None else budget,
    )
    spot = None if drafter is None else load_drafter(drafter, target.config)
    length = target.config.block_length
    traces.write_info(
        out,
        traces.TraceInfo(
            target=model.name,
            block_length=length,
            sampling=config.sampling,
            rule=commits,
            budget=config.budget,
        ),
    )
    keys = noise.request_keys(seed, num_prompts)
    batches = range(-(-num_prompts // batch_size))
    total_blocks = total_points = 0
    for index in track(batches, "collecting", console=Console(file=sys.stderr)):
        if (out / f"shard-{index:05d}.npz").exists():
            continue
        chosen = order[index * batch_size : (index + 1) * batch_size]
        prompts, lengths = pack_prompts([encoded[i] for i in chosen], length)
        batch = target, prompts, jnp.asarray(lengths), keys[chosen], config
        shard = collect_drafted(*batch, spot) if spot else collect_batch(*batch)[0]
        traces.write_shard(out, index, shard)
        total_blocks += len(shard.start)
        total_points += len(shard.block)
    print(f"{total_blocks} blocks, {total_points} points", file=sys.stderr)


if __name__ == "__main__":
    tyro.cli(main)
