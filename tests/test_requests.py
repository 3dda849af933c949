"""JSON lines: what is refused and where, and results that survive an interruption in order."""

import io
import json
import sys

import pytest

from spot_jax import requests
from spot_jax.requests import RequestError


def write_lines(path, *lines):
    path.write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    return str(path)


def record(name, **more):
    return {"id": name, "text": f"text of {name}", "token_ids": [1, 2]} | more


def of(*keys):
    """Digests of what these records answer."""
    return {key: f"digest of {key[0]}" for key in keys}


def line(name, **more):
    """A record as a file holds it."""
    return record(name, **more) | {"digest": f"digest of {name}"}


def test_all_forms(tmp_path):
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    path = write_lines(
        tmp_path / "in",
        "\ufeff" + json.dumps({"id": "a", "prompt": "hi\u2028there"}),
        "",
        json.dumps({"id": 7, "messages": messages}) + "\r",
        json.dumps({"prompt_ids": [299, 0], "id": "7"}),
    )
    found = requests.read_requests(path)
    assert [(r.id, r.form, r.content) for r in found] == [
        ("a", "prompt", "hi\u2028there"),
        (7, "messages", messages),
        ("7", "prompt_ids", [299, 0]),
    ]
    assert found[1].where == f"{path}, line 3"


def test_standard_input(monkeypatch):
    raw = io.BytesIO(b'{"id": 1, "prompt": "x"}')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
    assert requests.read_requests("-")[0].where == "standard input, line 1"


BAD = {
    "not valid JSON": "{",
    "a key occurs twice in one object": '{"id": 2, "id": 3, "prompt": "x"}',
    "must be a JSON object, found list": "[]",
    "unknown key 'promt': known are id, prompt": '{"id": 2, "promt": "x"}',
    "needs an id, a string or an integer": '{"prompt": "x"}',
    "needs an id, a string": '{"id": true, "prompt": "x"}',
    "id 1 is that of line 1 too": '{"id": 1, "prompt": "x"}',
    "exactly one of prompt, messages, prompt_ids, found none": '{"id": 2}',
    "found prompt and prompt_ids": '{"id": 2, "prompt": "x", "prompt_ids": [1]}',
    "prompt must be a string, found int": '{"id": 2, "prompt": 3}',
    "the prompt is empty": '{"id": 2, "prompt": " \\n"}',
    "line 2: the prompt is empty": '{"id": 2, "prompt_ids": []}',
    "2: the prompt is empty": '{"id": 2, "messages": []}',
    ": the prompt is empty": '{"id": 2, "messages": [{"role": "user", "content": ""}]}',
    "prompt_ids must be a list": '{"id": 2, "prompt_ids": "12"}',
    "prompt_ids must be integers": '{"id": 2, "prompt_ids": [1, true]}',
    "each message needs role and content": '{"id": 2, "messages": [{"content": "x"}]}',
    "content must be a string, found list": '{"id": 2, "messages": [{"role": "", "content": []}]}',
    "prompt is not valid Unicode": '{"id": 2, "prompt": "\\ud800"}',
    "id is not valid Unicode": '{"id": "\\ud800", "prompt": "x"}',
    "recursion": "[" * 100_000,
}


@pytest.mark.parametrize("message", BAD)
def test_bad_lines_are_named(tmp_path, message):
    path = write_lines(tmp_path / "in", '{"id": 1, "prompt": "x"}', BAD[message])
    with pytest.raises(RequestError, match=message) as caught:
        requests.read_requests(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(caught.value)


def test_files_that_hold_no_requests(tmp_path):
    with pytest.raises(RequestError, match="holds no requests"):
        requests.read_requests(write_lines(tmp_path / "in", "", " "))
    (tmp_path / "in").write_bytes(b'{"id": 1, "prompt": "\xff"}')
    with pytest.raises(RequestError, match="line 1: not UTF-8 text"):
        requests.read_requests(str(tmp_path / "in"))


def test_a_file_ends_in_the_order_of_the_requests(tmp_path):
    path = tmp_path / "out"
    results = requests.Results(str(path), of(("a", None), ("b", None), ("c", None)))
    assert not results.finished and not path.exists()
    results.write([record("c")])
    results.write([record("a"), record("b", text="\u2028数")])
    assert [json.loads(x)["id"] for x in path.read_text().split("\n")[:-1]] == ["c", "a", "b"]
    results.close()
    lines = path.read_bytes().split(b"\n")
    assert [json.loads(x)["id"] for x in lines[:-1]] == ["a", "b", "c"] and lines[-1] == b""


@pytest.mark.parametrize("left", ["", '{"', '{"id": "b", "text": "cut', '{"id": "b", "te\n'])
def test_an_interrupted_file_is_resumed(tmp_path, left):
    path = tmp_path / "out"
    keys = of(("a", None), ("b", None), ("c", None))
    path.write_text(json.dumps(line("c")) + "\n" + left)
    if left.endswith("\n"):  # A whole line that is not JSON was not cut by an interruption.
        with pytest.raises(RequestError, match="line 2: not valid JSON"):
            requests.Results(str(path), keys)
        return
    results = requests.Results(str(path), keys)
    assert results.finished == {("c", None)}
    results.write([record("a"), record("b")])
    results.close()
    assert [json.loads(x) for x in path.read_text().splitlines()] == [
        line("a"), line("b"), line("c"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "content", ["some notes", '{"a": 1}\n', '{"id": "z", "token_ids": []}\n', '{"id": []}\n']
)
def test_a_file_of_other_content_is_not_touched(tmp_path, content):
    path = tmp_path / "out"
    path.write_text(content)
    with pytest.raises(RequestError, match=f"{path}, line 1: "):
        requests.Results(str(path), of(("a", None)))
    assert path.read_text() == content


@pytest.mark.parametrize("found", ["another digest", None])
def test_answers_to_something_else_are_not_taken(tmp_path, found):
    path = tmp_path / "out"
    left = json.dumps(line("b")) + "\n" + json.dumps(line("a") | {"digest": found}) + "\n"
    path.write_text(left)
    with pytest.raises(RequestError, match="line 2: id 'a' was answered with another prompt"):
        requests.Results(str(path), of(("a", None), ("b", None)))
    assert path.read_text() == left


def test_samples_are_told_apart_by_seed(tmp_path):
    path = tmp_path / "out"
    path.write_text(json.dumps(line("a", seed=1)))
    results = requests.Results(str(path), of(("a", 0), ("a", 1)))
    assert results.finished == {("a", 1)}


def test_standard_output_waits_for_its_turn(capsys):
    results = requests.Results(None, of(("a", None), ("b", None), ("c", None)))
    results.write([record("b")])
    assert capsys.readouterr().out == ""
    results.write([record("a")])
    assert [json.loads(x)["id"] for x in capsys.readouterr().out.splitlines()] == ["a", "b"]
    results.write([record("c")])
    assert json.loads(capsys.readouterr().out)["id"] == "c"


def test_places_that_cannot_be_written(tmp_path):
    for path in (tmp_path, tmp_path / "absent" / "out"):
        with pytest.raises(RequestError, match="cannot be written"):
            requests.Results(str(path), {})
