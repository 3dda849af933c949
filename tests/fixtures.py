"""A tiny random SDAR checkpoint in Hugging Face form, for every test that needs a target.

Two layers, 4 query and 2 key heads whose width is not `hidden_size / heads`, block 8, 320 embedding
rows of which 300 are tokens, mask id 299, two end-of-text ids, one of them the padding.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers

VOCAB_SIZE, NUM_TOKEN_IDS = 320, 300
PAD_ID, IM_START_ID, IM_END_ID, MASK_ID = 296, 297, 298, 299
CONFIG_JSON = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "block_size": 8,
    "mask_token_id": MASK_ID,
    "eos_token_id": [IM_END_ID, PAD_ID],
    "pad_token_id": PAD_ID,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_hf(
    directory: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    tokenizer: bool = True,
    scale: float = 0.1,
    seed: int = 0,
    without: Collection[str] = (),
    extra: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a checkpoint and returns its tensors by their Hugging Face names.

    Args:
      directory: created if absent.
      config: replaces keys of `CONFIG_JSON`; a value of `...` removes the key.
      dtype: of the weights.
      shards: above 1, that many files and an index.
      tokenizer: writes one that has an id for every byte, and the four special tokens.
      scale: standard deviation of the weights; large makes distributions peaked.
      seed: of the weights.
      without: tensors that are left out.
      extra: tensors that are added, or replaced.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config_json: dict[str, Any] = CONFIG_JSON | dict(config or {})
    config_json = {name: value for name, value in config_json.items() if value is not ...}
    write_json(directory / "config.json", config_json)
    tensors = random_tensors(config_json, dtype=dtype, scale=scale, seed=seed)
    if config_json.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    tensors |= dict(extra or {})
    tensors = {name: value for name, value in tensors.items() if name not in without}
    if shards == 1:
        save_tensors(directory / "model.safetensors", tensors)
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            names = list(tensors)[shard::shards]
            save_tensors(directory / file, {name: tensors[name] for name in names})
            weight_map |= {name: file for name in names}
        index = {"metadata": {}, "weight_map": weight_map}
        write_json(directory / "model.safetensors.index.json", index)
    if tokenizer:
        write_tokenizer(directory)
    return tensors


def random_tensors(
    config_json: Mapping[str, Any], *, dtype: str = "float32", scale: float = 0.1, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random tensors of a Qwen3 trunk, written out by name and not taken from the converter."""
    width, vocab = config_json["hidden_size"], config_json["vocab_size"]
    head, inner = config_json["head_dim"], config_json["intermediate_size"]
    query = config_json["num_attention_heads"] * head
    keys = config_json["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(config_json["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (width,),
            at + "self_attn.q_proj.weight": (query, width),
            at + "self_attn.k_proj.weight": (keys, width),
            at + "self_attn.v_proj.weight": (keys, width),
            at + "self_attn.o_proj.weight": (width, query),
            at + "self_attn.q_norm.weight": (head,),
            at + "self_attn.k_norm.weight": (head,),
            at + "post_attention_layernorm.weight": (width,),
            at + "mlp.gate_proj.weight": (inner, width),
            at + "mlp.up_proj.weight": (inner, width),
            at + "mlp.down_proj.weight": (width, inner),
        }
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}
    random = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return {
        name: ((len(shape) == 1) + scale * random.normal(size=shape)).astype(kind)
        for name, shape in shapes.items()
    }


def write_tokenizer(directory: str | Path) -> None:
    """Byte-level tokenizer without merges: 256 bytes, 40 spare tokens, the four special ones."""
    directory = Path(directory)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spare = [f"<|spare_{index}|>" for index in range(PAD_ID - len(alphabet))]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *spare])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"])
    model.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", settings)


def save_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file with the reference library, marked as transformers wants it."""
    safetensors.numpy.save_file(dict(tensors), path, metadata={"format": "pt"})


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
