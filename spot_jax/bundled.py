"""The pair shipped in the package, a tiny SDAR-style target and its SPOT drafter, and prompts."""

import hashlib
from pathlib import Path

from spot_jax import json_io

ZOO = Path(__file__).parent / "zoo"
TARGET, DRAFTER, TASKS, DIGESTS = "home", "home-spot", "tasks", "SHA256SUMS"


def bundled_target() -> Path:
    """Directory of the bundled target, in Hugging Face form."""
    return _present(TARGET)


def bundled_drafter() -> Path:
    """Directory of the bundled drafter."""
    return _present(DRAFTER)


def bundled_tasks() -> list[Path]:
    """Files of held-out prompts, one a task, for `spot-jax bench`."""
    return sorted(_present(TASKS).glob("*.jsonl"))


def write_digests() -> None:
    """Writes the digests of the whole zoo; for whoever puts a new pair there."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(_digests().items())]
    (ZOO / DIGESTS).write_text("".join(lines), encoding="utf-8")


def problems() -> list[str]:
    """What is wrong with the bundled pair; nothing, if the package is as it was released."""
    missing = [name for name in (TARGET, DRAFTER, TASKS) if not (ZOO / name).is_dir()]
    if missing or not (ZOO / DIGESTS).is_file():
        return [f"{ZOO / name} is missing" for name in missing or [DIGESTS]]
    text = (ZOO / DIGESTS).read_text(encoding="utf-8", errors="replace")
    pairs = (line.partition("  ") for line in text.splitlines())
    listed = {name: digest for digest, _, name in pairs}
    found = _digests()
    return [
        f"{ZOO / name} is {'damaged' if name in found and name in listed else 'unexpected'}"
        if name in found
        else f"{ZOO / name} is missing"
        for name in sorted(listed.keys() | found.keys())
        if found.get(name) != listed.get(name)
    ]


def _digests() -> dict[str, str]:
    files = (p for name in (TARGET, DRAFTER, TASKS) for p in (ZOO / name).rglob("*") if p.is_file())
    return {
        p.relative_to(ZOO).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def _present(name: str) -> Path:
    if not (ZOO / name).is_dir():
        raise json_io.CheckpointError(f"this installation lacks the bundled {ZOO / name}")
    return ZOO / name
