"""Calibrated rank formulas on disk: one small JSON file, read strictly."""

import itertools
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spot_jax import json_io
from spot_jax.config import TargetConfig
from spot_jax.draft.ranks import Formula, RankOptions, Ranks, make_ranks
from spot_jax.drafter_io import DrafterWarning
from spot_jax.passes import MAX_BUDGET

FORMAT_VERSION = 1
_FIELDS = {
    "method": str,
    "coupled": bool,
    "prune": bool,
    "block_length": int,
    "calibrated_on": dict,
    "formulas": list,
}
_CALIBRATED_ON = {"targets": list, "temperatures": list, "blocks": int, "points": int}


def save_ranks(
    path: str | Path,
    formulas: Sequence[Formula],
    shares: Sequence[float],
    options: RankOptions,
    *,
    method: str,
    block_length: int,
    calibrated_on: dict[str, Any],
) -> None:
    """Writes a file that `load_ranks` reads, replacing one that is there.

    Args:
      path: the file; its directory must exist.
      formulas: most useful first.
      shares: of the calibration points, those whose future passed through each.
      options: how they are read.
      method: that selected them.
      block_length: of the traces.
      calibrated_on: `targets` and `temperatures` of the traces, numbers of `blocks` and `points`.
    """
    path = Path(path)
    value = {
        "format_version": FORMAT_VERSION,
        "kind": "ranks",
        "method": method,
        "coupled": options.coupled,
        "prune": options.prune,
        "block_length": block_length,
        "calibrated_on": calibrated_on,
        "formulas": [
            {"steps": [[list(pair) for pair in step] for step in formula], "share": share}
            for formula, share in zip(formulas, shares, strict=True)
        ],
    }
    problems = _problems(value)
    if problems:
        raise json_io.error_of(path, problems)
    building = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # One formula a line.
        head = json.dumps(value | {"formulas": []}, indent=2)[: -len("[]\n}")]
        rows = ",\n".join(f"    {json.dumps(row)}" for row in value["formulas"])
        building.write_text(f"{head}[\n{rows}\n  ]\n}}\n", encoding="utf-8")
        os.replace(building, path)
    except OSError as error:
        raise json_io.CheckpointError(f"cannot write {path}: {error}") from error


def load_ranks(
    path: str | Path, target_config: TargetConfig | None = None, allow_mismatch: bool = False
) -> Ranks:
    """Reads formulas that `train.calibrate` wrote, checked whole.

    Args:
      path: the file.
      target_config: of the target to draft for; `DrafterWarning` is given where its blocks have
        another length than those of the traces. Decoding is exact all the same.
      allow_mismatch: leaves the warning out.

    Raises:
      CheckpointError: naming the file and the key, or the formula by its place, from 0.
    """
    path = Path(path)
    value = json_io.read_json(path)
    problems = _problems(value)
    if problems:
        raise json_io.error_of(path, problems)
    length = value["block_length"]
    if target_config is not None and target_config.block_length != length and not allow_mismatch:
        warnings.warn(
            f"formulas {path} were calibrated on blocks of {length} positions, the target's have "
            f"{target_config.block_length}: decoding stays exact, it may be slower",
            DrafterWarning,
            stacklevel=2,
        )
    rows = value["formulas"]
    formulas = [tuple(tuple((i, j) for i, j in step) for step in row["steps"]) for row in rows]
    options = RankOptions(coupled=value["coupled"], prune=value["prune"])
    return make_ranks(formulas, [row["share"] for row in rows], options)


def _problems(value: dict[str, Any]) -> list[str]:
    if value.get("kind") != "ranks":
        return [f"kind {value.get('kind')!r} is not 'ranks'"]
    if value.get("format_version") != FORMAT_VERSION:
        version = value.get("format_version")
        return [f"format_version {version!r} is not the supported version {FORMAT_VERSION}"]
    fields = {"kind": str, "format_version": int} | _FIELDS
    problems = _field_problems(value, fields, "")
    if problems:
        return problems
    about, length, rows = value["calibrated_on"], value["block_length"], value["formulas"]
    problems = _field_problems(about, _CALIBRATED_ON, "calibrated_on.")
    if length < 2:
        problems.append(f"block_length {length} is not 2 or more")
    if not 1 <= len(rows) < MAX_BUDGET:
        problems.append(f"formulas must be 1 to {MAX_BUDGET - 1}, found {len(rows)}")
    seen: dict[frozenset, int] = {}
    for i, row in enumerate(rows):
        problem = _formula_problem(row, length)
        if problem is None:
            state = frozenset(map(tuple, itertools.chain(*row["steps"])))
            first = seen.setdefault(state, i)
            problem = None if first == i else f"is the same state as formula {first}"
        if problem:
            problems.append(f"formula {i} {problem}")
    return problems


def _field_problems(value: dict[str, Any], fields: dict[str, type], where: str) -> list[str]:
    problems = [f"has no {where}{name}" for name in fields if name not in value]
    problems += [f"unknown key {where}{name}" for name in value if name not in fields]
    return problems + [
        f"{where}{name} has the unexpected value {value[name]!r}"
        for name, kind in fields.items()
        if name in value and type(value[name]) is not kind
    ]


def _formula_problem(row: Any, length: int) -> str | None:
    if not isinstance(row, dict) or sorted(row) != ["share", "steps"]:
        return "must have the keys steps and share"
    share, steps = row["share"], row["steps"]
    if type(share) not in (int, float) or not 0 < share <= 1:
        return f"has the share {share!r}, not in (0, 1]"
    if not (isinstance(steps, list) and steps and all(isinstance(s, list) and s for s in steps)):
        return "must have steps of at least one pair each"
    pairs = list(itertools.chain(*steps))
    for pair in pairs:
        if not (isinstance(pair, list) and [type(x) for x in pair] == [int, int]):
            return f"holds {pair!r}, which is no pair of ranks"
        if not (0 <= pair[0] < length and 0 <= pair[1] < 2**31):
            return f"holds the ranks {pair}, which blocks of {length} positions do not have"
    if len({pair[0] for pair in pairs}) < len(pairs):
        return "commits a position twice"
    if len(pairs) >= length:
        return "completes the block, which needs no check"
    return None
