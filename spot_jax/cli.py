"""The `spot-jax` command. Standard output is data; all else goes to standard error.

Exit status: 0 success, 1 failure (for `verify`: DIFFERENT), 2 bad input (for `verify` also
INCONCLUSIVE), 130 interrupted, 141 the reader of standard output has gone.
"""

import contextlib
import dataclasses
import difflib
import importlib
import importlib.metadata
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import tyro

from spot_jax.commands.options import COMMANDS

_DESCRIPTION = "Decodes diffusion language models several times faster, without changing one token."


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Errors are one line. With SPOT_JAX_DEBUG=1 in the environment they are tracebacks.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments[:2] == ["convert", "drafter"]:  # A model directory of that name is ./drafter.
        arguments[:2] = ["convert-drafter"]
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            status = _run(arguments)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # Python would complain once more when it flushes at exit.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except KeyboardInterrupt:
            return _fail("interrupted", 130)


def _run(arguments: Sequence[str]) -> int:
    debug = os.environ.get("SPOT_JAX_DEBUG", "0") not in ("", "0")
    if arguments == ["--version"]:
        print(importlib.metadata.version("spot-jax"))
        return 0
    try:
        options = _parse(arguments)
        _check_empty(options)
        name = next(name for name, kind in COMMANDS.items() if type(options) is kind)
        # Imported here, so that help and wrong options need no JAX.
        module = f"spot_jax.commands.{name.replace('-', '_')}"
        return importlib.import_module(module).run(options)
    except SystemExit as stop:
        return int(stop.code or 0)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        if debug:
            raise
        return _fail(str(error), 2)
    except RuntimeError as error:  # JAX: no such device, out of memory.
        if debug:
            raise
        return _fail(str(error).splitlines()[0], 1)


def _parse(arguments: Sequence[str]) -> Any:
    """The options of a command; exits with one line where they are wrong."""
    kind = COMMANDS.get(arguments[0]) if arguments else None
    if kind is None and not (arguments and arguments[0] in ("-h", "--help")):
        given = f"unknown command {arguments[0]!r}" if arguments else "no command given"
        raise SystemExit(_fail(f"{given}: {', '.join(COMMANDS)} are known; see --help", 2))
    if kind is not None:
        _check_names(arguments, [field.name for field in dataclasses.fields(kind)])
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written):
            return tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="spot-jax",
                description=_DESCRIPTION,
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit:
        if written.getvalue():
            raise SystemExit(_fail(_first_paragraph(written.getvalue()), 2)) from None
        raise


def _check_names(arguments: Sequence[str], fields: Sequence[str]) -> None:
    known = ["--help", *("--" + field.replace("_", "-") for field in fields)]
    for argument in arguments[1:]:
        name = argument.partition("=")[0]
        if name == "--":
            return
        if name.startswith("--") and name.replace("_", "-") not in known:
            longer = [other for other in known if other.startswith(name)]
            near = (longer or difflib.get_close_matches(name, known, 1, 0.0))[0]
            raise SystemExit(_fail(f"unknown option {name}: did you mean {near}?", 2))


def _check_empty(options: Any) -> None:
    """Raises where an option is empty, as of an unset variable: it would mean the default."""
    for field in dataclasses.fields(options):
        if getattr(options, field.name) == "":
            raise ValueError(f"--{field.name.replace('_', '-')} is empty")


def _first_paragraph(box: str) -> str:
    """The message in one of tyro's boxes, without the frame and the help below it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│╰╯ ") for line in plain.splitlines()]
    is_rule = [bool(line) and set(line) <= set("─-") for line in lines]
    first = 2 if is_rule[1:2] == [True] else 1  # A title comes first; below it, a rule or none.
    last = next((i for i, rule in enumerate(is_rule) if rule and i >= first), len(lines))
    return " ".join(lines[first:last])


def _fail(message: str, status: int) -> int:
    print(f"spot-jax: error: {message}", file=sys.stderr)
    return status


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"spot-jax: warning: {message}", file=sys.stderr)
