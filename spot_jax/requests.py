"""Requests and results as JSON lines: read whole and checked first, written line by line."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from spot_jax import json_io

FORMS = ("prompt", "messages", "prompt_ids")
_DISTINCT = json_io.distinct("a key occurs twice in one object")
Key = tuple[str | int, int | None]


class RequestError(ValueError):
    """A request, or a file of results, that cannot be used; the message says where it is."""


class Request(NamedTuple):
    """What to answer.

    Attributes:
      id: names the request in the results.
      where: names it in messages to people.
      form: which of `FORMS` the content is.
      content: a text, a list of messages, or a list of token ids.
    """

    id: str | int
    where: str
    form: str
    content: Any


def read_requests(path: str) -> list[Request]:
    """Reads a file of requests, or standard input where `path` is `-`.

    A line is an object with `id` and exactly one of `prompt`, `messages` and `prompt_ids`. Blank
    lines are skipped.
    """
    name = "standard input" if path == "-" else path
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    requests, seen = [], {}
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        request = _request(where, _parse(where, line))
        if request.id in seen:
            raise RequestError(f"{where}: id {request.id!r} is that of line {seen[request.id]} too")
        seen[request.id] = number
        requests.append(request)
    if not requests:
        raise RequestError(f"{name} holds no requests")
    return requests


def prompt_request(prompt: str, index: int = 0) -> Request:
    """A request made of a prompt alone."""
    return _checked(Request(index, "the prompt", "prompt", prompt))


class Results:
    """Results on their way out, as records `{"id": ..., ...}` in the order of the requests.

    A file gets them as they come, so that a killed run can be resumed, and is put into order by
    `close`; each of its records has, as `digest`, that of what it answers. Standard output gets
    each record as soon as all before it are there.
    """

    def __init__(self, path: str | None, digests: Mapping[Key, str]):
        """Looks at what an earlier run has left.

        Args:
          path: file to write or to resume; standard output where None.
          digests: of what every expected record answers, by `record_key` and in order; equal ones
            mean equal answers.

        Raises:
          RequestError: for a file that holds anything else than answers to just this.
        """
        self._path = Path(path) if path else None
        self._digests = dict(digests)
        self._keys = list(digests)
        self._lines: dict[Key, str] = {}
        self._printed = 0
        if self._path is not None:
            check_writable(self._path)
            if self._path.exists():
                self._lines = _read_results(self._path, self._digests)
        self.finished = frozenset(self._lines)

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Adds records, whole lines only."""
        new = {}
        for record in records:
            key = record_key(record)
            if self._path is not None:
                record = record | {"digest": self._digests[key]}
            new[key] = json.dumps(record, ensure_ascii=False)
        self._lines |= new
        if self._path is not None:
            if self._printed == 0:
                _replace(self._path, self._lines.values())
            else:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write("".join(f"{line}\n" for line in new.values()))
            self._printed += len(new)
            return
        while self._printed < len(self._keys) and self._keys[self._printed] in self._lines:
            sys.stdout.write(self._lines[self._keys[self._printed]] + "\n")
            self._printed += 1
        sys.stdout.flush()

    def close(self) -> None:
        """Puts a file into the order of the requests."""
        if self._path is not None:
            _replace(self._path, [self._lines[key] for key in self._keys if key in self._lines])


def record_key(record: dict[str, Any]) -> Key:
    """What tells a record from all others: its id, and its seed where there are several samples."""
    return record["id"], record.get("seed")


def check_writable(path: Path) -> None:
    """Raises unless a file can be written at `path`; creates nothing."""
    real = Path(os.path.realpath(path))
    # A device or a pipe would be replaced, since files are written whole under another name.
    if real.exists() and not real.is_file():
        kind = "a directory" if real.is_dir() else "not a regular file"
        raise RequestError(f"{path} cannot be written: is {kind}")
    if not real.parent.is_dir() or not os.access(real.parent, os.W_OK):
        raise RequestError(f"{path} cannot be written: its directory cannot be written to")


def write_whole(path: str | Path, text: str) -> None:
    """Writes a regular file whole or not at all; a link stays one."""
    path = Path(os.path.realpath(path))
    check_writable(path)
    building = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        building.write_text(text, encoding="utf-8")
        os.replace(building, path)
    finally:
        building.unlink(missing_ok=True)


def _replace(path: Path, lines: Iterable[str]) -> None:
    write_whole(path, "".join(f"{line}\n" for line in lines))


def _read_results(path: Path, expected: Mapping[Key, str]) -> dict[Key, str]:
    """Records of an earlier run by key; a last line that was cut short is left out."""
    *lines, last = path.read_bytes().split(b"\n")
    lines += [last] if last else []
    result: dict[Key, str] = {}
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            record = _parse(where, line)
        except RequestError:
            if number == len(lines) and last and line.startswith(b'{"id"'[: len(line)]):
                break
            raise
        name: Any = record.get("id")
        seed = record.get("seed")
        key = (name, seed if type(seed) is int else None)
        if type(name) not in (str, int) or key not in expected or "token_ids" not in record:
            raise RequestError(
                f"{where}: not a result of this input and these options (id {name!r}): choose "
                "another output file"
            )
        if record.get("digest") != expected[key]:
            raise RequestError(
                f"{where}: id {name!r} was answered with another prompt, model, seed or options: "
                "choose another output file, or remove this one"
            )
        result[key] = line.decode()
    return result


def _parse(where: str, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_DISTINCT)
    except UnicodeDecodeError as error:
        raise RequestError(f"{where}: not UTF-8 text ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise RequestError(f"{where}: must be a JSON object, found {type(record).__name__}")
    return record


def _request(where: str, record: dict[str, Any]) -> Request:
    unknown = record.keys() - {"id", *FORMS}
    if unknown:
        raise RequestError(
            f"{where}: unknown key {min(unknown)!r}: known are id, {', '.join(FORMS)}"
        )
    if type(record.get("id")) not in (str, int):
        raise RequestError(f"{where}: needs an id, a string or an integer")
    _check_text(where, "id", str(record["id"]))
    forms = [form for form in FORMS if form in record]
    if len(forms) != 1:
        found = " and ".join(forms) or "none"
        raise RequestError(f"{where}: needs exactly one of {', '.join(FORMS)}, found {found}")
    return _checked(Request(record["id"], where, forms[0], record[forms[0]]))


def _checked(request: Request) -> Request:
    content, where = request.content, request.where
    if request.form == "prompt":
        _check_text(where, "prompt", content, may_be_empty=False)
    elif not isinstance(content, list):
        raise RequestError(f"{where}: {request.form} must be a list")
    elif request.form == "prompt_ids":
        if any(type(number) is not int for number in content):
            raise RequestError(f"{where}: prompt_ids must be integers")
    else:
        for message in content:
            if not isinstance(message, dict) or message.keys() != {"role", "content"}:
                raise RequestError(f"{where}: each message needs role and content, and no more")
            _check_text(where, "role", message["role"])
            last = message is content[-1]
            _check_text(where, "content", message["content"], may_be_empty=not last)
    if not content:
        raise RequestError(f"{where}: the prompt is empty")
    return request


def _check_text(where: str, name: str, text: Any, *, may_be_empty: bool = True) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{where}: {name} must be a string, found {type(text).__name__}")
    if not may_be_empty and not text.strip():
        raise RequestError(f"{where}: the prompt is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{where}: {name} is not valid Unicode ({error.reason})") from error
