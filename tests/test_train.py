"""The trainers: sums over devices, what the losses weigh, problems and tokenizer."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tokenizers import Tokenizer

from tests import tiny
from train import curriculum, documents, parallel, target, tokenizer

TEXTS = ["user\nHow many apples does Ann have now?", "assistant\n12 + 7 = 19\nAnswer: 19"] * 3


@pytest.fixture(scope="module")
def words():
    return tokenizer.train_tokenizer(TEXTS, 300)


def squares(params, batch):
    """Weighted squared errors of a linear model."""
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    weight = batch["weight"]
    return jnp.sum(weight * error**2), {
        "count": jnp.sum(weight),
        "big": jnp.sum(weight * (error > 1)),
    }


def regression(rows):
    random = np.random.default_rng(0)
    batch = {"x": random.normal(size=(rows, 3)), "y": random.normal(size=rows) + 2}
    # Devices of two rows see counts of 2, 1, 0 and whatever is left.
    batch["weight"] = np.array([1.0, 1, 1, 0, 0, 0, 1, 0.5])[:rows]
    return {name: x.astype(np.float32) for name, x in batch.items()}


@pytest.mark.parametrize("rows", [8, 7])
def test_four_devices_take_the_step_of_one(rows):
    assert jax.local_device_count() == 4
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    params = {"w": jnp.array([0.1, -0.2, 0.3]), "b": jnp.array(0.5)}
    alone = together = parallel.init_state(params, optimizer)
    step = parallel.parallel_step(squares, optimizer)
    for _ in range(3):
        batch = regression(rows)
        alone, expected = parallel.train_step(
            alone, batch, loss_fn=squares, optimizer=optimizer, axis_name=None
        )
        together = jax.tree.map(jnp.copy, together)  # the step donates its state
        together, sums = step(together, parallel.split_batch(batch, 4))
        assert jax.tree.map(jnp.shape, together) == jax.tree.map(jnp.shape, alone)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), sums, expected)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), together, alone
        )
    assert together.step == 3
    assert (np.abs(together.params["w"] - params["w"]) > 0.1).any()


def test_split_batch_fills_up_with_rows_that_weigh_nothing():
    split = parallel.split_batch(regression(7), 4)
    assert split["x"].shape == (4, 2, 3) and split["weight"].shape == (4, 2)
    np.testing.assert_array_equal(split["x"].reshape(8, 3)[:7], regression(7)["x"])
    assert not split["weight"][3, 1] and not split["x"][3, 1].any()


def weights(monkeypatch, loss, batch):
    """The weight that a loss gives each label, and its labels."""
    monkeypatch.setattr(target, "_cross_entropy", lambda params, hidden, labels, w: (labels, w))
    return map(np.asarray, loss(tiny.target().params, batch))


@pytest.fixture(scope="module")
def batch():
    packed = documents.pack([(list(range(6, 17)), 6), (list(range(6, 15)), 8), ([], 0)], 16)
    return packed._asdict() | {"key": np.zeros((1, 2), np.uint32)}


def test_diffusion_weighs_masked_answers_only(monkeypatch, batch):
    loss = functools.partial(target.diffusion_loss, config=tiny.CONFIG, block_length=4)
    drawn = []
    for seed in range(40):
        batch["key"] = np.array([[0, seed]], np.uint32)
        labels, weight = weights(monkeypatch, loss, batch)
        np.testing.assert_array_equal(labels, batch["tokens"])
        drawn.append(weight)
    # Answers and the padding up to the end of their block, each of them now and then; prompts
    # and the filler row never.
    share = np.mean(drawn, axis=0)
    answer = np.zeros((3, 16), bool)
    answer[0, 6:12] = answer[1, 8:12] = True
    np.testing.assert_array_equal(share > 0, answer)
    assert set(np.unique(drawn)) == {0.0, 1.0} and 0.3 < share[answer].mean() < 0.7
    # Blocks draw their own shares of masks, so counts in a block spread more than coins would.
    assert np.var(np.sum(np.array(drawn)[:, 1], axis=-1)) > 1.2


def test_autoregression_weighs_answers_and_a_little_prompts(monkeypatch, batch):
    loss = functools.partial(target.autoregressive_loss, config=tiny.CONFIG, prompt_weight=0.25)
    labels, weight = weights(monkeypatch, loss, batch)
    np.testing.assert_array_equal(labels, batch["tokens"][:, 1:])
    assert weight[0].tolist() == [0.25] * 5 + [1.0] * 5 + [0.0] * 5
    assert weight[1].tolist() == [0.25] * 7 + [1.0] * 1 + [0.0] * 7
    assert not weight[2].any()


def test_losses_are_sums_that_a_filler_row_does_not_change(batch):
    batch["key"] = np.array([[0, 1]], np.uint32)
    loss = jax.jit(functools.partial(target.diffusion_loss, config=tiny.CONFIG, block_length=4))
    total, sums = loss(tiny.target().params, batch)
    assert np.isfinite(total) and total > 0 and 0 <= sums["right"] <= sums["count"]
    junk = batch | {"tokens": np.where([[0], [0], [1]], 9, batch["tokens"])}
    np.testing.assert_allclose(loss(tiny.target().params, junk)[0], total, rtol=1e-6)


def test_curriculum_is_reproducible_and_its_splits_are_disjoint():
    train = curriculum.make_examples(0, "train", 400)
    test = curriculum.make_examples(0, "test", 100)
    assert train == curriculum.make_examples(0, "train", 400)
    assert train != curriculum.make_examples(1, "train", 400)
    assert not {e.prompt for e in train} & {e.prompt for e in test}
    assert {e.task for e in train} == set(curriculum.TASKS)
    assert [e.task for e in test[:10]] == [*curriculum.TASKS] * 2


def test_answers_are_right():
    for example in curriculum.make_examples(2, "train", 400):
        assert curriculum.is_right(example, example.answer + "\n")
        assert not curriculum.is_right(example, example.answer + "!")
        if example.task == "function":
            exec(example.answer, {})  # ends with an assertion
        elif example.task == "json":
            record = json.loads(example.answer)
            assert all(str(value) in example.prompt for value in record.values())
        elif example.task == "sort":
            given = example.prompt.split(": ")[1].split(", ")
            answer = example.answer.splitlines()[0].removeprefix("Sorted: ").split(", ")
            number = given[0].isdigit()
            ordered = sorted(given, key=int if number else str)
            down = number and "largest to" in example.prompt
            assert answer == (ordered[::-1] if down else ordered)
        else:
            lines = example.answer.splitlines()
            for line in lines[1:-2]:
                left, right = line.split(" = ")
                assert eval(left) == int(right)
            assert lines[-1] == f"Answer: {right}"


@pytest.mark.parametrize("text", ["", "  Ann's 12\n\tapples ", "ß→🙂 123", "<|MASK|><|im_end|>"])
def test_tokenizer_round_trip(words, text):
    ids = tokenizer.encode_text(words, text)
    assert words.decode(ids, skip_special_tokens=False) == text
    assert not set(ids) & set(range(5)), "text became markup"


def test_documents_start_and_end_with_markup(words, tmp_path):
    example = curriculum.Example("add", "How many?\nNow", "Answer: 42")
    ids, prompt_length = tokenizer.encode_document(words, example)
    text = words.decode(ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nHow many?\nNow<|im_end|>\n<|im_start|>assistant\nAnswer: 42<|im_end|>"
    )
    answer = ids[prompt_length:]
    assert words.decode(answer) == "Answer: 42" and answer[-1] == tokenizer.IM_END_ID
    # Every digit is a token of its own.
    assert [words.id_to_token(i) for i in answer[-3:-1]] == ["4", "2"]
    tokenizer.save_tokenizer(words, tmp_path)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode_document(loaded, example) == (ids, prompt_length)
