"""`spot-jax bench`."""

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spot_jax import bundled, compare, convert, requests
from spot_jax.commands import costs, plots, report, setup
from spot_jax.commands.options import Bench, DecodeOptions
from spot_jax.commands.verify import EPSILON
from spot_jax.generate import Answer, Stats, generate
from spot_jax.models.target import TargetModel

NAMES = ("target", "task", "rule", "temperature", "drafter", "budget")
# Fields in which two runs must agree for their cells to stand in one table.
SETTINGS = ("requests", "max_new_tokens", "look_ahead", "seed", "dtype", "environment")
PLAIN, ORACLE = "none", "oracle"


class Cell(NamedTuple):
    """One line of results to be: its `NAMES`, and how it is decoded."""

    key: tuple[Any, ...]
    options: DecodeOptions
    job: setup.Job


def run(options: Bench) -> int:
    """Decodes what `--out` does not hold yet, and shows it all."""
    _check(options)
    if options.cost:
        return costs.bench(options)
    cells = list(_cells(options))
    records = _read(options, cells)
    done = {_key(record) for record in records}
    todo = [cell for cell in cells if cell.key not in done]
    if len(todo) < len(cells):
        setup.note(f"{len(cells) - len(todo)} of {len(cells)} cells are in {options.out} already")
    setup.use_cache(options.no_cache)
    with report.progress("cells", len(todo)) as advance, _writer(options) as write:
        for group in _groups(todo, cells):
            for record in _run_group(options, group, done):
                records.append(record)
                write(record)
                advance([0], [])
    wanted = {cell.key for cell in cells}
    report.bench_tables([record for record in records if _key(record) in wanted])
    if options.plot:
        for path in plots.draw(records, Path(options.plot)):
            print(path, file=sys.stderr)
    return int(any(record["verdict"] == "DIFFERENT" for record in records))


def _check(options: Bench) -> None:
    setup.check_seed(options.seed)
    if options.count is not None and options.count < 1:
        raise ValueError(f"--count must be at least 1, got {options.count}")
    for name in ("drafters", "budgets", "temperatures", "rules"):
        if not getattr(options, name):
            raise ValueError(f"--{name} is empty")
    if options.out:
        requests.check_writable(Path(options.out))
    if options.plot:
        plots.check()


def _cells(options: Bench) -> Iterator[Cell]:
    """All cells in the order in which they run, checked: plain decoding before what it judges."""
    models = options.models or (str(bundled.bundled_target()),)
    tasks = options.tasks or tuple(map(str, bundled.bundled_tasks()))
    drafters = [name for name in dict.fromkeys(options.drafters) if name != PLAIN]
    for paths, suffix in ((models, ""), (tasks, ".jsonl"), (drafters, ".json")):
        names = [_name(path, suffix) for path in paths]
        if len(set(names)) < len(names):
            raise ValueError(f"two of {', '.join(paths)} have one name")
    for model, rule, temperature, task in itertools.product(
        models, options.rules, options.temperatures, tasks
    ):
        pairs = [(PLAIN, 1), *itertools.product(drafters, dict.fromkeys(options.budgets))]
        for drafter, budget in pairs:
            decoding = DecodeOptions(
                input=task,
                model=None if not options.models else model,
                drafter=PLAIN if drafter == ORACLE else drafter,
                budget=None if drafter in (PLAIN, ORACLE) else budget,
                rule=rule,
                temperature=temperature,
                cache=options.cache,
                look_ahead=options.look_ahead and drafter not in (PLAIN, ORACLE),
                max_new_tokens=options.max_new_tokens,
                dtype=options.dtype,
                seed=options.seed,
            )
            job = setup.prepare(decoding)
            if drafter == ORACLE:
                if budget < 2:
                    raise ValueError(f"--budgets {budget}: drafting needs 2 or more")
                config = dataclasses.replace(
                    job.config, budget=budget, look_ahead=options.look_ahead
                )
                job = job._replace(config=config)
            names = (
                _name(model),
                _name(task, ".jsonl"),
                rule,
                temperature,
                _name(drafter, ".json"),
            )
            yield Cell((*names, budget), decoding, _first(job, options.count))


def _name(path: str, suffix: str = "") -> str:
    return Path(path).name.removesuffix(suffix)


