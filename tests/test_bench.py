"""`spot-jax bench` on a tiny random pair: cells, resuming, verdicts, tables and pictures."""

import json

import numpy as np
import pytest

from spot_jax import bundled, cli, ranks_io
from spot_jax.commands import bench, plots, report
from spot_jax.draft import RankOptions
from tests import pair

GRID = ["--budgets", "3", "--temperatures", "0", "--max-new-tokens", "6", "--batch-size", "2"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    zoo = tmp_path_factory.mktemp("zoo")
    pair.write_pair(zoo)
    return zoo


@pytest.fixture(autouse=True)
def bundle(zoo, monkeypatch):
    monkeypatch.setattr(bundled, "ZOO", zoo)


@pytest.fixture
def spot_jax(capsys):
    def run(*args):
        status = cli.main(["bench", *map(str, args)])
        return status, *capsys.readouterr()

    return run


def test_every_cell_is_a_line_and_a_stopped_run_goes_on(spot_jax, tmp_path, monkeypatch):
    out = tmp_path / "cells.jsonl"
    options = (*GRID, "--drafters", "chain", "spot", "oracle", "--out", out)
    status, printed, told = spot_jax(*options)
    assert status == 0 and printed == ""
    whole = out.read_text()
    records = [json.loads(line) for line in whole.splitlines()]
    assert [(r["task"], r["drafter"], r["budget"]) for r in records] == [
        (task, *cell)
        for task in ("count", "spell")
        for cell in (("none", 1), ("chain", 3), ("spot", 3), ("oracle", 3))
    ]
    for record in records:
        assert record["target"] == "home" and record["rule"] == "confidence"
        assert record["verdict"] == "EQUAL" and record["equal"] == record["requests"] == 2
        assert record["steps"] == records[0]["steps"] if record["task"] == "count" else True
        assert record["environment"]["batch_size"] == 2 and record["environment"]["jax"]
    for first in (0, 4):
        plain, chain, _, oracle = (r["passes"] for r in records[first : first + 4])
        assert plain >= chain and plain > oracle
        assert records[first]["steps_per_pass"] == 1.0
    assert "home, confidence, temperature 0: steps per pass" in told and "4/4" in told
    # Killed in the second task: only what is missing is decoded, to the same figures.
    kept = whole.splitlines(keepends=True)[:6]
    out.write_text("".join(kept))
    ran = []
    real = bench.generate
    monkeypatch.setattr(bench, "generate", lambda *a, **k: ran.append(a) or real(*a, **k))
    status, _, told = spot_jax(*options)
    assert status == 0 and len(ran) == 3 and "6 of 8 cells" in told
    again = [json.loads(line) for line in out.read_text().splitlines()]
    exact = [n for n in records[0] if n not in ("tokens_per_second", "compile_seconds")]
    assert [[r[n] for n in exact] for r in again] == [[r[n] for n in exact] for r in records]
    before = out.read_text()
    status, _, told = spot_jax(*options, "--seed", 1)
    assert status == 2 and "line 1: seed was 0, now it is 1: use another --out" in told
    assert out.read_text() == before


def test_rank_formulas_are_a_drafter(spot_jax, tmp_path):
    file = tmp_path / "first-two.json"
    ranks_io.save_ranks(
        file,
        [(((0, 0),),), (((0, 0),), ((1, 0),))],
        [0.9, 0.5],
        RankOptions(),
        method="coverage",
        block_length=8,
        calibrated_on={"targets": ["home"], "temperatures": [0.0], "blocks": 1, "points": 2},
    )
    status, out, _ = spot_jax(*GRID, "--drafters", file, "--count", 1)
    records = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and {r["verdict"] for r in records} == {"EQUAL"}
    assert [r["drafter"] for r in records] == ["none", "first-two"] * 2
    assert sum(r["passes"] for r in records[1::2]) < sum(r["passes"] for r in records[::2])
    file.write_text(file.read_text().replace("0.9", "2"))
    status, _, told = spot_jax(*GRID, "--drafters", file)
    assert status == 2 and "formula 0 has the share 2" in told


def test_cells_may_look_ahead(spot_jax, tmp_path):
    out = tmp_path / "cells.jsonl"
    grid = (*GRID[2:], "--budgets", 8, "--drafters", "chain", "oracle", "--count", 1, "--out", out)
    assert spot_jax(*grid, "--look-ahead")[0] == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {r["verdict"] for r in records} == {"EQUAL"} and all(r["look_ahead"] for r in records)
    status, _, told = spot_jax(*grid)
    assert status == 2 and "line 1: look_ahead was True, now it is False: use another" in told


def test_a_different_answer_has_no_figures(spot_jax, monkeypatch):
    real = bench.generate

    def lying(target, prompts, keys, config, drafter=None, **options):
        answers, stats = real(target, prompts, keys, config, drafter, **options)
        if drafter is not None:
            answers = [a._replace(steps=a.steps + 1) for a in answers]
        return answers, stats

    monkeypatch.setattr(bench, "generate", lying)
    status, printed, told = spot_jax(*GRID, "--drafters", "chain", "--count", 1)
    assert status == 1 and "DIFFERENT" in told
    for line in printed.splitlines():
        record = json.loads(line)
        assert record["requests"] == 1
        assert (record["verdict"] == "EQUAL") == (record["drafter"] == "none")
        assert ("passes" in record) == ("steps_per_pass" in record) == (record["drafter"] == "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "chian"], "--drafter chian is no directory, no .json file and none of"),
        (["--budgets", "1"], "drafting needs 2 or more"),
        (["--rules", "n:0"], "n:0"),
        (["--tasks", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--drafters", "a/x.json", "b/x.json"], "two of a/x.json, b/x.json have one name"),
        (["--tasks", "a/x.jsonl", "b/x.jsonl"], "two of a/x.jsonl, b/x.jsonl have one name"),
        (["--count", "0"], "--count must be at least 1"),
        (["--out", "missing/x.jsonl"], "missing"),
    ],
)
def test_wrong_options_are_errors_before_anything_runs(spot_jax, monkeypatch, options, message):
    monkeypatch.setattr(bench, "generate", None)
    status, printed, told = spot_jax(*options)
    assert status == 2 and printed == "" and message in told


def test_a_file_of_other_lines_is_an_error(spot_jax, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "generate", None)
    out = tmp_path / "cells.jsonl"
    out.write_text('{"target": "home"}\n')
    status, _, told = spot_jax(*GRID, "--out", out)
    assert status == 2 and "line 1: no result of this command" in told


def record(**changes):
    return {
        "target": "home",
        "task": "add",
        "rule": "threshold:0.9",
        "temperature": 0.0,
        "drafter": "chain",
        "budget": 4,
        "verdict": "EQUAL",
        "equal": 2,
        "requests": 2,
        "steps": 30,
        "passes": 20,
        "tokens": 10,
        "steps_per_pass": 1.5,
        "tokens_per_second": 5.0,
    } | changes


def test_the_whole_is_the_ratio_of_sums(capsys):
    report.bench_tables([record(), record(task="sort", steps=30, passes=10, steps_per_pass=3.0)])
    told = capsys.readouterr().err
    row = next(line for line in told.splitlines() if "chain" in line)
    assert [cell for cell in row.split() if "." in cell] == ["1.50", "3.00", "2.00", "5.0"]


def test_pictures_are_drawn_of_cells_that_have_figures(tmp_path):
    pytest.importorskip("matplotlib")
    records = [record(drafter="none", budget=1, steps_per_pass=1.0)]
    records += [record(drafter=d, budget=n) for d in ("chain", "oracle") for n in (4, 8)]
    failed = record(drafter="spot", verdict="DIFFERENT")
    records.append({k: v for k, v in failed.items() if k not in ("passes", "steps_per_pass")})
    paths = list(plots.draw(records, tmp_path / "pictures"))
    assert [path.name for path in paths] == [
        "home-threshold-0.9-t0-steps-per-pass.png",
        "home-threshold-0.9-t0-tokens-per-second.png",
    ]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert np.all([p.parent == tmp_path / "pictures" for p in paths])
