"""Traces of plain decoding on disk: what every pass read, and what was committed afterwards."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spot_jax.commit import Threshold, TopN
from spot_jax.config import Sampling
from spot_jax.rule_io import rule_from_json, rule_to_json

_POINT_FIELDS = (
    "top_log_probs",
    "top_tokens",
    "log_doubt",
    "entropy",
    "read_masked",
    "root_masked",
    "block",
    "depths",
)


class Traces(NamedTuple):
    """Points (one a step, in traces of plain decoding) and the blocks they belong to.

    Attributes:
      top_log_probs: float32 `[P, L, R]` of the reading, likewise `top_tokens` (int32).
      log_doubt, entropy: float32 `[P, L]` of the reading.
      read_masked: bool `[P, L]`, masked positions of the state that was read.
      root_masked: one step later: the root of the tree that is drafted at this point.
      block: int32 `[P]`, index of the point's block.
      depths: int32 `[P, 2]`, first depth below the root that the reading is for, and their end.
      tokens: int32 `[M, L]`, final tokens of the blocks.
      order: int32 `[M, L]`, step that committed each position; -1 where none did.
      start: int32 `[M]`, absolute position of the block.
      key: uint32 `[M, 2]`, key data of the request.
    """

    top_log_probs: np.ndarray
    top_tokens: np.ndarray
    log_doubt: np.ndarray
    entropy: np.ndarray
    read_masked: np.ndarray
    root_masked: np.ndarray
    block: np.ndarray
    depths: np.ndarray
    tokens: np.ndarray
    order: np.ndarray
    start: np.ndarray
    key: np.ndarray

    def future(self) -> np.ndarray:
        """Known steps after each point's root, `[P]`."""
        order = self.order[self.block]
        known = self.root_masked & (order >= 0)
        # The steps of a block follow each other, and each commits something.
        first = np.min(np.where(known, order, np.iinfo(order.dtype).max), axis=-1)
        last = np.max(np.where(known, order, -1), axis=-1)
        return np.where(known.any(axis=-1), last - first + 1, 0)

    def select(self, blocks: np.ndarray) -> "Traces":
        """The traces of some blocks only, renumbered."""
        renumber = np.full(len(self.start), -1, np.int32)
        renumber[blocks] = np.arange(len(blocks))
        points = np.flatnonzero(renumber[self.block] >= 0)
        taken = {name: getattr(self, name)[points] for name in _POINT_FIELDS}
        taken["block"] = renumber[taken["block"]]
        rest = {n: getattr(self, n)[blocks] for n in self._fields if n not in _POINT_FIELDS}
        return Traces(**taken, **rest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceInfo:
    """How traces were made.

    Attributes:
      target: name of the target.
      block_length: L.
      sampling: of the plain decoder.
      rule: of the plain decoder.
      budget: states a pass; more than 1 where a drafter's branches were read too.
    """

    target: str
    block_length: int
    sampling: Sampling
    rule: TopN | Threshold
    budget: int = 1


def concatenate(parts: list[Traces]) -> Traces:
    """Joins shards, renumbering their blocks."""
    offsets = np.cumsum([0] + [len(p.start) for p in parts[:-1]])
    parts = [p._replace(block=p.block + o) for p, o in zip(parts, offsets, strict=True)]
    return Traces(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def write_shard(directory: Path, index: int, traces: Traces) -> None:
    """Writes one shard; a killed run leaves none half written under its final name."""
    final = directory / f"shard-{index:05d}.npz"
    partial = final.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(file, **traces._asdict())
    partial.rename(final)


def write_info(directory: Path, info: TraceInfo) -> None:
    """Writes `traces.json`. Raises ValueError where it differs from one that is there."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "traces.json"
    fields = dataclasses.asdict(info) | {"rule": rule_to_json(info.rule)}
    text = json.dumps(fields, indent=2) + "\n"
    if path.exists() and path.read_text() != text:
        raise ValueError(f"{path} was written for other options: use another directory")
    path.write_text(text)


def read_traces(directory: Path) -> tuple[TraceInfo, Traces]:
    """Reads all shards. Raises ValueError naming the file that is missing or cannot be read."""
    directory = Path(directory)
    info = _read_info(directory / "traces.json")
    parts = []
    for path in sorted(directory.glob("shard-*.npz")):
        try:
            with np.load(path, allow_pickle=False) as arrays:
                parts.append(Traces(**{name: arrays[name] for name in Traces._fields}))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path}: not a shard of traces: {error}") from error
    if not parts:
        raise ValueError(f"{directory}: no shards")
    return info, concatenate(parts)


def _read_info(path: Path) -> TraceInfo:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable: {error}") from error
    names = [field.name for field in dataclasses.fields(TraceInfo)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ValueError(f"{path}: must have the keys {', '.join(names)}")
    try:
        return TraceInfo(
            target=values["target"],
            block_length=values["block_length"],
            sampling=_read_sampling(values["sampling"]),
            rule=rule_from_json(values["rule"]),
            budget=values["budget"],
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _read_sampling(values: dict[str, Any]) -> Sampling:
    # JSON has no tuples.
    read: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
    return Sampling(**read)
