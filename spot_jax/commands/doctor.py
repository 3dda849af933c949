"""`spot-jax doctor`."""

import platform

import jax

from spot_jax import bundled, drafter_io
from spot_jax.checkpoint import CheckpointError
from spot_jax.commands import setup
from spot_jax.commands.options import Doctor
from spot_jax.family_rows import FAMILIES

_PACKAGES = ("spot-jax", "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "tokenizers")


def run(options: Doctor) -> int:
    """Prints the report; fails if the bundled pair is not as released."""
    print(f"python        {platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        print(f"{name:13} {setup.version(name)}")
    print(f"devices       {', '.join(map(str, jax.devices()))}")
    setup.use_cache(disabled=False)
    settings = jax.config.values
    enabled = settings["jax_enable_compilation_cache"]
    print(f"cache         {enabled and settings['jax_compilation_cache_dir'] or 'off'}")
    problems = bundled.problems()
    if not problems:
        try:
            about = drafter_io.read_metadata(bundled.bundled_drafter())
            print(f"bundled pair  intact; drafter trained on {about['num_blocks']} blocks")
        except CheckpointError as error:
            problems = [str(error)]
    for problem in problems:
        print(f"bundled pair  {problem}")
    for family in FAMILIES:
        print(f"family        {family.name}: {', '.join(family.architectures)}")
        print(f"  parity      {family.parity}")
        print(f"  UNVERIFIED  {family.unverified}")
        if family.note:
            print(f"  note        {family.note}")
    return 1 if problems else 0
