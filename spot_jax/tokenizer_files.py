"""The tokenizer beside a target: its files, and what they say about token ids."""

from pathlib import Path
from typing import Any, NamedTuple

from spot_jax import json_io

# What a tokenizer may consist of; copied along, never interpreted here.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


class TokenizerIds(NamedTuple):
    """What a tokenizer says about ids: one past the largest, and those of its special tokens."""

    num_ids: int
    eos_id: int | None
    pad_id: int | None


def tokenizer_files(directory: str | Path | None) -> list[Path]:
    """Files of the tokenizer in `directory`, to be copied; none where None."""
    if directory is None:
        return []
    return [p for name in TOKENIZER_FILES if (p := Path(directory) / name).is_file()]


def read_tokenizer_ids(directory: Path) -> TokenizerIds | None:
    """Ids of the tokenizer in `directory`, None if there is none."""
    names = ("tokenizer.json", "vocab.json")
    vocabulary = next((n for n in names if (directory / n).is_file()), None)
    if vocabulary is None:
        if (directory / "tokenizer.model").is_file():
            raise json_io.CheckpointError(
                f"{directory}: tokenizer.model alone is not readable, tokenizer.json is needed: "
                f"load it with transformers' AutoTokenizer and save it with save_pretrained"
            )
        return None
    try:
        return _tokenizer_ids(directory, json_io.read_json(directory / vocabulary))
    except (AttributeError, KeyError, TypeError) as error:
        raise json_io.CheckpointError(
            f"{directory}: tokenizer files are not in a known form: {error!r}"
        ) from error


def _tokenizer_ids(directory: Path, vocabulary: dict[str, Any]) -> TokenizerIds:
    ids = vocabulary  # vocab.json
    if "model" in vocabulary:  # tokenizer.json
        ids = vocabulary["model"]["vocab"]
        if isinstance(ids, list):  # Unigram: [token, score] in order of ids.
            ids = {token: index for index, (token, _) in enumerate(ids)}
        ids = ids | {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            settings |= json_io.read_json(directory / name)
    for number, token in settings.get("added_tokens_decoder", {}).items():
        ids[token["content"]] = int(number)
    if (directory / "added_tokens.json").is_file():
        ids |= json_io.read_json(directory / "added_tokens.json")

    def special(role: str) -> int | None:
        token = settings.get(role)
        token = token["content"] if isinstance(token, dict) else token
        return None if token is None else ids.get(token)

    return TokenizerIds(
        max(ids.values(), default=-1) + 1, special("eos_token"), special("pad_token")
    )
