"""`bench --cost`, its file, and `--budget auto`, on a tiny random pair and made-up times."""

import json

import pytest

from spot_jax import bundled, cli, costs_io
from spot_jax.commands import costs as costs_command
from spot_jax.commands import setup
from spot_jax.measure import Times
from tests import pair

TABLE = {
    "target": "home",
    "rule": "confidence",
    "temperature": 0.0,
    "dtype": "float32",
    "batch_size": 16,
    "context": 256,
    "sizes": [1, 2, 4],
    "evaluate_ms": [5, 5.1, 5.2],
    "draft_ms": {"spot": [0, 0.1, 0.2]},
    "environment": {"device": "1 x made up"},
}
SMALL = ["--max-new-tokens", "12", "--budget", "auto"]
PLAIN_NOTE = "no draft of spot can pay here: decoding plainly"


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    zoo = tmp_path_factory.mktemp("zoo")
    pair.write_pair(zoo)
    return zoo


@pytest.fixture(autouse=True)
def bundle(zoo, monkeypatch, tmp_path):
    monkeypatch.setattr(bundled, "ZOO", zoo)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def spot_jax(capsys):
    def run(*args):
        status = cli.main([str(arg) for arg in args])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def times(monkeypatch):
    """Makes the measurement up: passes that take as long as they have states, but see `flat`."""
    made = {"flat": False, "asked": []}

    def measure(target, config, drafters, sizes, num_rows, prompt_width):
        made["asked"].append((*drafters, tuple(sizes), num_rows, prompt_width))
        evaluate = [1.0 if made["flat"] else float(size) for size in sizes]
        return Times(evaluate, {name: [0.0] * len(sizes) for name in drafters})

    monkeypatch.setattr(costs_command, "measure", measure)
    return made


def write(path, *changes):
    path.write_text("".join(json.dumps(TABLE | change) + "\n" for change in changes))
    return path


# The file.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "is empty"),
        ("[1]\n", "line 1: must be a JSON object, found list"),
        ("{\n", "line 1: no JSON"),
        (TABLE | {"extra": 1}, "line 1: has the unknown key extra: target, rule"),
        ({k: v for k, v in TABLE.items() if k != "dtype"}, "line 1: has no dtype"),
        (TABLE | {"batch_size": 1.5}, "batch_size must be of type int, found 1.5"),
        (TABLE | {"temperature": True}, "temperature must be a finite number, found True"),
        (TABLE | {"sizes": [1, 2, "4"]}, "sizes must be whole numbers"),
        (TABLE | {"sizes": [1, 4, 8]}, "sizes must ascend from 1 and 2"),
        (TABLE | {"sizes": [1, 4, 2]}, "sizes must ascend from 1 and 2"),
        (TABLE | {"evaluate_ms": [1, 2]}, "evaluate_ms must have 3 times, one a size, found 2"),
        (TABLE | {"evaluate_ms": [1, 0, 2]}, "evaluate_ms must be above 0"),
        (TABLE | {"evaluate_ms": [1, float("nan"), 2]}, "evaluate_ms must be a finite number"),
        (TABLE | {"evaluate_ms": [1, None, 2]}, "evaluate_ms"),
        (TABLE | {"draft_ms": [0, 1, 2]}, "draft_ms must be of type dict"),
        (TABLE | {"draft_ms": {"spot": 3}}, "draft_ms of spot must be of type list"),
        (TABLE | {"draft_ms": {"spot": [0, -1, 2]}}, "draft_ms of spot must begin with 0 and be 0"),
        (TABLE | {"draft_ms": {"spot": [1, 1, 2]}}, "draft_ms of spot must begin with 0 and be 0"),
        (
            TABLE | {"draft_ms": {"chain": [0, 1, 2]}},
            "no costs of home with the drafter spot, only",
        ),
        (TABLE | {"target": "away"}, "no costs of home with the drafter spot, only of away with"),
    ],
)
def test_a_wrong_file_is_one_line(spot_jax, tmp_path, monkeypatch, line, message):
    monkeypatch.setattr(setup, "load", None)
    path = tmp_path / "costs.jsonl"
    path.write_text(line if isinstance(line, str) else json.dumps(line) + "\n")
    status, out, err = spot_jax("generate", "hi", *SMALL, "--costs", path)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"spot-jax: error: {path}") and message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "many"], "--budget many is neither a whole number nor auto"),
        (["--budget", "4.5"], "--budget 4.5 is neither a whole number nor auto"),
        (["--budget", "auto", "--costs", "absent"], "absent is missing"),
        (["--costs", "x"], "--costs is what --budget auto goes by: pass that too"),
        (["--budget", "4", "--costs", "x"], "--costs is what --budget auto goes by"),
        (["--budget", "auto", "--drafter", "none"], "--budget auto has no effect with --drafter"),
        (["--budget", "auto", "--look-ahead"], "--budget auto does not go with --look-ahead"),
    ],
)
def test_wrong_options_are_one_line(spot_jax, options, message):
    for command in ("generate", "verify"):
        status, out, err = spot_jax(command, "hi", *options)
        assert (status, out) == (2, "") and err.count("\n") == 1
        assert err.startswith("spot-jax: error: ") and message in err


# Decoding.


