"""From options to everything that decoding needs: checks first, the device last."""

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from spot_jax import (
    bundled,
    checkpoint,
    convert,
    drafter_io,
    hf_config,
    noise,
    ranks_io,
    requests,
    samplers,
    text,
)
from spot_jax.commands.options import DecodeOptions
from spot_jax.commit import Rule, Threshold, TopN
from spot_jax.config import Sampling, TargetConfig
from spot_jax.decode import DecodeConfig
from spot_jax.draft import Chain, ConfidenceSets, ConfidenceTree, Drafter
from spot_jax.generate import prompt_problem
from spot_jax.models.target import TargetModel
from spot_jax.rules import SubBlocks

TRAINING_FREE: dict[str, Drafter | None] = {
    "none": None,
    "chain": Chain(),
    "tree": ConfidenceTree(),
}
DRAFTERS = (*TRAINING_FREE, "spot")
DEFAULT_BUDGET, MAX_SAMPLES = 16, 65536


class Job(NamedTuple):
    """Requests, checked and encoded, and how to decode them; nothing is on a device yet.

    Attributes:
      requests: what to answer.
      prompts: their token ids.
      codec: the target's tokenizer.
      directory: of the target.
      target_config: of the target.
      drafter: name or directory; "none" where nothing is drafted.
      config: how to decode with that drafter.
    """

    requests: list[requests.Request]
    prompts: list[list[int]]
    codec: text.Codec
    directory: Path
    target_config: TargetConfig
    drafter: str
    config: DecodeConfig


def prepare(options: DecodeOptions, default_prompts: Sequence[str] = ()) -> Job:
    """Checks everything that can be checked without a device."""
    drafter = options.drafter or "spot"
    if not (drafter in DRAFTERS or Path(drafter).is_dir() or _is_ranks(drafter)):
        raise ValueError(
            f"--drafter {drafter} is no directory, no .json file and none of {', '.join(DRAFTERS)}"
            + samplers.nearest(drafter, DRAFTERS)
        )
    check_budget(options, drafter)
    asked = _requests(options, default_prompts)
    directory = Path(options.model) if options.model else bundled.bundled_target()
    if not directory.is_dir():
        raise ValueError(f"--model {directory} is not a directory")
    target_config = _target_config(directory, options)
    config = _decode_config(options, drafter, target_config)
    if options.drafter is None and not config.rule.single:
        drafter = "tree" if _has_sets(config.rule) else "chain"
        note(f"the bundled SPOT drafter foresees single commits: drafting with the {drafter}")
    if _is_ranks(drafter):
        ranks_io.load_ranks(drafter)
    elif drafter not in TRAINING_FREE:
        path = _drafter_directory(drafter)
        drafter_io.check_rule(path, drafter_io.read_metadata(path), config.rule)
        config = dataclasses.replace(config, num_top=drafter_io.read_order(path).num_top)
    codec = text.load_codec(directory, (target_config.mask_id, *target_config.eos_ids))
    prompts = []
    for request in asked:
        try:
            prompts.append(_encode(codec, request, options))
        except text.TextError as error:
            raise ValueError(f"{request.where}: {error}") from error
        problem = prompt_problem(prompts[-1], target_config, config.max_new_tokens)
        if problem:
            raise ValueError(f"{request.where}: {problem}")
    return Job(asked, prompts, codec, directory, target_config, drafter, config)


def load(job: Job, options: DecodeOptions) -> tuple[TargetModel, Drafter | None]:
    """Loads target and drafter onto the device."""
    use_cache(options.no_cache)
    jax.devices()  # Where there is none, other calls fail less clearly.
    if job.drafter == "spot" and options.model and not options.drafter:
        note("drafting with the bundled SPOT drafter, which was trained on another target")
    drafter = load_drafter(job)
    target = convert.load_target(
        job.directory,
        dtype=options.dtype,
        block_length=options.block_length,
        mask_token_id=options.mask_token_id,
    )
    return target, drafter


def load_drafter(job: Job) -> Drafter | None:
    """The drafter that a job names."""
    if _is_ranks(job.drafter):
        return ranks_io.load_ranks(job.drafter, job.target_config)
    if job.drafter not in TRAINING_FREE:
        return drafter_io.load_drafter(_drafter_directory(job.drafter), job.target_config)
    drafter = TRAINING_FREE[job.drafter]
    if isinstance(drafter, ConfidenceTree) and _has_sets(job.config.rule):
        return ConfidenceSets()
    return drafter


def _has_sets(rule: Rule) -> bool:
    """Whether steps commit sets that a tree can foresee."""
    return not rule.single and isinstance(rule.inner, TopN | Threshold)


def check_seed(seed: int, num_samples: int = 1) -> None:
    """Raises unless the seeds of all samples are 32-bit numbers."""
    if num_samples > MAX_SAMPLES:
        raise ValueError(f"--num-samples must be at most {MAX_SAMPLES}, got {num_samples}")
    if not 0 <= seed <= 2**32 - num_samples:
        raise ValueError(f"--seed must be in 0..{2**32 - num_samples}, got {seed}")


def sample_keys(seed: int, num_requests: int, num_samples: int = 1) -> Key[Array, " R"]:
    """Keys of all samples of all requests, request by request."""
    keys = [noise.request_keys(seed + k, num_requests) for k in range(num_samples)]
    return jnp.stack(keys, axis=1).reshape(-1)


