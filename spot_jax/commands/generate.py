"""`spot-jax generate`."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spot_jax import compare, requests, text
from spot_jax.commands import costs, report, setup
from spot_jax.commands.options import Generate
from spot_jax.decode import DecodeConfig
from spot_jax.draft import Drafter
from spot_jax.generate import Answer, Stats, generate


class _Sample(NamedTuple):
    """One answer to be written: the request it answers, and its seed where there are several."""

    request: int
    seed: int | None


class _Decoded(NamedTuple):
    name: str
    config: DecodeConfig
    answers: list[Answer]
    stats: Stats


def run(options: Generate) -> int:
    """Answers the requests, and reports what that took."""
    _check(options)
    job = costs.given(setup.prepare(options), options)
    if options.num_samples > 1 and job.config.sampling.temperature == 0:
        raise ValueError("--num-samples: all samples are the same at temperature 0")
    many = options.num_samples > 1
    samples = [
        _Sample(request, options.seed + k if many else None)
        for request in range(len(job.requests))
        for k in range(options.num_samples)
    ]
    record_keys = [(job.requests[s.request].id, s.seed) for s in samples]
    as_text = not options.input and not options.output
    to_file = None if options.output == "-" else options.output
    digests = [_digest(options, job, sample) for sample in samples]
    answered = dict(zip(record_keys, digests, strict=True))
    results = None if as_text else requests.Results(to_file, answered)
    finished = results.finished if results else frozenset()
    todo = [i for i, key in enumerate(record_keys) if key not in finished]
    if finished:
        setup.note(f"{len(finished)} of {len(samples)} results are in {options.output} already")
    decoded = _decode(options, job, samples, todo, results) if todo else []
    if results:
        results.close()
    if as_text:
        for place, index in enumerate(todo):
            if many:
                print(f"seed {samples[index].seed}:", file=sys.stderr, flush=True)
            record = _record(job, samples[index], decoded[0].answers[place], options.stop)
            print(record["text"], flush=True)
    _report(options, job, [samples[index] for index in todo], decoded)
    return 0


def _digest(options: Generate, job: setup.Job, sample: _Sample) -> str:
    """Of all that an answer depends on. Drafter, budget and batches are not among it."""
    config = dataclasses.replace(job.config, budget=1, num_top=2, chunk=1, costs=None)
    parts = [job.prompts[sample.request], config, job.target_config, options.stop, options.dtype]
    parts.append(str(job.directory.resolve()))
    if config.sampling.temperature or not config.rule.by_confidence:
        # The noise is that of the request's place in the input.
        parts += [sample.request, options.seed if sample.seed is None else sample.seed]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _check(options: Generate) -> None:
    if options.num_samples < 1:
        raise ValueError(f"--num-samples must be at least 1, got {options.num_samples}")
    setup.check_seed(options.seed, options.num_samples)
    if not all(options.stop):
        raise ValueError("--stop: the text is empty")
    if options.compare and options.drafter == "none":
        raise ValueError("--compare needs a drafter to compare plain decoding with")
    output = None if options.output == "-" else options.output
    files = [f for f in (output, options.stats, options.trace) if f]
    read = [options.input] if options.input and options.input != "-" else []
    paths = [Path(f).resolve() for f in [*files, *read]]
    if len(set(paths)) < len(paths):
        raise ValueError("--input, --output, --stats and --trace must be different files")
    for path in files:
        requests.check_writable(Path(path))


def _decode(
    options: Generate,
    job: setup.Job,
    samples: Sequence[_Sample],
    todo: Sequence[int],
    results: requests.Results | None,
) -> list[_Decoded]:
    """Decodes what is not finished with the drafter, and plainly too if that is asked for."""
    target, drafter = setup.load(job, options)
    job, drafter = costs.settle(job, options, target, drafter, len(todo))
    keys = setup.sample_keys(options.seed, len(job.requests), options.num_samples)
    prompts = [job.prompts[samples[index].request] for index in todo]
    # Without a drafter the first run is the plain one.
    runs: list[tuple[str, DecodeConfig, Drafter | None]] = [(job.drafter, job.config, drafter)]
    if options.compare:
        plain = dataclasses.replace(job.config, budget=1, costs=None, look_ahead=False)
        runs.append(("none", plain, None))
    keys = keys[np.array(todo)]
    decoded: list[_Decoded] = []
    for name, config, used in runs:
        with report.progress(name, len(todo)) as advance:

            def on_batch(places, answers, advance=advance, save=not decoded):
                advance(places, answers)
                if save and results:
                    results.write(
                        _record(job, samples[todo[place]], answer, options.stop)
                        for place, answer in zip(places, answers, strict=True)
                    )

            answers, stats = generate(
                target,
                prompts,
                keys,
                config,
                used,
                batch_size=options.batch_size,
                on_batch=on_batch,
            )
        decoded.append(_Decoded(name, config, answers, stats))
    return decoded


def _record(
    job: setup.Job, sample: _Sample, answer: Answer, stops: Sequence[str]
) -> dict[str, Any]:
    """The result of one sample."""
    ending = text.cut_at_stop(job.codec, answer.tokens.tolist(), stops)
    record = {
        "id": job.requests[sample.request].id,
        "text": ending.text,
        "token_ids": answer.tokens[: ending.num_tokens].tolist(),
        "finish_reason": "stop" if ending.found or answer.stopped else "length",
        "steps": answer.steps,
        "passes": answer.passes,
    }
    return record if sample.seed is None else record | {"seed": sample.seed}


def _report(
    options: Generate, job: setup.Job, samples: Sequence[_Sample], decoded: Sequence[_Decoded]
) -> None:
    """Writes the summary, `--stats` and `--trace`."""
    summaries = [report.summary(run.name, run.config, run.stats) for run in decoded]
    report.table(summaries)
    if options.compare and decoded:
        difference = _first_difference(job, samples, *decoded)
        for summary in summaries:
            summary |= {"equal": difference is None, "first_difference": difference}
        report.equality(difference)
    if options.stats:
        requests.write_whole(options.stats, json.dumps(summaries, indent=2) + "\n")
    if options.trace:
        lines = (
            json.dumps(line)
            for sample, answer in zip(samples, decoded[0].answers if decoded else [], strict=True)
            for line in _trace(job, sample, answer, options.stop)
        )
        requests.write_whole(options.trace, "".join(f"{line}\n" for line in lines))


def _first_difference(
    job: setup.Job, samples: Sequence[_Sample], drafted: _Decoded, plain: _Decoded
) -> dict[str, Any] | None:
    for sample, one, other in zip(samples, plain.answers, drafted.answers, strict=True):
        if not compare.same_answer(one, other):
            pairs = zip(one.tokens, other.tokens, strict=False)
            shared = min(len(one.tokens), len(other.tokens))
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), shared)
            return {"id": job.requests[sample.request].id, "position": position} | {
                name: answer.tokens[position : position + 1].tolist()
                for name, answer in (("plain", one), ("drafted", other))
            }
    return None


def _trace(job: setup.Job, sample: _Sample, answer: Answer, stops: Sequence[str]):
    """Objects of `--trace`, in the order in which the tokens were committed."""
    record = _record(job, sample, answer, stops)
    name = {key: record[key] for key in ("id", "seed") if key in record}
    trace = answer.trace
    positions = range(len(record["token_ids"]))
    for position in sorted(positions, key=lambda p: int(trace.step[p])):
        yield name | {
            "position": position,
            "token": int(answer.tokens[position]),
            "step": int(trace.step[position]),
            "pass": int(trace.pass_[position]),
            "confidence": float(trace.confidence[position]),
        }
