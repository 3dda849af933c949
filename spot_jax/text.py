"""Text to token ids and back, by the tokenizer in the model's directory.

Never runs remote code. Markup that a user writes stays ordinary characters unless asked otherwise.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spot_jax.tokenizer_files import TOKENIZER_FILES

Message = dict[str, str]


class TextError(ValueError):
    """A tokenizer that cannot be read, or text that it cannot encode."""


class Codec(NamedTuple):
    """A tokenizer ready for use.

    Attributes:
      tokenizer: a fast tokenizer of transformers.
      directory: where it is from.
      special: its special tokens, longest first.
      adds_bos: whether it opens a text with its begin-of-text token by itself.
    """

    tokenizer: Any
    directory: Path
    special: tuple[str, ...]
    adds_bos: bool


def load_codec(directory: str | Path, control_ids: Sequence[int] = ()) -> Codec:
    """Loads the tokenizer of a Hugging Face or converted directory.

    Args:
      directory: of the model.
      control_ids: the target's mask and end of text, special whatever the tokenizer says: some
        copies list the mask among their ordinary added tokens.
    """
    directory = Path(directory)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise TextError(f"{directory} has no tokenizer: tokenizer.json is needed")
    with _quiet():
        tokenizer = _load(directory)
    if not getattr(tokenizer, "is_fast", False):
        raise TextError(f"{directory} has only a slow tokenizer: tokenizer.json is needed")
    known = tokenizer.added_tokens_decoder
    plain = [known[i].content for i in control_ids if i in known and not known[i].special]
    if plain:
        tokenizer.add_tokens(plain, special_tokens=True)
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}
    opened = tokenizer.encode("a", add_special_tokens=True)
    return Codec(
        tokenizer,
        directory,
        tuple(sorted(special, key=lambda token: (-len(token), token))),
        tokenizer.bos_token_id is not None and opened[:1] == [tokenizer.bos_token_id],
    )


def encode_text(codec: Codec, text: str, *, parse_special: bool = False) -> list[int]:
    """Token ids of a text as it is, without a chat template, after one begin-of-text token.

    Args:
      codec: see `load_codec`.
      text: to encode.
      parse_special: takes markup in the text for special tokens.
    """
    ids = codec.tokenizer.encode(
        text, add_special_tokens=False, split_special_tokens=not parse_special
    )
    return _one_bos(codec, ids)


def encode_messages(
    codec: Codec, messages: Sequence[Message], *, parse_special: bool = False
) -> list[int]:
    """Token ids of a conversation under the chat template, up to where the assistant answers.

    Args:
      codec: see `load_codec`.
      messages: each with `role` and `content`.
      parse_special: takes markup in the messages for special tokens.
    """
    if not codec.tokenizer.chat_template:
        raise TextError(f"{codec.directory} has no chat template: pass --raw-prompt")
    if parse_special:
        rendered = _render(codec, messages)
        return _one_bos(codec, codec.tokenizer.encode(rendered, add_special_tokens=False))
    # Special tokens in the messages travel through the template under names that are not special,
    # so that what is found afterwards is the template's own.
    mark = "\ue000"
    while any(mark in value for message in messages for value in message.values()):
        mark += "\ue000"
    names = {token: f"{mark}{n}\ue001" for n, token in enumerate(codec.special)}
    hidden = [{key: _replace(value, names) for key, value in m.items()} for m in messages]
    rendered = _render(codec, hidden)
    if hidden == list(messages):
        return _one_bos(codec, codec.tokenizer.encode(rendered, add_special_tokens=False))
    shown = {name: token for token, name in names.items()}
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, codec.special))})", rendered):
        if part in names:
            ids.append(codec.tokenizer.convert_tokens_to_ids(part))
        elif part:
            ids += codec.tokenizer.encode(
                _replace(part, shown), add_special_tokens=False, split_special_tokens=True
            )
    return _one_bos(codec, ids)


def decode_text(codec: Codec, ids: Sequence[int]) -> str:
    """Text of token ids, special tokens left out."""
    return codec.tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


class Ending(NamedTuple):
    """An answer up to its first stop string.

    Attributes:
      text: what comes before it.
      num_tokens: fewest tokens that hold that text.
      found: whether there was one.
    """

    text: str
    num_tokens: int
    found: bool


def cut_at_stop(codec: Codec, ids: Sequence[int], stops: Sequence[str]) -> Ending:
    """Ends an answer at the earliest occurrence of any stop string, wherever tokens begin."""
    text = decode_text(codec, ids)
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    if not places:
        return Ending(text, len(ids), False)
    text = text[: min(places)]
    lengths = range(len(ids) + 1)
    return Ending(
        text, next(n for n in lengths if decode_text(codec, ids[:n]).startswith(text)), True
    )


def _load(directory: Path) -> Any:
    # Each import where it is needed: the second also imports torch where that is installed.
    try:
        if (directory / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        return Loader.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, model_max_length=10**9
        )
    except Exception as error:  # The tokenizers library raises bare `Exception`s.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise TextError(
            f"{directory}: the tokenizer cannot be loaded ({first[:200]}): tokenizer.json and "
            "tokenizer_config.json are needed"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that transformers prints while it is imported and loads."""
    name = "TRANSFORMERS_VERBOSITY"
    before = os.environ.get(name)
    os.environ.setdefault(name, "error")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _render(codec: Codec, messages: Sequence[Message]) -> str:
    try:
        return codec.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # Templates raise what they like.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise TextError(f"the chat template refuses the messages: {first[:200]}") from error


def _replace(text: str, names: dict[str, str]) -> str:
    if not names:
        return text
    return re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], text)


def _one_bos(codec: Codec, ids: list[int]) -> list[int]:
    bos: int | None = codec.tokenizer.bos_token_id
    if bos is None:
        return ids
    rest = 0
    while rest < len(ids) and ids[rest] == bos:
        rest += 1
    return [bos] * (codec.adds_bos or rest > 0) + ids[rest:]
