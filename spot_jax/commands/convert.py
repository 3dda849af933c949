"""`spot-jax convert`."""

import dataclasses
import json

from spot_jax import convert
from spot_jax.commands.options import Convert


def run(options: Convert) -> int:
    """Converts, and prints what was or would be written as a JSON object."""
    done = _to_hf(options) if options.to_hf else _from_hf(options)
    print(
        json.dumps(
            {
                "out": options.out,
                "written": not options.dry_run,
                "dtype": done.dtype,
                "parameters": done.num_params,
                "tensors": done.num_tensors,
                "config": dataclasses.asdict(done.config),
            },
            indent=2,
        )
    )
    return 0


def _from_hf(options: Convert) -> convert.Conversion:
    return convert.convert(
        options.source,
        options.out,
        dtype=options.dtype,
        block_length=options.block_length,
        mask_token_id=options.mask_token_id,
        overwrite=options.overwrite,
        dry_run=options.dry_run,
    )


def _to_hf(options: Convert) -> convert.Conversion:
    if options.dry_run:
        raise ValueError("--dry-run has no effect with --to-hf")
    return convert.to_hf(
        options.source,
        options.out,
        dtype=options.dtype,
        block_length=options.block_length,
        mask_token_id=options.mask_token_id,
        overwrite=options.overwrite,
    )
