"""The tokenizer of an HF directory, reduced to what training needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """Text to token ids and back.

    Attributes:
      pad_token_id: fills unused places; the end-of-sequence id when the tokenizer names none.
      eos_token_id: ends a response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer names no eos_token")
        self._tokenizer = tokenizer
        self.eos_token_id: int = tokenizer.eos_token_id
        self.pad_token_id: int = self.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str) -> np.ndarray:
        """int32 [t], without special tokens added."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text without special tokens."""
        return str(self._tokenizer.decode(np.asarray(token_ids), skip_special_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` works."""
        return bool(self._tokenizer.chat_template)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a chat by the tokenizer's own template, up to where the model's answer begins.

        Raises ValueError when the template refuses the messages.
        """
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses a prompt: {error}") from error
        return str(rendered)

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer's files into an HF directory."""
        self._tokenizer.save_pretrained(directory)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Reads the tokenizer of an HF directory. Raises ValueError when there is none."""
    if not (Path(directory) / "tokenizer.json").is_file():
        raise ValueError(f"no tokenizer at {directory}: tokenizer.json does not exist")
    try:
        return Tokenizer(PreTrainedTokenizerFast.from_pretrained(directory))
    except Exception as error:  # the tokenizers library raises plain Exception on a file it cannot parse
        raise ValueError(f"the tokenizer at {directory} cannot be read: {error}") from error


def wrap_tokenizer(tokenizer: tokenizers.Tokenizer, *, eos_token: str, pad_token: str) -> Tokenizer:
    """A tokenizer built in memory with the ``tokenizers`` library."""
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token, pad_token=pad_token))
