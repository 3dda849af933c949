"""Host memory of a conversion, on a synthetic sharded checkpoint. Linux only.

python -m tools.convert_memory --directory /tmp --gigabytes 2
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import tyro

from spot_jax import families, hf_config, safetensors_io
from spot_jax.models import target

_BOUND = 1.3  # times the largest shard, plus the largest tensor
# Not `ru_maxrss`, which a process inherits from the one that started it.
_PEAK = """
for line in open("/proc/self/status"):
    if line.startswith("VmHWM:"):
        print(int(line.split()[1]) * 1024)
"""
_CONVERT = """
import sys
from spot_jax import convert
convert.convert(sys.argv[1], sys.argv[2])
"""
_IMPORTS = """
import jax, orbax.checkpoint, tensorstore
from spot_jax import convert
"""


def write_synthetic(directory: Path, num_bytes: int, shards: int) -> tuple[int, int]:
    """Writes a bfloat16 SDAR checkpoint of about `num_bytes`.

    Returns:
      Bytes of the largest shard and of the largest tensor.
    """
    config_json = {
        "architectures": ["SDARForCausalLM"], "vocab_size": 32768, "hidden_size": 2048,
        "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 6144, "rope_theta": 1e6, "block_size": 4,
        "mask_token_id": 32767, "eos_token_id": 0,
    }  # fmt: skip
    one = target.num_params(hf_config.target_config(config_json))
    two = target.num_params(hf_config.target_config(config_json | {"num_hidden_layers": 2}))
    config_json["num_hidden_layers"] = max(1, round((num_bytes / 2 - one) / (two - one)) + 1)
    config = hf_config.target_config(config_json)
    (directory / "config.json").write_text(json.dumps(config_json))
    shapes = target.param_shapes(config)
    sizes = {
        tensor: shapes[place.leaves[0]][len(place.index) :]
        for tensor, place in families.by_name(config.family).places(shapes).items()
    }
    random = np.random.default_rng(0)
    weight_map, largest = {}, 0
    names = sorted(sizes)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        held = names[shard::shards]
        arrays = (random.normal(size=sizes[name]).astype(np.float32) for name in held)
        safetensors_io.write_file(
            directory / file, {name: sizes[name] for name in held}, arrays, "bfloat16"
        )
        weight_map |= dict.fromkeys(held, file)
        largest = max(largest, (directory / file).stat().st_size)
    (directory / safetensors_io.INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    item = np.dtype(ml_dtypes.bfloat16).itemsize
    return largest, max(int(np.prod(size)) for size in sizes.values()) * item


def main(directory: Path, gigabytes: float = 2.0, shards: int = 4) -> int:
    """Converts in a process of its own and prints its peak resident memory; fails beyond the bound.

    Args:
      directory: where some three times the size is free; everything is removed at the end.
      gigabytes: size of the checkpoint.
      shards: number of files.
    """
    with tempfile.TemporaryDirectory(dir=directory) as name:
        root = Path(name)
        (root / "hf").mkdir()
        shard, tensor = write_synthetic(root / "hf", int(gigabytes * 1e9), shards)
        begin = time.monotonic()
        peak = _run(_CONVERT, str(root / "hf"), str(root / "out"))
        seconds = time.monotonic() - begin
    bound = _BOUND * shard + tensor
    report = {
        "peak_mb": peak / 1e6,
        "of_which_imports_mb": _run(_IMPORTS) / 1e6,
        "largest_shard_mb": shard / 1e6,
        "largest_tensor_mb": tensor / 1e6,
        "bound_mb": bound / 1e6,
        "peak_over_bound": peak / bound,
        "seconds": seconds,
    }
    print(json.dumps({key: round(value, 3) for key, value in report.items()}, indent=2))
    return int(peak > bound)


def _run(code: str, *arguments: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", code + _PEAK, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
