"""The pair shipped in the package, a tiny SDAR-style target and its SPOT drafter, and prompts.

A checkout has tiny targets of other families beside them.
"""

import hashlib
from pathlib import Path

from spot_jax import json_io

ZOO = Path(__file__).parent / "zoo"
TARGET, DRAFTER, TASKS, DIGESTS = "home", "home-spot", "tasks", "SHA256SUMS"
PACKAGED = (TARGET, DRAFTER, TASKS)


def bundled_target() -> Path:
    """Directory of the bundled target, in Hugging Face form."""
    return _present(TARGET)


def bundled_drafter() -> Path:
    """Directory of the bundled drafter."""
    return _present(DRAFTER)


def bundled_tasks() -> list[Path]:
    """Files of held-out prompts, one a task, for `spot-jax bench`."""
    return sorted(_present(TASKS).glob("*.jsonl"))


def others() -> list[Path]:
    """Directories of the zoo's other targets; of an installed package none."""
    return sorted(p for p in ZOO.iterdir() if p.is_dir() and p.name not in PACKAGED)


def write_digests() -> None:
    """Writes the digests of the whole zoo; for whoever puts a new pair there."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(_digests().items())]
    (ZOO / DIGESTS).write_text("".join(lines), encoding="utf-8")


def problems() -> list[str]:
    """What is wrong with what is here; nothing, if it is as it was released."""
    missing = [name for name in PACKAGED if not (ZOO / name).is_dir()]
    if missing or not (ZOO / DIGESTS).is_file():
        return [f"{ZOO / name} is missing" for name in missing or [DIGESTS]]
    text = (ZOO / DIGESTS).read_text(encoding="utf-8", errors="replace")
    pairs = (line.partition("  ") for line in text.splitlines())
    found, present = _digests(), (*PACKAGED, *(path.name for path in others()))
    listed = {name: digest for digest, _, name in pairs if name.partition("/")[0] in present}
    return [
        f"{ZOO / name} is {'damaged' if name in found and name in listed else 'unexpected'}"
        if name in found
        else f"{ZOO / name} is missing"
        for name in sorted(listed.keys() | found.keys())
        if found.get(name) != listed.get(name)
    ]


def _digests() -> dict[str, str]:
    whole = (*(ZOO / name for name in PACKAGED), *others())
    files = (p for directory in whole for p in directory.rglob("*") if p.is_file())
    return {
        p.relative_to(ZOO).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def _present(name: str) -> Path:
    if not (ZOO / name).is_dir():
        raise json_io.CheckpointError(f"this installation lacks the bundled {ZOO / name}")
    return ZOO / name
