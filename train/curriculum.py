"""Synthetic problems with one right answer each, for the small demonstration model.

Every answer is a function of its prompt, so exact equality decides whether a model is right.
Training and test problems are told apart by a checksum of the prompt: no problem is in both.
"""

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.words import (
    CITIES,
    COLORS,
    FOODS,
    HE_NAMES,
    JOBS,
    NOUNS,
    NUMBER_WORDS,
    OBJECTS,
    PETS,
    SHE_NAMES,
    SHORT_WORDS,
)  # fmt: skip

TASKS = ("add", "two_step", "sort", "json", "function")
TEST_SHARE = 20


class Example(NamedTuple):
    """One problem: the user's prompt and the only answer that counts as right."""

    task: str
    prompt: str
    answer: str


def _pick(rng: np.random.Generator, pool):
    return pool[int(rng.integers(len(pool)))]


def _integer(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def _person(rng: np.random.Generator) -> tuple[str, str, str]:
    """A first name with its subject and object pronouns."""
    if rng.random() < 0.5:
        return _pick(rng, SHE_NAMES), "She", "her"
    return _pick(rng, HE_NAMES), "He", "him"


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _word_problem(rng: np.random.Generator, task: str, steps: int) -> Example:
    """A story of `steps` gains and losses; never a quantity of 1, to keep every noun plural."""
    name, subject, object_pronoun = _person(rng)
    things = _pick(rng, OBJECTS)
    opening = _pick(rng, (
        "{name} has {start} {things}.", "{name} starts the day with {start} {things}.",
        "There are {start} {things} in {name}'s bag.",
    ))  # fmt: skip
    gains = (
        "{subject} buys {n} more.", "{subject} finds {n} more.",
        "A friend gives {object} {n} more.",
    )  # fmt: skip
    losses = (
        "{subject} gives away {n} of them.", "{subject} loses {n} of them.",
        "{subject} sells {n} of them.",
    )  # fmt: skip
    question = _pick(rng, (
        "How many {things} does {name} have now?", "How many {things} does {name} have in the end?",
    ))  # fmt: skip
    while True:
        limits = [20 if rng.random() < 0.8 else 60 for _ in range(steps + 1)]
        start, *changes = (_integer(rng, 2, limit) for limit in limits)
        signs = [_pick(rng, (1, -1)) for _ in changes]
        totals = [start]
        for sign, change in zip(signs, changes, strict=True):
            totals.append(totals[-1] + sign * change)
        if all(0 <= total <= 99 and total != 1 for total in totals):
            break
    sentences = [opening.format(name=name, start=start, things=things)]
    lines = [f"{name} starts with {start} {things}."]
    for sign, change, before, after in zip(signs, changes, totals[:-1], totals[1:], strict=True):
        event = _pick(rng, gains if sign > 0 else losses)
        sentences.append(event.format(subject=subject, object=object_pronoun, n=change))
        lines.append(f"{before} {'+' if sign > 0 else '-'} {change} = {after}")
    sentences.append(question.format(name=name, things=things))
    lines += [f"{name} now has {totals[-1]} {things}.", f"Answer: {totals[-1]}"]
    return Example(task, " ".join(sentences), "\n".join(lines))


def _sort(rng: np.random.Generator) -> Example:
    """Numbers up or down, or words that all differ in their first letter."""
    verb = _pick(rng, ("Sort", "Order", "Arrange"))
    kind = _pick(rng, ("up", "down", "words"))
    if kind == "words":
        noun, pool = _pick(rng, (("names", SHE_NAMES + HE_NAMES), ("words", FOODS + PETS)))
        items: list[str] = []
        for _ in range(_integer(rng, 3, 5)):
            initials = {item[0] for item in items}
            items.append(_pick(rng, [word for word in pool if word[0] not in initials]))
        prompt, ordered = f"{verb} these {noun} alphabetically: ", sorted(items)
        labels = ("First", "Last")
    else:
        numbers = 1 + rng.choice(99, size=_integer(rng, 4, 6), replace=False)
        items = [str(number) for number in numbers]
        ordered = sorted(items, key=int, reverse=kind == "down")
        labels = ("Smallest", "Largest") if kind == "up" else ("Largest", "Smallest")
        prompt = f"{verb} these numbers from {labels[0].lower()} to {labels[1].lower()}: "
    answer = f"Sorted: {', '.join(ordered)}\n{labels[0]}: {ordered[0]}\n{labels[1]}: {ordered[-1]}"
    return Example("sort", prompt + ", ".join(items), answer)


def _json(rng: np.random.Generator) -> Example:
    """Facts in any order as prose; the record always keeps the order of `facts`."""
    name, subject, _ = _person(rng)
    age, city, job = _integer(rng, 5, 90), _pick(rng, CITIES), _pick(rng, JOBS)
    pet, color, food = _pick(rng, PETS), _pick(rng, COLORS), _pick(rng, FOODS)
    facts = {
        "age": (age, (f"is {age} years old",)),
        "city": (city, (f"lives in {city}", f"comes from {city}")),
        "job": (job, (f"works as {_with_article(job)}", f"is {_with_article(job)}")),
        "pet": (pet, (f"has {_with_article(pet)}", f"owns {_with_article(pet)}")),
        "color": (color, (f"likes the color {color}", f"always wears {color}")),
        "food": (food, (f"loves {food}", f"likes to eat {food}")),
    }
    order = rng.permutation(list(facts))[: _integer(rng, 2, 4)].tolist()
    clauses = [_pick(rng, facts[field][1]) for field in order]
    if len(clauses) == 2:
        prose = f"{name} {clauses[0]}. {subject} {clauses[1]}."
    else:
        prose = f"{name} {clauses[0]} and {clauses[1]}. {subject} {' and '.join(clauses[2:])}."
    request = _pick(rng, ("Write it as JSON.", "Write this as JSON.", "Turn this into JSON."))
    record = {"name": name} | {field: facts[field][0] for field in facts if field in order}
    return Example("json", f"{prose} {request}", json.dumps(record, indent=2))


class _Function(NamedTuple):
    """What one function does: `check` is either a value to equal or the truth of the result."""

    verbs: str
    parameters: str
    purpose: str
    expression: str
    arguments: tuple
    check: object
    suffix: str = ""


def _function_kinds(rng: np.random.Generator) -> list[_Function]:
    """One freshly drawn instance of every kind of function."""
    x, k, times = _integer(rng, 10, 20), _integer(rng, 2, 10), _integer(rng, 2, 5)
    small = _integer(rng, 1, 10)
    a, b = (int(n) for n in rng.choice(20, size=2, replace=False) + 1)
    items = (1 + rng.choice(20, size=_integer(rng, 2, 5), replace=False)).tolist()
    left, right = (_pick(rng, SHORT_WORDS) for _ in range(2))
    limit = _integer(rng, 5, 15)
    return [
        _Function("add raise grow", "x", f"adds {k} to x", f"x + {k}", (small,), small + k,
                  NUMBER_WORDS[k]),
        _Function("subtract lower take", "x", f"subtracts {k} from x", f"x - {k}", (x,), x - k,
                  NUMBER_WORDS[k]),
        _Function("multiply scale times", "x", f"multiplies x by {times}", f"x * {times}",
                  (small,), small * times, NUMBER_WORDS[times]),
        _Function("add sum join", "a, b", "adds a and b", "a + b", (a, b), a + b),
        _Function("max larger pick", "a, b", "returns the larger of a and b", "max(a, b)",
                  (a, b), max(a, b)),
        _Function("min smaller pick", "a, b", "returns the smaller of a and b", "min(a, b)",
                  (a, b), min(a, b)),
        _Function("first get head", "items", "returns the first item of a list", "items[0]",
                  (items,), items[0]),
        _Function("last get tail", "items", "returns the last item of a list", "items[-1]",
                  (items,), items[-1]),
        _Function("count measure get", "items", "returns the length of a list", "len(items)",
                  (items,), len(items)),
        _Function("count measure get", "word", "returns the length of a word", "len(word)",
                  (left,), len(left)),
        _Function("even test is", "x", "tells if x is even", "x % 2 == 0", (x,), x % 2 == 0),
        _Function("above test is", "x", f"tells if x is more than {limit}", f"x > {limit}",
                  (a,), a > limit),
        _Function("join link pair", "a, b", "joins a and b with a dash", 'a + "-" + b',
                  (left, right), f"{left}-{right}"),
    ]  # fmt: skip


def _function(rng: np.random.Generator) -> Example:
    """A one-line function and one assertion; its name can only be copied from the prompt."""
    kind = _pick(rng, _function_kinds(rng))
    suffix = kind.suffix if kind.suffix and rng.random() < 0.3 else _pick(rng, NOUNS)
    name = f"{_pick(rng, kind.verbs.split())}_{suffix}"
    arguments = [json.dumps(argument) for argument in kind.arguments]
    call = f"{name}({', '.join(arguments)})"
    if isinstance(kind.check, bool):
        check = call if kind.check else f"not {call}"
    else:
        check = f"{call} == {json.dumps(kind.check)}"
    opening = _pick(rng, (
        "Write a Python function named {}", "Write a Python function called {}",
        "Define a Python function {}",
    )).format(name)  # fmt: skip
    request = f"{_pick(rng, ('Check', 'Test'))} it with {' and '.join(arguments)}."
    answer = f"def {name}({kind.parameters}):\n    return {kind.expression}\n\n\nassert {check}"
    return Example("function", f"{opening} that {kind.purpose}. {request}", answer)


_MAKERS: dict[str, Callable[[np.random.Generator], Example]] = {
    "add": lambda rng: _word_problem(rng, "add", 1),
    "two_step": lambda rng: _word_problem(rng, "two_step", 2),
    "sort": _sort,
    "json": _json,
    "function": _function,
}


def make_example(rng: np.random.Generator, task: str) -> Example:
    """Draws one problem of `task` (one of `TASKS`), of either split."""
    if task not in _MAKERS:
        raise ValueError(f"unknown task {task!r}: expected one of {', '.join(TASKS)}")
    return _MAKERS[task](rng)


def make_examples(seed: int, split: str, count: int, tasks=TASKS) -> list[Example]:
    """Draws `count` problems of one split, the same ones for the same arguments.

    A prompt whose CRC-32 is a multiple of 20 is a test problem, any other a training problem.

    Args:
        seed: Seed of the draw.
        split: "train" (tasks at random) or "test" (tasks in turn).
        count: Number of problems.
        tasks: Tasks to draw from.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}: expected 'train' or 'test'")
    rng = np.random.default_rng(seed)
    examples = []
    for index in range(count):
        task = tasks[index % len(tasks)] if split == "test" else _pick(rng, tasks)
        example = make_example(rng, task)
        while _is_test(example.prompt) != (split == "test"):
            example = make_example(rng, task)
        examples.append(example)
    return examples


def _is_test(prompt: str) -> bool:
    return zlib.crc32(prompt.encode("utf-8")) % TEST_SHARE == 0


def is_right(example: Example, text: str) -> bool:
    """Whether `text` is exactly the example's answer, trailing white space aside."""
    return text.rstrip() == example.answer.rstrip()


def read_gsm8k(path: str | Path) -> list[Example]:
    """Reads GSM8K's JSON lines, with "Answer: 42" for "#### 42" and no calculator annotations."""
    examples = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                question, answer = record["question"].strip(), record["answer"].strip()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object with the strings"
                    f" 'question' and 'answer'"
                ) from error
            answer, found = re.subn(r"^#### ?(.+)\Z", r"Answer: \1", answer, flags=re.MULTILINE)
            if not found:
                raise ValueError(f"{path}, line {number}: the answer does not end with '#### ...'")
            examples.append(Example("gsm8k", question, re.sub(r"<<[^<>]*>>", "", answer)))
    return examples
