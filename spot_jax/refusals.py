"""Models that cannot be decoded exactly, whatever their trunk, and how they are recognised.

Their samplers remember more than tokens, masks and the step, so that a state of the block does not
determine the next one and there is nothing that a draft could be checked against; or their
attention is one that no family has.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_EDITS = "its steps insert and delete positions"
# Searched in the names of classes and in the model type.
_CLASSES = {
    r"diffusion_?gemma": "its canvas is re-noised and each step reads the previous prediction",
    r"wedlm": "it decodes under causal attention with reordered tokens",
    r"lfm2\w*block": "its canvas is uniform noise that steps overwrite",
    r"dreamon": _EDITS,
}
# Keys of config.json or generation_config.json that hold a token: of LLaDA2.2, and of DreamOn.
_TOKENS = {name: _EDITS for name in ("delete_token_id", "split_token_id", "expand_token_id")}
# By family, whole names of directories: these models may have another's configuration to the
# letter. A name that merely mentions one is nobody's business.
_DIRECTORIES = {
    "llada2": (r"(\w+_)?llada-?2[._]2(-(mini|flash)\b.*)?", _EDITS),
    "dream": (r"(\w+_)?dreamon(-v?\d.*)?", _EDITS),
    "a2d-qwen3": (r".*-diffusion-mdlm(-v[\d.]+)?", "its attention is full, no block diffusion"),
}


def reason(
    classes: Sequence[str], configs: Sequence[Mapping[str, Any]], model_type: Any
) -> str | None:
    """Why what the configuration files say cannot be decoded exactly, None where it can.

    Args:
      classes: names in `architectures` and `auto_map`.
      configs: contents of config.json and generation_config.json.
      model_type: of config.json.
    """
    said = " ".join([*classes, str(model_type)]).lower()
    for pattern, why in _CLASSES.items():
        if re.search(pattern, said):
            return why
    for name, why in _TOKENS.items():
        if any(config.get(name) is not None for config in configs):
            return why
    return None


def reason_of_name(family: str, names: Sequence[str]) -> str | None:
    """Why a model of `family` that is called so cannot be decoded exactly, None where it can."""
    pattern, why = _DIRECTORIES.get(family, ("", ""))
    bare = (name.rpartition("--")[2].lower() for name in names)
    return why if pattern and any(re.fullmatch(pattern, name) for name in bare) else None
