"""The command line, on a tiny random pair in the place of the bundled one."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from spot_jax import bundled, cli, convert, drafter_io, text
from spot_jax.checkpoint import CheckpointError
from spot_jax.commands import generate as generate_command
from spot_jax.commands import setup
from spot_jax.commands import verify as verify_command
from spot_jax.commands.options import Generate
from spot_jax.commit import Threshold, TopN
from spot_jax.config import Sampling
from spot_jax.draft import ConfidenceSets, ConfidenceTree, SpotSets
from spot_jax.draft.tree import empty_tree
from spot_jax.generate import Answer, Stats, plan_batches
from spot_jax.rules import Factor, SubBlocks
from spot_jax.state import Trace
from tests import fixtures, pair

ROOT = Path(__file__).parent.parent
SMALL = ["--budget", "3", "--max-new-tokens", "12"]


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
    """Runs the command; returns exit status, standard output and standard error."""

    def run(*args):
        status = cli.main([str(arg) for arg in args])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def fake(monkeypatch):
    """Decodes by writing every prompt backwards, without a target; records what was asked."""
    calls = []

    def generate(target, prompts, keys, config, drafter=None, *, batch_size=16, on_batch=None):
        calls.append(prompts)
        answers = {}
        for batch in plan_batches([len(prompt) for prompt in prompts], 8, batch_size):
            done = [backwards(prompts[index]) for index in batch.indices]
            answers |= dict(zip(batch.indices, done, strict=True))
            if on_batch:
                on_batch(batch.indices, done)
        counts = [sum(answer[i] for answer in answers.values()) for i in (2, 3, 4, 5)]
        tokens = sum(len(answer.tokens) for answer in answers.values())
        stats = Stats(len(prompts), tokens, *counts, 1.0, 2.0)
        return [answers[index] for index in range(len(prompts))], stats

    monkeypatch.setattr(generate_command, "generate", generate)
    return calls


def backwards(prompt):
    tokens = np.array(prompt[::-1], np.int32)
    step = np.arange(len(tokens))
    return Answer(
        tokens, False, len(tokens), -(-len(tokens) // 2), 9, len(tokens) // 2,
        Trace(step, step // 2, -0.5 * np.ones(len(tokens), np.float32)),
    )  # fmt: skip


def write_jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_jsonl(written):
    return [json.loads(line) for line in written.splitlines()]


def ask(path, *prompts):
    """A file of requests by token ids."""
    return write_jsonl(path, *({"id": f"r{i}", "prompt_ids": p} for i, p in enumerate(prompts)))


# Options and help.


def test_help_is_quick_and_needs_no_jax():
    code = (
        "import sys\nfrom spot_jax import cli\n"
        "for args in (['--help'], ['generate', '--help'], ['generate', '--modle', 'x']):\n"
        "    status = cli.main(args)\n"
        "assert not {'jax', 'transformers', 'torch'} & sys.modules.keys()\nsys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "generate" in done.stdout and "--temperature" in done.stdout
    assert done.stderr == "spot-jax: error: unknown option --modle: did you mean --model?\n"


def test_a_reader_that_has_gone(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys\nfrom spot_jax import cli\nsys.exit(cli.main(['--help']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


BAD_OPTIONS = {
    "unknown option --temprature: did you mean --temperature?": ["hi", "--temprature", "1"],
    "unknown option --temp: did you mean --temperature?": ["hi", "--temp=1"],
    "unknown option --json: did you mean": ["hi", "--json"],
    "Error parsing --top-k": ["hi", "--top-k", "many"],
    "unknown sampler 'lada': did you mean llada?": ["hi", "--sampler", "lada"],
    "--sampler llada2: sampler llada2 has no number of steps": [
        "hi", "--sampler", "llada2", "--steps", "4",
    ],
    "--steps and --order-temperature are for samplers": ["hi", "--steps", "4"],
    "cache 'dual' does not fit block_causal attention": ["hi", "--cache", "dual"],
    "sub-block length must be at least 1": ["hi", "--sub-block", "0"],
    "invalid choice 'high' for argument '--confidence'": ["hi", "--confidence", "high"],
    "no prompt given": [],
    "2 prompts given: quote one": ["hi", "there"],
    "the prompt: the prompt is empty": [" "],
    "both a prompt and --input given": ["hi", "--input", "x"],
    "No such file or directory: 'absent.jsonl'": ["--input", "absent.jsonl"],
    "--model absent is not a directory": ["hi", "--model", "absent"],
    "--drafter spto is no directory, no .json file and none of none, chain": [
        "hi", "--drafter", "spto",
    ],
    "and none of none, chain, tree, spot: did you mean spot?": ["hi", "--drafter", "spto"],
    "--rule marign is none of confidence, left-to-right": ["hi", "--rule", "marign"],
    "--rule n:0: n must be at least 1": ["hi", "--rule", "n:0"],
    "--rule threshold:x: could not convert string to float": ["hi", "--rule", "threshold:x"],
    "--budget 8 has no effect with --drafter none": ["hi", "--budget", "8", "--drafter", "none"],
    "--budget 1: drafting needs 2 or more": ["hi", "--budget", "1"],
    "--look-ahead has no effect with --drafter none": [
        "hi", "--look-ahead", "--drafter", "none",
    ],
    "--compare needs a drafter": ["hi", "--compare", "--drafter", "none"],
    "temperature must be 0 or more, got -1.0": ["hi", "--temperature", "-1"],
    "temperature must be 0 or in [1e-6, 1e6], got inf": ["hi", "--temperature", "inf"],
    "in [1e-6, 1e6], got 1e-40": ["hi", "--temperature", "1e-40"],
    "budget must be at most 4096, got 1000000000": ["hi", "--budget", "1000000000"],
    "--model is empty": ["hi", "--model", ""],
    "--drafter is empty": ["hi", "--drafter="],
    "--output is empty": ["hi", "--output", ""],
    "--suppress: the vocabulary has 320 tokens": ["hi", "--suppress", "5", "--suppress", "320"],
    "--num-samples must be at most 65536": [
        "hi", "--temperature", "1", "--num-samples", "1099511627776",
    ],
    "--rule threshold:>=>0.5: could not convert": ["hi", "--rule", "threshold:>=>0.5"],
    "top_p must be in (0, 1], got 0.0": ["hi", "--top-p", "0"],
    "max_new_tokens must be at least 1": ["hi", "--max-new-tokens", "0"],
    "batch_size must be at least 1": ["hi", "--batch-size", "0"],
    "--num-samples: all samples are the same at temperature 0": ["hi", "--num-samples", "2"],
    "--num-samples must be at least 1": ["hi", "--num-samples", "0"],
    "--seed must be in 0..4294967295, got -1": ["hi", "--seed", "-1"],
    "--stop: the text is empty": ["hi", "--stop", ""],
    "absent/stats cannot be written": ["hi", "--stats", "absent/stats"],
    "--input, --output, --stats and --trace must be different files": [
        "--input", "same", "--output", "./same",
    ],
    "the prompt: prompt of 27 tokens and 500 new ones exceed the 512 positions": [
        "too long", "--max-new-tokens", "500",
    ],
    "mask token id 400 is outside the vocabulary": ["hi", "--mask-token-id", "400"],
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_bad_options_are_one_line(spot_jax, tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = spot_jax("generate", *BAD_OPTIONS[message])
    assert (status, out) == (2, "")
    assert err.startswith("spot-jax: error: ") and err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args", [[], ["genrate"], ["convert", "only-one"]])
def test_bad_commands_are_one_line(spot_jax, args):
    status, out, err = spot_jax(*args)
    assert (status, out) == (2, "") and err.count("\n") == 1


def test_damaged_models_and_drafters(spot_jax, tmp_path):
    shards = tmp_path / "shards"
    fixtures.write_hf(shards, shards=2)
    shard = shards / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    drafter = tmp_path / "drafter"
    shutil.copytree(bundled.bundled_drafter(), drafter)
    (drafter / "model.safetensors").write_bytes(b"junk")
    bare = tmp_path / "bare"
    fixtures.write_hf(bare, tokenizer=False)
    for options, message in (
        (["--model", shards], "model-00002-of-00002.safetensors: file is cut at"),
        (["--drafter", drafter], "model.safetensors is damaged"),
        (["--drafter", tmp_path], "drafter.json is missing"),
        (["--model", bare], "bare has no tokenizer: tokenizer.json is needed"),
        (["--model", tmp_path], "config.json is missing"),
    ):
        status, out, err = spot_jax("generate", "hi", *options)
        assert (status, out) == (2, "")
        assert err.splitlines()[-1].startswith("spot-jax: error: ") and message in err


def test_bad_requests_are_named(spot_jax, tmp_path):
    path = ask(tmp_path / "in", [1], [320])
    status, out, err = spot_jax("generate", "--input", path, "--output", tmp_path / "out")
    assert (status, out) == (2, "") and not (tmp_path / "out").exists()
    assert err == (
        f"spot-jax: error: {path}, line 2: token id 320 is outside the vocabulary of 320\n"
    )


def test_options_reach_the_decoder():
    def config(**options):
        return setup.prepare(Generate(prompt=("hi",), **options)).config

    assert config().budget == 16 and config().num_top == pair.ORDER.num_top
    assert config(drafter="none").budget == 1
    assert config(look_ahead=True).look_ahead and not config().look_ahead
    assert config(rule="left-to-right").rule == TopN(score="left_to_right")
    assert config(rule="n:3").rule == TopN(3)
    assert config(rule="threshold:0.8").rule == Threshold(0.8)
    assert config(rule="threshold:>=0.8").rule == Threshold(0.8, strict=False)
    assert config(rule="factor:2", sub_block=4).rule == SubBlocks(Factor(2.0), 4)
    assert not config(ignore_eos=True).stop_at_eos
    sdar = config(sampler="sdar")
    assert (sdar.rule, sdar.sampling.temperature) == (Threshold(0.85), 1.0)
    sdar = config(sampler="sdar", temperature=0.0, rule="n:2")
    assert (sdar.rule, sdar.sampling.temperature) == (TopN(2), 0.0)
    assert config(sampler="llada", steps=3).rule == TopN((3, 3, 2))
    sampling = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "confidence": "raw"}
    assert config(**sampling).sampling == Sampling(**sampling)
    job = setup.prepare(Generate(prompt=("a<|im_end|>",), raw_prompt=True))
    assert job.prompts == [text.encode_text(job.codec, "a<|im_end|>")]
    job = setup.prepare(Generate(prompt=("a<|im_end|>",), raw_prompt=True, parse_special=True))
    assert job.prompts[0][1:] == [fixtures.IM_END_ID]
    assert setup.prepare(Generate(prompt=("a",), block_length=4)).target_config.block_length == 4


def test_drafters_follow_the_rule(tmp_path, capsys):
    def job(**options):
        return setup.prepare(Generate(prompt=("hi",), **options))

    def loaded(**options):
        return setup.load(job(**options), Generate(prompt=("hi",), **options))[1]

    # The bundled drafter foresees single commits: without a wish, rules of sets have trees.
    assert job(rule="margin").drafter == "spot"
    assert job(rule="n:2").drafter == job(rule="threshold:0.9").drafter == "tree"
    assert job(rule="factor:1").drafter == "chain"
    assert "foresees single commits: drafting with the chain" in capsys.readouterr().err
    assert isinstance(loaded(rule="threshold:0.9", drafter="tree"), ConfidenceSets)
    assert isinstance(loaded(drafter="tree"), ConfidenceTree)
    with pytest.raises(CheckpointError, match="a spot drafter for one commit a step: it cannot"):
        job(rule="threshold:0.9", drafter="spot")
    metadata = {name: pair.METADATA[name] for name in ("block_lengths", "temperatures")}
    metadata |= {"trained_on": "home", "num_blocks": 9, "rules": [{"n": 1, "threshold": 0.9}]}
    drafter_io.save_drafter(
        tmp_path, pair.random_params(kind="spot-sets"), pair.ORDER, metadata, kind="spot-sets"
    )
    assert isinstance(loaded(rule="threshold:0.8", drafter=str(tmp_path)), SpotSets)
    with pytest.raises(CheckpointError, match="a spot-sets drafter for threshold:0.9: it cannot"):
        job(drafter=str(tmp_path))


@pytest.mark.slow
def test_verify_with_a_set_drafter(spot_jax, tmp_path):
    metadata = {name: pair.METADATA[name] for name in ("block_lengths", "temperatures")}
    metadata |= {"trained_on": "home", "num_blocks": 9, "rules": [{"n": 2}]}
    drafter_io.save_drafter(
        tmp_path, pair.random_params(kind="spot-sets"), pair.ORDER, metadata, kind="spot-sets"
    )
    args = ["verify", "hello", *SMALL[2:], "--rule", "n:2", "--drafter", tmp_path, "--json"]
    status, out, _ = spot_jax(*args)
    result = json.loads(out)
    assert (status, result["verdict"]) == (0, "EQUAL") and result["drafted_states"] > 0
    assert result["steps"] < result["tokens"]


@pytest.mark.filterwarnings("default")
def test_the_bundled_drafter_meets_another_model(spot_jax, fake, tmp_path):
    fixtures.write_hf(tmp_path, config={"block_size": 16})
    _, _, err = spot_jax("generate", "hi", "--model", tmp_path)
    first, second = err.splitlines()[:2]
    assert first.startswith("spot-jax: note: drafting with the bundled SPOT drafter")
    assert second.startswith("spot-jax: warning: drafter") and "blocks of 8 positions" in second
    status, _, err = spot_jax("generate", "hi", "--model", tmp_path, "--block-length", "32")
    assert status == 2 and "reads blocks of up to 16 positions, the target's have 32" in err


def test_the_cache_is_the_users(tmp_path, monkeypatch):
    changes = {}
    config = SimpleNamespace(
        values={"jax_compilation_cache_dir": "the user's"},
        update=lambda name, value: changes.update({name: value}),
    )
    monkeypatch.setattr(setup, "jax", SimpleNamespace(config=config))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    setup.use_cache(disabled=False)
    assert not changes and not list(tmp_path.iterdir())
    config.values["jax_compilation_cache_dir"] = None
    setup.use_cache(disabled=False)
    assert changes["jax_compilation_cache_dir"] == str(tmp_path / "spot-jax" / "xla")
    assert setup.cache_directory().is_dir()
    for disabled, variable in ((True, "0"), (False, "1")):
        changes.clear()
        monkeypatch.setenv("SPOT_JAX_NO_CACHE", variable)
        setup.use_cache(disabled)
        assert changes == {"jax_enable_compilation_cache": False}


# Input and output, without decoding.


def test_text_goes_to_standard_output(spot_jax, fake):
    status, out, err = spot_jax("generate", "abc", "--raw-prompt")
    assert (status, out) == (0, "cba\n")
    assert err.splitlines()[0].split() == [
        "drafter", "budget", "requests", "tokens", "steps", "passes", "steps/pass", "tokens/s",
        "compile", "s",
    ]  # fmt: skip
    assert err.splitlines()[1].split() == ["spot", *"16 1 3 3 2 1.50 3.00 2.00".split()]


def test_results_are_in_the_order_of_the_input(spot_jax, fake, tmp_path):
    path = ask(tmp_path / "in", [65] * 20, [66] * 3, [67] * 12, [68])
    status, out, _ = spot_jax("generate", "--input", path, "--batch-size", "1")
    assert status == 0
    records = read_jsonl(out)
    assert [record["id"] for record in records] == ["r0", "r1", "r2", "r3"]
    assert records[1] == {
        "id": "r1", "text": "ccc", "token_ids": [66] * 3, "finish_reason": "length",
        "steps": 3, "passes": 2,
    }  # fmt: skip


def test_a_dash_is_standard_output(spot_jax, fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = spot_jax("generate", "abc", "--raw-prompt", "--output", "-")
    (record,) = read_jsonl(out)
    assert (status, record["text"]) == (0, "cba") and not list(tmp_path.iterdir())


def test_only_regular_files_are_replaced(spot_jax, fake, tmp_path):
    pipe, link, real = tmp_path / "pipe", tmp_path / "link", tmp_path / "real"
    os.mkfifo(pipe)
    for option in ("--output", "--stats", "--trace"):
        status, _, err = spot_jax("generate", "abc", option, pipe)
        assert status == 2 and f"{pipe} cannot be written: is not a regular file" in err
    assert pipe.is_fifo()
    link.symlink_to(real)
    assert spot_jax("generate", "abc", "--stats", link)[0] == 0
    assert link.is_symlink() and json.loads(real.read_text())[0]["requests"] == 1


def test_stop_strings_and_trace(spot_jax, fake, tmp_path):
    trace = tmp_path / "trace"
    options = ["--raw-prompt", "--output", tmp_path / "out", "--trace", trace]
    status, *_ = spot_jax("generate", "olleh", *options, "--stop", "lo", "--stop", "xyz")
    assert status == 0
    (record,) = read_jsonl((tmp_path / "out").read_text())
    assert (record["text"], record["finish_reason"], len(record["token_ids"])) == ("hel", "stop", 3)
    lines = read_jsonl(trace.read_text())
    assert [line["token"] for line in lines] == record["token_ids"]
    assert lines[2] == {
        "id": 0, "position": 2, "token": record["token_ids"][2], "step": 2, "pass": 1,
        "confidence": -0.5,
    }  # fmt: skip


def test_an_interrupted_run_is_resumed(spot_jax, fake, tmp_path, monkeypatch):
    path = ask(tmp_path / "in", [65] * 20, [66] * 3, [67] * 12, [68])
    out = tmp_path / "out"
    whole = generate_command.generate
    args = ["generate", "--input", path, "--output", out, "--batch-size", "1"]

    def interrupted(*arguments, on_batch, **options):
        def stop_at_third(places, answers):
            if len(out.read_text().splitlines() if out.exists() else []) == 2:
                raise KeyboardInterrupt
            on_batch(places, answers)

        return whole(*arguments, on_batch=stop_at_third, **options)

    monkeypatch.setattr(generate_command, "generate", interrupted)
    status, _, err = spot_jax(*args)
    assert status == 130 and err == "spot-jax: error: interrupted\n"
    assert [record["id"] for record in read_jsonl(out.read_text())] == ["r1", "r3"]
    with open(out, "a") as file:
        file.write('{"id": "r0", "te')
    monkeypatch.setattr(generate_command, "generate", whole)
    status, _, err = spot_jax(*args)
    assert status == 0 and f"2 of 4 results are in {out} already" in err
    assert fake[-1] == [[65] * 20, [67] * 12]
    assert [record["id"] for record in read_jsonl(out.read_text())] == ["r0", "r1", "r2", "r3"]
    calls = len(fake)
    assert spot_jax(*args)[0] == 0 and len(fake) == calls


CHANGES = {
    "prompt": ([], [[65] * 3, [66] * 3]),
    "model's block": (["--block-length", "4"], None),
    "length": (["--max-new-tokens", "9"], None),
    "rule": (["--rule", "n:2"], None),
    "stop": (["--stop", "x"], None),
    "suppressed token": (["--suppress", "3"], None),
    "end": (["--ignore-eos"], None),
    "arithmetic": (["--dtype", "bfloat16"], None),
    "temperature": (["--temperature", "1"], None),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_was_asked_otherwise_is_not_resumed(spot_jax, fake, tmp_path, case):
    more, prompts = CHANGES[case]
    out, first = tmp_path / "out", [[65] * 5, [66] * 3]
    assert spot_jax("generate", "--input", ask(tmp_path / "in", *first), "--output", out)[0] == 0
    kept, calls = out.read_bytes(), len(fake)
    path = ask(tmp_path / "in", *(prompts or first))
    status, _, err = spot_jax("generate", "--input", path, "--output", out, *more)
    assert status == 2 and f"{out}, line 1: id 'r0' was answered with another prompt" in err
    assert out.read_bytes() == kept and len(fake) == calls


def test_what_no_answer_depends_on_may_change_in_between(spot_jax, fake, tmp_path):
    path, out = ask(tmp_path / "in", [65] * 5, [66] * 3), tmp_path / "out"
    run = ["generate", "--input", path, "--output", out]
    assert spot_jax(*run)[0] == 0
    calls = len(fake)
    free = ["--drafter", "chain", "--budget", "3", "--batch-size", "1", "--seed", "7"]
    assert spot_jax(*run, *free)[0] == 0 and len(fake) == calls
    # Above temperature 0 the seed, and the place in the input, make another answer.
    warm = [*run[:-1], tmp_path / "warm", "--temperature", "1"]
    assert spot_jax(*warm)[0] == 0
    status, _, err = spot_jax(*warm, "--seed", "7")
    assert status == 2 and "id 'r0' was answered with another" in err


def test_errors_have_tracebacks_only_on_demand(fake, monkeypatch):
    monkeypatch.setenv("SPOT_JAX_DEBUG", "1")
    with pytest.raises(ValueError, match="--seed must be in"):
        cli.main(["generate", "hi", "--seed", "-1"])


# Decoding.


def test_compare_stats_and_trace(spot_jax, tmp_path):
    stats, trace = tmp_path / "stats", tmp_path / "trace"
    status, out, err = spot_jax(
        "generate", "hello", *SMALL, "--compare", "--stats", stats, "--trace", trace
    )
    assert status == 0 and "equal: the same tokens in the same steps" in err
    spot, plain = json.loads(stats.read_text())
    assert spot.keys() == plain.keys() == {
        "drafter", "budget", "temperature", "requests", "tokens", "steps", "passes",
        "steps_per_pass", "tokens_per_second", "compile_seconds", "equal", "first_difference",
    }  # fmt: skip
    assert (spot["drafter"], spot["budget"], plain["drafter"], plain["budget"]) == (
        "spot", 3, "none", 1,
    )  # fmt: skip
    assert spot["equal"] is True and spot["first_difference"] is None
    assert spot["steps"] == plain["steps"] == plain["passes"] > spot["passes"]
    assert spot["steps_per_pass"] == round(spot["steps"] / spot["passes"], 4)
    lines = read_jsonl(trace.read_text())
    assert len(lines) == spot["tokens"] and len({line["position"] for line in lines}) == len(lines)
    ids = [line["token"] for line in sorted(lines, key=lambda line: line["position"])]
    codec = text.load_codec(bundled.bundled_target())
    assert out == text.decode_text(codec, ids) + "\n"


def test_a_difference_is_reported(spot_jax, tmp_path, fake, monkeypatch):
    whole = generate_command.generate

    def broken(target, prompts, keys, config, drafter=None, **options):
        if drafter is not None:
            prompts = [[*prompt[:-2], 7, prompt[-1]] for prompt in prompts]
        return whole(target, prompts, keys, config, drafter, **options)

    monkeypatch.setattr(generate_command, "generate", broken)
    stats = tmp_path / "stats"
    args = ["generate", "abc", "--raw-prompt", "--compare", "--stats", stats]
    status, _, err = spot_jax(*args)
    assert status == 0 and "DIFFERENT from request 0, position 1: plain [65], drafted [7]" in err
    for summary in json.loads(stats.read_text()):
        assert summary["equal"] is False
        assert summary["first_difference"] == {
            "id": 0, "position": 1, "plain": [65], "drafted": [7],
        }  # fmt: skip


def test_samples_differ_and_each_is_reproducible(spot_jax, tmp_path):
    path = write_jsonl(tmp_path / "in", {"id": "a", "prompt": "hello"})
    args = ["--input", path, *SMALL, "--temperature", "1", "--batch-size", "1"]
    status, out, _ = spot_jax("generate", *args, "--num-samples", "3", "--seed", "5")
    samples = read_jsonl(out)
    assert status == 0
    assert [(record["id"], record["seed"]) for record in samples] == [("a", s) for s in (5, 6, 7)]
    assert len({tuple(record["token_ids"]) for record in samples}) == 3
    _, out, _ = spot_jax("generate", *args, "--seed", "6")
    assert read_jsonl(out)[0]["token_ids"] == samples[1]["token_ids"]


def test_verify_of_look_ahead_compares_across_shapes(spot_jax):
    args = ["--budget", "12", "--max-new-tokens", "12", "--look-ahead"]
    status, out, _ = spot_jax("verify", "hello", *args, "--json")
    result = json.loads(out)
    assert (status, result["verdict"], result["same_shape"]) == (0, "EQUAL", False)
    assert result["passes_plain"] == result["steps"] > result["passes"]


def test_verify(spot_jax, monkeypatch):
    args = ["verify", "hello", *SMALL]
    status, out, _ = spot_jax(*args, "--json")
    result = json.loads(out)
    assert (status, result["verdict"]) == (0, "EQUAL")
    assert result["requests"] == result["equal_requests"] == 1
    assert result["drafted_states"] > result["accepted_states"] > 0
    assert result["passes_plain"] == result["steps"] > result["passes"]
    assert result["first_divergence"] is None and result["margin"] is None

    whole = verify_command.generate

    def one_token_wrong(target, prompts, keys, config, drafter=None, **options):
        (answer,), stats = whole(target, prompts, keys, config, drafter, **options)
        if drafter is not None:
            here = answer.trace.step[: len(answer.tokens)] == 2
            confidence = answer.trace.confidence.copy()
            confidence[: len(here)] += shift * here
            trace = answer.trace._replace(confidence=confidence)
            answer = answer._replace(tokens=answer.tokens ^ here, trace=trace)
        return [answer], stats

    monkeypatch.setattr(verify_command, "generate", one_token_wrong)
    for shift, verdict, expected in ((1e-5, "TIE", 0), (0.1, "DIFFERENT", 1)):
        status, out, _ = spot_jax(*args, "--json")
        result = json.loads(out)
        assert (status, result["verdict"]) == (expected, verdict)
        assert result["first_divergence"]["step"] == 2 and result["equal_requests"] == 0
        assert result["margin"] == pytest.approx(shift, rel=0.1)
    status, out, _ = spot_jax(*args)
    assert status == 1 and out.startswith("DIFFERENT: 1 requests")


def test_verify_is_inconclusive_where_nothing_is_drafted(spot_jax, monkeypatch):
    monkeypatch.setitem(setup.TRAINING_FREE, "chain", Silent())
    args = ["verify", "hello", *SMALL, "--drafter", "chain", "--json"]
    status, out, _ = spot_jax(*args)
    result = json.loads(out)
    assert (status, result["verdict"]) == (2, "INCONCLUSIVE")
    assert result["drafted_states"] == 0 and result["passes"] == result["passes_plain"]
    status, out, _ = spot_jax("verify", "hello", *SMALL[2:], "--drafter", "none")
    assert status == 2 and out.startswith("INCONCLUSIVE: 1 requests")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Silent:
    """A drafter that never drafts."""

    def __call__(self, context, budget):
        return empty_tree(context.root, budget)


# The other commands.


def test_convert_there_and_back(spot_jax, tmp_path):
    source, out, back = bundled.bundled_target(), tmp_path / "out", tmp_path / "back"
    status, said, _ = spot_jax("convert", source, out, "--dry-run")
    assert status == 0 and json.loads(said)["written"] is False and not out.exists()
    status, said, _ = spot_jax("convert", source, out, "--dtype", "bfloat16")
    assert status == 0 and json.loads(said)["dtype"] == "bfloat16"
    tensors = json.loads(said)["tensors"]
    assert json.loads(said)["config"]["block_length"] == 8
    status, _, err = spot_jax("convert", source, out)
    assert status == 2 and "already exists: pass --overwrite" in err
    status, said, _ = spot_jax("convert", out, back, "--to-hf")
    assert status == 0 and json.loads(said)["tensors"] == tensors
    first, second = (convert.load_target(d, dtype=None) for d in (out, back))
    assert first.config == second.config
    for name, leaf in first.params.items():
        assert leaf.dtype == second.params[name].dtype
        np.testing.assert_array_equal(leaf, second.params[name])
    job = setup.prepare(Generate(prompt=("hi",), model=str(out)))
    assert job.target_config == first.config


def test_doctor(spot_jax, zoo):
    status, out, _ = spot_jax("doctor")
    assert status == 1 and "SHA256SUMS is missing" in out
    bundled.write_digests()
    status, out, _ = spot_jax("doctor")
    assert status == 0 and "bundled pair  intact; drafter trained on 10 blocks" in out
    assert "SDARForCausalLM" in out and "cpu" in out
    assert "UNVERIFIED" in out and "tokens of LLaDA2.1 are never edited" in out
    (zoo / "SHA256SUMS").unlink()
