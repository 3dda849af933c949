"""Starts a target from the weights of another: fewer layers, another tokenizer, another family.

How the models of the zoo come from one: real families come from one another likewise (SDAR from
Qwen3, Dream from Qwen2.5, LLaDA2 from Ling). What follows is training; this only has to be a better
beginning than chance.
"""

from typing import Any

import numpy as np
import tokenizers

from spot_jax.config import TargetConfig
from spot_jax.models.target import param_shapes


def adapt(
    params: dict[str, Any],
    source: TargetConfig,
    config: TargetConfig,
    source_words: tokenizers.Tokenizer,
    words: tokenizers.Tokenizer,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Parameters of shape `config` from those of `source`.

    Args:
      params: flat tree of a dense target with q/k norms.
      source: its configuration.
      config: the configuration wanted; widths of heads and hidden states must be the source's.
      source_words: tokenizer of the source.
      words: tokenizer wanted.
      seed: of what the source has no counterpart for: routers.

    Raises:
      ValueError: shapes that cannot be carried over, by name.
    """
    given = {name: np.asarray(leaf, np.float32) for name, leaf in params.items()}
    result = {"norm": given["norm"], "embed": _embeddings(given["embed"], source_words, words)}
    if not config.tie_embeddings:
        head = given.get("head", given["embed"])
        result["head"] = _embeddings(head, source_words, words)
    kept = np.linspace(0, source.num_layers - 1, config.num_layers).round().astype(int)
    stack = {
        name.removeprefix("layers_"): leaf[kept]
        for name, leaf in given.items()
        if name.startswith("layers_")
    }
    if source.qk_norm and not config.qk_norm:
        stack = _fold_norms(stack, source)
    if config.experts is not None:
        stack |= _experts(stack, config, np.random.default_rng(seed))
    shapes = param_shapes(config)
    for name, shape in shapes.items():
        if name.endswith("_bias"):
            result[name] = np.zeros(shape, np.float32)
        elif name.startswith("layers_"):
            result[name] = stack[name.removeprefix("layers_")]
    wrong = [n for n, shape in shapes.items() if n not in result or result[n].shape != shape]
    if wrong:
        raise ValueError(f"cannot be started from the source's: {', '.join(wrong)}")
    return {name: result[name] for name in shapes}


def _embeddings(table: np.ndarray, source_words, words) -> np.ndarray:
    """A token's row is the mean of the rows of its text under the source's tokenizer."""
    rows = np.zeros((words.get_vocab_size(), table.shape[1]), np.float32)
    names = source_words.get_vocab()
    for token in range(len(rows)):
        same = names.get(words.id_to_token(token))
        text = words.decode([token], skip_special_tokens=False)
        ids = source_words.encode(text, add_special_tokens=False).ids if same is None else [same]
        rows[token] = table[ids].mean(axis=0) if ids else table.mean(axis=0)
    return rows


def _fold_norms(stack, source: TargetConfig):
    """Scales queries and keys as their norms did on average: for inputs of unit variance."""
    result = {name: leaf for name, leaf in stack.items() if name not in ("q_norm", "k_norm")}
    for name, scale in (("q", stack["q_norm"]), ("k", stack["k_norm"])):
        weight = stack[name]
        heads = weight.reshape(len(weight), -1, source.head_dim, weight.shape[-1])
        spread = (heads * stack["attention_norm"][:, None, None]) ** 2
        size = np.sqrt(spread.sum(axis=-1).mean(axis=-1))[..., None, None]
        result[name] = (heads / size * scale[:, None, :, None]).reshape(weight.shape)
    return result


def _experts(stack, config: TargetConfig, rng: np.random.Generator):
    """Shared and routed experts out of the neurons of the plain feed-forward, in turn."""
    experts = config.experts
    assert experts is not None
    size, shared, number = experts.intermediate_size, experts.shared_size, experts.num_experts
    routed = np.arange(number)[:, None] * size + np.arange(size)
    routed = shared + routed % (stack["gate"].shape[1] - shared)
    shape = (len(stack["gate"]), number, config.hidden_size)
    return {
        "experts_gate": stack["gate"][:, routed],
        "experts_up": stack["up"][:, routed],
        "experts_down": np.swapaxes(np.swapaxes(stack["down"], 1, 2)[:, routed], 2, 3),
        "shared_gate": stack["gate"][:, :shared],
        "shared_up": stack["up"][:, :shared],
        "shared_down": stack["down"][:, :, :shared],
        "router": rng.normal(scale=0.02, size=shape).astype(np.float32),
    }
