"""Costs on this device: `spot-jax bench --cost`, and what `--budget auto` goes by."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import jax

from spot_jax import convert, requests
from spot_jax.commands import report, setup
from spot_jax.commands.options import Bench, DecodeOptions
from spot_jax.costs_io import Table, line_of, read_tables
from spot_jax.draft import Drafter
from spot_jax.json_io import CheckpointError
from spot_jax.measure import SIZES, Times, measure
from spot_jax.models.target import TargetModel
from spot_jax.rule_io import rule_name

# Positions that `--budget auto` measures with at least, and how many are behind the prompt.
CANVAS, ROOM = 512, 128
NOT_MEASURED = ("none", "oracle")


def bench(options: Bench) -> int:
    """Measures every model under every rule and temperature, with all drafters."""
    for name in ("tasks", "count", "plot", "look_ahead"):
        if getattr(options, name):
            raise ValueError(
                f"--{name.replace('_', '-')} has no effect with --cost: nothing is decoded"
            )
    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}")
    if min(options.budgets) < 2:
        raise ValueError(f"--budgets {min(options.budgets)}: drafting needs 2 or more")
    sizes = (1, 2, *(size for size in sorted(set(options.budgets)) if size > 2))
    todo = list(_jobs(options))
    setup.use_cache(options.no_cache)
    tables = []
    with report.progress("tables", len(todo)) as moved:
        for jobs in todo:
            target = convert.load_target(jobs[0].directory, dtype=options.dtype)
            drafters = dict(map(_drafter, jobs)) if jobs[0].drafter != "none" else {}
            times = measure(
                target, jobs[0].config, drafters, sizes, options.batch_size, options.context
            )
            tables.append(
                _table(jobs[0], options.dtype, sizes, times, options.batch_size, options.context)
            )
            moved([0], [])
    lines = "".join(map(line_of, tables))
    if options.out:
        requests.write_whole(options.out, lines)
    else:
        print(lines, end="", flush=True)
    for table in tables:
        report.cost_table(table)
    return 0


def _jobs(options: Bench) -> Iterator[list[setup.Job]]:
    """What each table is of, checked: a job for every drafter."""
    names = [name for name in dict.fromkeys(options.drafters) if name not in NOT_MEASURED]
    short = [name_of(name) for name in names]
    if len(set(short)) < len(short):
        raise ValueError(f"two of the drafters {', '.join(names)} have one name")
    for model, rule, temperature in itertools.product(
        options.models or (None,), options.rules, options.temperatures
    ):
        jobs = []
        for drafter in names or ["none"]:
            asked = DecodeOptions(
                prompt=("a",),
                model=model,
                drafter=drafter,
                rule=rule,
                temperature=temperature,
                cache=options.cache,
                max_new_tokens=options.max_new_tokens,
                dtype=options.dtype,
            )
            jobs.append(setup.prepare(asked))
        room = jobs[0].target_config.max_position
        if options.context < 1 or options.context + options.max_new_tokens > room:
            raise ValueError(
                f"--context {options.context} must be 1 or more and, with --max-new-tokens "
                f"{options.max_new_tokens}, within the {room} positions of the target"
            )
        yield jobs


def _drafter(job: setup.Job) -> tuple[str, tuple[Drafter, int]]:
    drafter = setup.load_drafter(job)
    assert drafter is not None
    return name_of(job.drafter), (drafter, job.config.num_top)


def _table(job: setup.Job, dtype: str, sizes, times: Times, batch_size: int, context: int) -> Table:
    def milliseconds(seconds):
        return [round(1e3 * second, 4) for second in seconds]

    return Table(
        target=job.directory.name,
        rule=rule_name(job.config.rule),
        temperature=job.config.sampling.temperature,
        dtype=dtype,
        batch_size=batch_size,
        context=context,
        sizes=list(sizes),
        evaluate_ms=milliseconds(times.evaluate),
        draft_ms={name: milliseconds(seconds) for name, seconds in times.draft.items()},
        environment=setup.environment(),
    )


def given(job: setup.Job, options: DecodeOptions) -> setup.Job:
    """The job with the costs that `--costs` has of its target and drafter, the nearest of several.

    Needs no device.
    """
    if options.costs is None:
        return job
    path = options.costs
    name, tables = name_of(job.drafter), read_tables(path)
    found = [t for t in tables if t.target == job.directory.name and name in t.draft_ms]
    if not found:
        known = {f"{t.target} with {', '.join(t.draft_ms) or 'none'}" for t in tables}
        raise CheckpointError(
            f"{path}: has no costs of {job.directory.name} with the drafter {name}, only of "
            + "; ".join(sorted(known))
        )
    here = {
        "dtype": options.dtype,
        "rule": rule_name(job.config.rule),
        "temperature": job.config.sampling.temperature,
        "batch_size": options.batch_size,
    }

    def differing(table: Table) -> list[str]:
        return [key for key, value in here.items() if getattr(table, key) != value]

    table = min(found, key=lambda table: len(differing(table)))
    for key in differing(table):
        setup.note(f"{path}: {key} was {getattr(table, key)}, here it is {here[key]}")
    return _with_costs(job, table)


def settle(
    job: setup.Job,
    options: DecodeOptions,
    target: TargetModel,
    drafter: Drafter | None,
    num_prompts: int,
) -> tuple[setup.Job, Drafter | None]:
    """The job with costs where `--budget auto` asks for them, measured if they are not known."""
    if options.budget != "auto" or job.config.costs is not None or drafter is None:
        return job, drafter
    num_rows = max(1, min(options.batch_size, num_prompts))
    job = _with_costs(job, _measured(job, options, target, drafter, num_rows))
    return job, None if job.drafter == "none" else drafter


def _with_costs(job: setup.Job, table: Table) -> setup.Job:
    config = dataclasses.replace(
        job.config, costs=table.costs(name_of(job.drafter)), budget=table.sizes[-1]
    ).settled(job.target_config)
    if config.budget == 1:
        setup.note(
            f"by the measured costs no draft of {job.drafter} can pay here: decoding plainly"
        )
        return job._replace(drafter="none", config=config)
    return job._replace(config=config)


def _measured(
    job: setup.Job, options: DecodeOptions, target: TargetModel, drafter: Drafter, num_rows: int
) -> Table:
    """From the user's cache folder, or measured now and left there."""
    # Powers of two, so that few requests need another measurement.
    longest = max(map(len, job.prompts)) + job.config.max_new_tokens
    canvas = min(_power(max(longest, CANVAS)), target.config.max_position)
    num_rows, room = _power(num_rows), min(ROOM, canvas // 2)
    width, config = canvas - room, dataclasses.replace(job.config, max_new_tokens=room)
    # Times depend on shapes alone, not on the weights.
    shapes = jax.tree.map(lambda x: (jax.numpy.shape(x), str(jax.numpy.result_type(x))), drafter)
    parts = (job.directory.name, job.target_config, options.dtype, config, job.drafter, shapes)
    digest = hashlib.sha256(
        repr((*parts, num_rows, width, SIZES, setup.environment())).encode()
    ).hexdigest()[:16]
    path = setup.cache_directory().parent / "costs" / f"{digest}.json"
    cached = not setup.cache_disabled(options.no_cache)
    if cached and path.exists():
        try:
            return read_tables(path)[0]
        except CheckpointError as error:
            setup.note(f"{error}: measuring again")
    setup.note("measuring what passes and drafts take on this device")
    name = name_of(job.drafter)
    times = measure(target, config, {}, SIZES, num_rows, width)
    table = _table(job, options.dtype, SIZES, times, num_rows, width)
    # Where passes alone take too long, drafting need not be measured.
    if table.costs(name).in_use(SIZES[-1], target.config.block_length).sizes[-1] > 1:
        drafters = {name: (drafter, job.config.num_top)}
        times = measure(target, config, drafters, SIZES, num_rows, width)
        table = _table(job, options.dtype, SIZES, times, num_rows, width)
    if cached:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            requests.write_whole(path, line_of(table))
        except (OSError, ValueError) as error:
            setup.note(f"costs are not kept: {error}")
    return table


def name_of(drafter: str) -> str:
    """Of a drafter in a table."""
    return Path(drafter).name.removesuffix(".json")


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
