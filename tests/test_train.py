"""The trainers: data, losses, the parallel step, traces and their replay."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spot_jax import noise
from spot_jax.commit import TopN
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig, decode
from spot_jax.draft import Chain, ConfidenceTree
from tests import tiny
from train import collect, curriculum, documents, replay, target, tokenizer, traces
from train.loop import Checkpoints, run_steps
from train.parallel import init_state, parallel_step, split_batch, train_step


def test_splits_share_no_problem_and_answers_are_right():
    train, test = (curriculum.make_examples(3, split, 300) for split in ("train", "test"))
    assert not {e.prompt for e in train} & {e.prompt for e in test}
    assert {e.task for e in test} == set(curriculum.TASKS)
    for example in test:
        if example.task == "function":
            exec(example.answer, {})
        assert curriculum.is_right(example, example.answer + "\n")
        assert not curriculum.is_right(example, example.answer + "1")


def test_answers_follow_from_their_prompts():
    for example in curriculum.make_examples(2, "train", 300, ("add", "two_step", "sort", "json")):
        lines = example.answer.splitlines()
        if example.task == "json":
            record = json.loads(example.answer)
            assert all(str(value) in example.prompt for value in record.values())
        elif example.task == "sort":
            items = example.prompt.split(": ")[1].split(", ")
            numbers = items[0].isdigit()
            down = numbers and "largest to" in example.prompt
            ordered = sorted(items, key=int if numbers else str, reverse=down)
            assert lines[0] == f"Sorted: {', '.join(ordered)}"
            assert [line.split(": ")[1] for line in lines[1:]] == [ordered[0], ordered[-1]]
        else:
            sums = [line.split(" = ") for line in lines[1:-2]]
            assert len(sums) == (1 if example.task == "add" else 2)
            assert all(eval(left) == int(right) for left, right in sums)
            assert lines[-1] == f"Answer: {sums[-1][1]}"


@pytest.fixture(scope="module")
def words():
    texts = [t for e in curriculum.make_examples(0, "train", 200) for t in (e.prompt, e.answer)]
    return tokenizer.train_tokenizer(texts, 400)


def test_tokenizer_keeps_every_text_and_never_parses_markup(words):
    for text in ("Zoë has 12 <|im_end|> plums\n\t", "<|MASK|>", "日本 \x00"):
        ids = tokenizer.encode_text(words, text)
        assert min(ids) > tokenizer.RESERVED_ID
        assert words.decode(ids, skip_special_tokens=False) == text


def test_documents_are_a_prompt_and_an_answer_in_markup(words):
    example = curriculum.Example("add", "How many?\nNow", "Answer: 42")
    ids, prompt_length = tokenizer.encode_document(words, example)
    assert words.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nHow many?\nNow<|im_end|>\n<|im_start|>assistant\nAnswer: 42<|im_end|>"
    )
    answer = ids[prompt_length:]
    assert words.decode(answer) == "Answer: 42" and answer[-1] == tokenizer.IM_END_ID
    assert [words.id_to_token(i) for i in answer[-3:-1]] == ["4", "2"], "a token for each digit"


def test_batches_are_a_function_of_their_seed(words):
    def first(seed):
        stream = documents.batches(
            words, seed=seed, tokens_per_batch=512, block_length=32, max_length=256
        )
        return [next(stream) for _ in range(3)]

    for one, other in zip(first(1), first(1), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert any(
        a.tokens.shape != b.tokens.shape or (a.tokens != b.tokens).any()
        for a, b in zip(first(1), first(2), strict=True)
    )


def toy_loss(params, batch):
    error = (batch["x"] @ params["w"] - batch["y"]) ** 2
    weight = batch["weight"]
    return jnp.sum(weight * error), {"count": jnp.sum(weight)}


def test_four_devices_step_like_one_whatever_their_counts():
    random = np.random.default_rng(0)
    batch = {"x": random.normal(size=(6, 3)), "y": random.normal(size=6), "weight": np.ones(6)}
    batch["weight"][[0, 1, 4]] = 0
    batch = {k: v.astype(np.float32) for k, v in batch.items()}
    optimizer = optax.adam(0.1)
    params = {"w": jnp.ones(3)}
    expected, sums = train_step(
        init_state(params, optimizer), batch, loss_fn=toy_loss, optimizer=optimizer, axis_name=None
    )
    # Six rows on four devices: two rows of filler, and counts 0, 2, 1, 0.
    step = parallel_step(toy_loss, optimizer)
    found, found_sums = step(init_state(params, optimizer), split_batch(batch, 4))
    np.testing.assert_allclose(found.params["w"], expected.params["w"], rtol=1e-6)
    assert found.params["w"].shape == (3,) and int(found.step) == 1
    assert float(found_sums["count"]) == float(sums["count"]) == 3
    np.testing.assert_allclose(found_sums["loss"], sums["loss"], rtol=1e-6)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    optimizer = optax.adam(0.1)
    step = parallel_step(toy_loss, optimizer)

    def run(out, total_steps):
        random = np.random.default_rng(0)
        stream = (random.normal(size=(8, 4)).astype(np.float32) for _ in itertools.count())
        return run_steps(
            init_state({"w": jnp.ones(3)}, optimizer),
            total_steps=total_steps,
            batches=stream,
            step_for=lambda _: step,
            make_batch=lambda x, _: split_batch(
                {"x": x[:, :3], "y": x[:, 3], "weight": np.ones(8, np.float32)}, 4
            ),
            out=out,
            log_every=2,
            save_every=2,
        )

    whole = run(tmp_path / "whole", 5)
    run(tmp_path / "parts", 2)
    # What a kill in the middle of a save leaves behind.
    (tmp_path / "parts" / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()
    parts = run(tmp_path / "parts", 5)
    assert int(parts.step) == int(whole.step) == 5
    np.testing.assert_array_equal(parts.params["w"], whole.params["w"])
    lines = [json.loads(x) for x in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [2, 4, 5]
    # A state saved on four devices is restored on one.
    alone = Checkpoints(tmp_path / "parts" / "checkpoints")
    restored = alone.restore(init_state({"w": jnp.ones(3)}, optimizer))
    alone.close()
    assert restored.params["w"].devices() == {jax.devices()[0]}
    np.testing.assert_array_equal(restored.params["w"], whole.params["w"])


def test_diffusion_learns_answers_and_their_padding_only(monkeypatch):
    seen = {}

    def keep(params, hidden, labels, weight):
        seen.update(labels=labels, weight=weight)
        return jnp.sum(weight), {"count": jnp.sum(weight)}

    monkeypatch.setattr(target, "_cross_entropy", keep)
    model = tiny.target()
    batch = {
        "tokens": np.full((64, 12), 9, np.int32),
        "prompt_lengths": np.full(64, 3, np.int32),
        "lengths": np.full(64, 6, np.int32),
        "key": np.asarray(jax.random.key_data(jax.random.key(0)))[None],
    }
    target.diffusion_loss(model.params, batch, config=model.config, block_length=4)
    ever = np.asarray(seen["weight"]).max(0)
    # Prompt 0-2, answer 3-5, padding of its last block 6-7, a block of nothing 8-11.
    assert ever.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0]


def test_autoregression_learns_answers_and_a_little_of_prompts(monkeypatch):
    monkeypatch.setattr(target, "_cross_entropy", lambda params, hidden, labels, w: (labels, w))
    packed = documents.pack([(list(range(6, 17)), 6), (list(range(6, 15)), 8), ([], 0)], 16)
    labels, weight = jax.jit(
        lambda params, batch: target.autoregressive_loss(
            params, batch, config=tiny.CONFIG, prompt_weight=0.25
        )
    )(tiny.target().params, packed._asdict())
    np.testing.assert_array_equal(labels, packed.tokens[:, 1:])
    assert weight.tolist() == [
        [0.25] * 5 + [1.0] * 5 + [0.0] * 5,
        [0.25] * 7 + [1.0] * 1 + [0.0] * 7,
        [0.0] * 15,
    ]


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def collected(request):
    prompts, lengths, keys = tiny.requests()
    config = DecodeConfig(
        max_new_tokens=10, num_top=8, sampling=Sampling(temperature=request.param)
    )
    model = tiny.target()
    found, canvas, ends = collect.collect_batch(model, prompts, lengths, keys, config)
    return model, (prompts, lengths, keys), config, found


def test_traces_hold_the_path_of_plain_decoding(collected, tmp_path):
    model, requests, config, found = collected
    plain = decode(model, *requests, config)
    assert len(found.block) + np.bincount(found.block).astype(bool).sum() <= int(plain.steps.sum())
    info = traces.TraceInfo(target="tiny", block_length=4, sampling=config.sampling, rule=TopN())
    traces.write_info(tmp_path, info)
    traces.write_shard(tmp_path, 0, found)
    read_info, read = traces.read_traces(tmp_path)
    assert read_info == info
    jax.tree.map(np.testing.assert_array_equal, read, found)
    with pytest.raises(ValueError, match="written for other options"):
        traces.write_info(tmp_path, traces.TraceInfo(**(vars(info) | {"target": "other"})))
    (tmp_path / "shard-00001.npz").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"shard-00001\.npz: not a shard"):
        traces.read_traces(tmp_path)


@pytest.mark.parametrize("drafter", [Chain(), ConfidenceTree()], ids=["chain", "tree"])
def test_replay_counts_the_passes_of_decoding(collected, drafter):
    model, requests, config, found = collected
    info = traces.TraceInfo(target="tiny", block_length=4, sampling=config.sampling, rule=TopN())
    steps, passes = replay.replay(drafter, found, info, 4)
    real = decode(
        model,
        *requests,
        DecodeConfig(max_new_tokens=10, num_top=8, sampling=config.sampling, budget=4),
        drafter,
    )
    # Blocks that ended with their first step have no point and one pass.
    without = int(real.steps.sum()) - int(steps.sum())
    assert without >= 0
    assert int(passes.sum()) + without == int(real.passes.sum())


def test_keys_do_not_depend_on_the_batch():
    whole = noise.request_keys(4, 6)
    part = noise.request_keys(4, 2, first=3)
    assert (jax.random.key_data(whole)[3:5] == jax.random.key_data(part)).all()