@pytest.mark.slow
def test_costs_of_a_file_choose_every_pass(spot_jax, tmp_path):
    path = write(tmp_path / "costs", {"temperature": 0.5}, {}, {"dtype": "bfloat16"})
    stats = tmp_path / "stats"
    args = [*SMALL, "--costs", path, "--batch-size", "16"]
    status, _, err = spot_jax("generate", "hello", *args, "--compare", "--stats", stats)
    assert status == 0 and "equal: the same tokens in the same steps" in err
    # The line that fits is taken.
    assert "note" not in err
    spot, plain = json.loads(stats.read_text())
    assert spot["passes_at"].keys() == {"1", "2", "4"} and "passes_at" not in plain
    assert sum(spot["passes_at"].values()) == spot["passes"] < plain["passes"]
    assert "passes by the states checked in them: " in err and "% of 4" in err
    status, out, err = spot_jax("verify", "hello", *args, "--json", "--temperature", "1")
    result = json.loads(out)
    assert (status, result["verdict"], result["same_shape"]) == (0, "EQUAL", False)
    assert result["accepted_states"] > 0 and result["passes"] < result["passes_plain"]
    assert "temperature was 0.5, here it is 1.0" in err


def test_where_nothing_pays_it_decodes_plainly(spot_jax, tmp_path):
    path = write(tmp_path / "costs", {"evaluate_ms": [5, 10, 20]})
    stats = tmp_path / "stats"
    status, _, err = spot_jax("generate", "hello", *SMALL, "--costs", path, "--stats", stats)
    (summary,) = json.loads(stats.read_text())
    assert status == 0 and PLAIN_NOTE in err
    assert (summary["drafter"], summary["budget"]) == ("none", 1)
    assert summary["passes"] == summary["steps"]


def test_without_a_file_it_is_measured_once(spot_jax, tmp_path, times, monkeypatch):
    monkeypatch.setattr(setup, "use_cache", lambda disabled: None)  # Other tests go on using it.
    args = ["generate", "hello", *SMALL]
    for run in range(2):
        status, _, err = spot_jax(*args)
        assert status == 0 and PLAIN_NOTE in err
        assert ("measuring what passes" in err) == (run == 0)
    # Drafting is not measured where passes alone take too long.
    assert times["asked"] == [((1, 2, 4, 8, 16, 32), 1, 384)]
    (kept,) = (tmp_path / "cache" / "spot-jax" / "costs").iterdir()
    (table,) = costs_io.read_tables(kept)
    assert (table.target, table.batch_size, table.evaluate_ms[2]) == ("home", 1, 4000.0)
    # What is damaged, or was measured of something else, is measured again.
    kept.write_text("{")
    for more in ([], ["--temperature", "1"], ["--drafter", "chain"], ["--no-cache"]):
        assert "measuring what passes" in spot_jax(*args, *more)[2]
    assert len(times["asked"]) == 5
    assert len(list(kept.parent.iterdir())) == 3


def test_both_are_measured_where_drafts_may_pay(spot_jax, times, monkeypatch):
    times["flat"] = True
    asked = []
    monkeypatch.setattr(
        "spot_jax.commands.generate.generate",
        lambda target, prompts, keys, config, drafter, **_: (
            asked.append((config, drafter)) or (_ for _ in ()).throw(ValueError("enough"))
        ),
    )
    status, _, err = spot_jax("generate", "hello", *SMALL)
    assert status == 2 and "enough" in err and PLAIN_NOTE not in err
    assert times["asked"][1] == ("spot", (1, 2, 4, 8, 16, 32), 1, 384)
    ((config, drafter),) = asked
    assert config.costs.sizes == (1, 2, 32) and config.budget == 32 and drafter is not None


# bench --cost.


def test_bench_measures_every_model_rule_and_temperature(spot_jax, tmp_path, times):
    times["flat"] = True
    out = tmp_path / "costs"
    status, printed, told = spot_jax(
        "bench", "--cost", "--budgets", 8, 4, "--temperatures", 0, 1, "--drafters", "chain",
        "spot", "oracle", "--out", out, "--batch-size", 3, "--context", 100,
    )  # fmt: skip
    assert (status, printed) == (0, "")
    tables = costs_io.read_tables(out)
    assert [(t.target, t.temperature) for t in tables] == [("home", 0.0), ("home", 1.0)]
    assert times["asked"] == [("chain", "spot", (1, 2, 4, 8), 3, 100)] * 2
    assert tables[0].draft_ms == {"chain": [0.0] * 4, "spot": [0.0] * 4}
    assert tables[0].environment.keys() >= {"device", "jax", "jaxlib", "spot-jax"}
    assert "home, confidence, temperature 1, float32, batch of 3" in told and "even at" in told
    costs = tables[0].costs("spot")
    assert costs.sizes == (1, 2, 4, 8) and costs.evaluate == (1.0,) * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "x"], "--tasks has no effect with --cost"),
        (["--look-ahead"], "--look-ahead has no effect with --cost"),
        (["--plot", "x"], "--plot has no effect with --cost"),
        (["--context", "0"], "--context 0 must be 1 or more"),
        (["--context", "500"], "within the 512 positions of the target"),
        (["--drafters", "chian"], "--drafter chian is no directory, no .json file and none of"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--budgets", "1"], "--budgets 1: drafting needs 2 or more"),
        (["--out", "missing/x"], "missing"),
    ],
)
def test_wrong_options_of_bench_are_one_line(spot_jax, times, options, message):
    status, out, err = spot_jax("bench", "--cost", *options)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1
    assert not times["asked"]
