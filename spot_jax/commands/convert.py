"""`spot-jax convert`."""

import dataclasses
import json

from spot_jax import convert, families
from spot_jax.commands.options import Convert
from spot_jax.models import target


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
    model = convert.load_target(
        options.source,
        dtype=options.dtype,
        block_length=options.block_length,
        mask_token_id=options.mask_token_id,
    )
    dtype = str(model.params["embed"].dtype)
    convert.to_hf(
        model,
        options.out,
        dtype=dtype,
        tokenizer_from=options.source,
        overwrite=options.overwrite,
    )
    family, shapes = families.by_name(model.config.family), target.param_shapes(model.config)
    return convert.Conversion(
        model.config, dtype, len(family.places(shapes)), target.num_params(model.config)
    )