def cache_directory() -> Path:
    """Where compiled programs are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "spot-jax" / "xla"


def cache_disabled(option: bool) -> bool:
    """Whether nothing is kept for later runs, by `--no-cache` or by the environment."""
    return option or os.environ.get("SPOT_JAX_NO_CACHE", "0") not in ("", "0")


def use_cache(disabled: bool) -> None:
    """Turns JAX's persistent compilation cache on, where the user has not set it up already."""
    if cache_disabled(disabled):
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        note(f"no compilation cache: {error}")
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def version(package: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def environment() -> dict[str, Any]:
    """Versions, machine and devices that times belong to."""
    device = jax.devices()[0]
    return {name: version(name) for name in ("spot-jax", "jax", "jaxlib")} | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": f"{len(jax.devices())} x {device.device_kind} ({device.platform})",
    }


def note(message: str) -> None:
    """Tells the user something that is no error."""
    print(f"spot-jax: note: {message}", file=sys.stderr)


def check_budget(options: DecodeOptions, drafter: str) -> None:
    """Raises unless the budget fits the drafter."""
    budget = options.budget
    if isinstance(budget, str) and budget != "auto":
        raise ValueError(f"--budget {budget} is neither a whole number nor auto")
    if budget == "auto" and options.look_ahead:
        raise ValueError("--budget auto does not go with --look-ahead: give a number")
    if options.costs is not None and budget != "auto":
        raise ValueError("--costs is what --budget auto goes by: pass that too")
    if drafter == "none" and options.look_ahead:
        raise ValueError("--look-ahead has no effect with --drafter none")
    if drafter == "none" and budget not in (None, 1):
        raise ValueError(f"--budget {budget} has no effect with --drafter none")
    if drafter != "none" and isinstance(budget, int) and budget < 2:
        raise ValueError(f"--budget {budget}: drafting needs 2 or more; see also --drafter none")


def _decode_config(options: DecodeOptions, drafter: str, target: TargetConfig) -> DecodeConfig:
    """What the options say, over the defaults of the sampler that they name."""
    chosen = samplers.Preset(Sampling(), TopN())
    if options.sampler is not None:
        try:
            chosen = samplers.preset(
                options.sampler, target.block_length, options.steps, options.order_temperature
            )
        except ValueError as error:
            raise ValueError(f"--sampler {options.sampler}: {error}") from error
    elif options.steps is not None or options.order_temperature:
        raise ValueError("--steps and --order-temperature are for samplers: pass --sampler")
    rule = chosen.rule if options.rule is None else samplers.parse_rule(options.rule)
    if options.sub_block is not None:
        rule = SubBlocks(rule, options.sub_block)
    names = ("temperature", "top_k", "top_p", "confidence")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    sampling = dataclasses.replace(chosen.sampling, suppressed=options.suppress, **given)
    if not sampling.filters and (sampling.top_k or sampling.top_p < 1):
        note("--top-k and --top-p have no effect at temperature 0 on the raw confidence")
    if any(number >= target.vocab_size for number in sampling.suppressed):
        raise ValueError(f"--suppress: the vocabulary has {target.vocab_size} tokens")
    # What `auto` may choose is settled where costs are known.
    budget = options.budget if isinstance(options.budget, int) else DEFAULT_BUDGET
    config = DecodeConfig(
        max_new_tokens=options.max_new_tokens,
        budget=1 if drafter == "none" else budget,
        sampling=sampling,
        rule=rule,
        stop_at_eos=not options.ignore_eos,
        cache=options.cache or chosen.cache,
        look_ahead=options.look_ahead,
    )
    config.check(target)
    return config


def _requests(options: DecodeOptions, default_prompts: Sequence[str]) -> list[requests.Request]:
    if len(options.prompt) > 1:
        raise ValueError(f"{len(options.prompt)} prompts given: quote one, or use --input")
    if options.prompt and options.input:
        raise ValueError("both a prompt and --input given")
    if options.input:
        return requests.read_requests(options.input)
    prompts = options.prompt or default_prompts
    if not prompts:
        raise ValueError("no prompt given: pass one, or --input FILE")
    return [requests.prompt_request(prompt, index) for index, prompt in enumerate(prompts)]


def _encode(codec: text.Codec, request: requests.Request, options: DecodeOptions) -> list[int]:
    if request.form == "prompt_ids":
        return request.content
    if request.form == "prompt" and options.raw_prompt:
        return text.encode_text(codec, request.content, parse_special=options.parse_special)
    messages = request.content
    if request.form == "prompt":
        messages = [{"role": "user", "content": request.content}]
    return text.encode_messages(codec, messages, parse_special=options.parse_special)


def _target_config(directory: Path, options: DecodeOptions) -> TargetConfig:
    """The target's configuration, read without its weights."""
    overrides = {"block_length": options.block_length, "mask_token_id": options.mask_token_id}
    if not checkpoint.is_checkpoint(directory):
        return hf_config.read_target_config(directory, **overrides)
    metadata = checkpoint.read_json(directory / checkpoint.METADATA)
    return convert.stored_config(directory, metadata, **overrides)


def _is_ranks(drafter: str) -> bool:
    """Whether a drafter is a file of rank formulas."""
    return drafter.endswith(".json") and Path(drafter).is_file()


def _drafter_directory(drafter: str) -> Path:
    return bundled.bundled_drafter() if drafter == "spot" else Path(drafter)
