"""Decodes diffusion language models several times faster, without changing one token.

    import spot_jax
    target = spot_jax.load_target(spot_jax.bundled_target())
    drafter = spot_jax.load_drafter(spot_jax.bundled_drafter(), target.config)
    result = spot_jax.decode(target, prompts, lengths, spot_jax.request_keys(0, len(lengths)),
                             spot_jax.DecodeConfig(budget=16), drafter)

The names below are imported when they are first used, so that `import spot_jax` costs nothing.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spot_jax.bundled import bundled_drafter, bundled_target
    from spot_jax.commit import Threshold, TopN
    from spot_jax.config import Sampling, TargetConfig
    from spot_jax.convert import load_target
    from spot_jax.costs import Costs
    from spot_jax.decode import DecodeConfig, decode
    from spot_jax.draft import (
        Chain,
        ConfidenceSets,
        ConfidenceTree,
        DraftContext,
        Drafter,
        Ranks,
        Spot,
        SpotSets,
    )
    from spot_jax.drafter_io import load_drafter, save_drafter
    from spot_jax.models.target import TargetModel
    from spot_jax.noise import request_keys
    from spot_jax.ranks_io import load_ranks
    from spot_jax.state import DecodeResult, DraftTree, Trace

__all__ = [
    "Chain",
    "ConfidenceSets",
    "ConfidenceTree",
    "Costs",
    "DecodeConfig",
    "DecodeResult",
    "DraftContext",
    "DraftTree",
    "Drafter",
    "Ranks",
    "Sampling",
    "Spot",
    "SpotSets",
    "TargetConfig",
    "TargetModel",
    "Threshold",
    "TopN",
    "Trace",
    "bundled_drafter",
    "bundled_target",
    "decode",
    "load_drafter",
    "load_ranks",
    "load_target",
    "request_keys",
    "save_drafter",
]

_HOMES = {
    "bundled": ("bundled_drafter", "bundled_target"),
    "commit": ("Threshold", "TopN"),
    "config": ("Sampling", "TargetConfig"),
    "convert": ("load_target",),
    "costs": ("Costs",),
    "decode": ("DecodeConfig", "decode"),
    "draft": (
        "Chain",
        "ConfidenceSets",
        "ConfidenceTree",
        "DraftContext",
        "Drafter",
        "Ranks",
        "Spot",
        "SpotSets",
    ),
    "drafter_io": ("load_drafter", "save_drafter"),
    "models.target": ("TargetModel",),
    "noise": ("request_keys",),
    "ranks_io": ("load_ranks",),
    "state": ("DecodeResult", "DraftTree", "Trace"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value) -> None:
        # Importing the submodule `decode` must not hide the function of that name.
        if name not in _HOME_OF or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
