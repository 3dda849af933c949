"""`spot-jax convert drafter`."""

import json
from pathlib import Path

from spot_jax import checkpoint, drafter_convert
from spot_jax.commands.options import ConvertDrafter


def run(options: ConvertDrafter) -> int:
    """Converts, and prints what was written as a JSON object."""
    mapping = None
    if options.mapping is not None:
        mapping = checkpoint.read_json(Path(options.mapping))
        odd = [name for name, value in mapping.items() if not isinstance(value, str)]
        if odd:
            raise ValueError(f"{options.mapping}: {', '.join(odd)}: names must lead to names")
    metadata = {
        "block_lengths": sorted(set(options.block_length)),
        "rule": "confidence",
        "temperatures": [0.0],
        "trained_on": options.trained_on,
        "num_blocks": 0,
        "notes": f"converted from {options.source}; its training and accuracy are not known",
    }
    config = drafter_convert.convert_drafter(options.source, options.out, metadata, mapping)
    print(json.dumps({"out": options.out, "max_block": config.max_block} | metadata, indent=2))
    return 0