def _first(job: setup.Job, count: int | None) -> setup.Job:
    return job._replace(requests=job.requests[:count], prompts=job.prompts[:count])


def _groups(todo: list[Cell], cells: list[Cell]) -> Iterator[list[Cell]]:
    """Cells of one target, rule, temperature and task, the plain one first, if any is to run."""
    wanted = {cell.key[:4] for cell in todo}
    for name, group in itertools.groupby(cells, key=lambda cell: cell.key[:4]):
        if name in wanted:
            yield list(group)


def _run_group(options: Bench, group: list[Cell], done) -> Iterator[dict[str, Any]]:
    plain: list[Answer] | None = None
    for cell in group:
        if cell.key in done and plain is not None:
            continue
        target = _target(cell.job.directory, options.dtype)
        name, budget = cell.key[4:]
        drafter = None if name in (PLAIN, ORACLE) else setup.load_drafter(cell.job)
        answers, stats = generate(
            target,
            cell.job.prompts,
            setup.sample_keys(options.seed, len(cell.job.prompts)),
            cell.job.config,
            drafter,
            batch_size=options.batch_size,
            order_of=plain if name == ORACLE else None,
        )
        if plain is None:
            plain = answers
        if cell.key not in done:
            yield _record(options, cell, plain, answers, stats)


@functools.lru_cache(maxsize=1)
def _target(directory: Path, dtype: str) -> TargetModel:
    return convert.load_target(directory, dtype=dtype)


def _record(options: Bench, cell: Cell, plain, answers, stats: Stats) -> dict[str, Any]:
    """A line of results. What is neither equal nor a tie has no figures."""
    job = cell.job
    divergence = compare.first_divergence(
        plain,
        answers,
        [len(prompt) for prompt in job.prompts],
        setup.sample_keys(options.seed, len(job.prompts)),
        job.config,
        job.target_config,
    )
    verdict = "EQUAL"
    if divergence is not None:
        verdict = "TIE" if divergence.margin < EPSILON[options.dtype] else "DIFFERENT"
    figures: dict[str, Any] = {
        "equal": sum(map(compare.same_answer, plain, answers)),
        "margin": divergence.margin if divergence else None,
    }
    if verdict != "DIFFERENT":
        figures |= {
            "tokens": stats.tokens,
            "steps": stats.steps,
            "passes": stats.passes,
            "steps_per_pass": round(stats.steps_per_pass, 4),
            "tokens_per_pass": round(stats.tokens / max(stats.passes, 1), 4),
            "tokens_per_second": round(stats.tokens_per_second, 3),
            "compile_seconds": round(stats.compile_seconds, 3),
        }
    return (
        dict(zip(NAMES, cell.key, strict=True))
        | {"verdict": verdict}
        | figures
        | _settings(options, len(job.prompts))
    )


def _settings(options: Bench, num_requests: int) -> dict[str, Any]:
    return {
        "requests": num_requests,
        "max_new_tokens": options.max_new_tokens,
        "look_ahead": options.look_ahead,
        "seed": options.seed,
        "dtype": options.dtype,
        "environment": setup.environment() | {"batch_size": options.batch_size},
    }


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in NAMES)


def _read(options: Bench, cells: list[Cell]) -> list[dict[str, Any]]:
    """Results that an earlier run has left; they must have been made under the same settings."""
    path = Path(options.out) if options.out else None
    if path is None or not path.exists():
        return []
    sizes = {cell.key: len(cell.job.prompts) for cell in cells}
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
            key = _key(record)
            given = {name: record[name] for name in SETTINGS}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: no result of this command: {error}") from error
        here = _settings(options, sizes[key] if key in sizes else given["requests"])
        wrong = [name for name in SETTINGS if given[name] != here[name]]
        if wrong:
            raise ValueError(
                f"{where}: {wrong[0]} was {given[wrong[0]]}, now it is {here[wrong[0]]}: "
                "use another --out"
            )
        records.append(record)
    return records


@contextlib.contextmanager
def _writer(options: Bench):
    """Gives the function that writes a record, at once, to `--out` or standard output."""
    if not options.out:
        yield lambda record: print(json.dumps(record), flush=True)
        return
    with open(options.out, "a", encoding="utf-8") as file:

        def write(record):
            file.write(json.dumps(record) + "\n")
            file.flush()

        yield write
