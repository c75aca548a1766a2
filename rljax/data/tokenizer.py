"""The tokenizer of a Hugging Face directory for training: ``tokenizers`` for ids, transformers for chat templates."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers

from rljax.errors import describe, naming, parse_json

# Rendered templates are searched for the answer, so its words must occur nowhere else in them.
_SHORT_CHAT = ({"role": "user", "content": "a question"}, {"role": "assistant", "content": "the-answer"})

# Today's date would give other prompts each day. This is the date of Llama 3.2's template where it knows no other.
_DAY = datetime.date(2024, 7, 26)
_TODAY = re.compile(r"""\bstrftime_now\s*\(\s*(['"])(.*?)\1\s*\)""")
_NO_ID = 2**32 - 1  # an id that no vocabulary has; it marks the place of a text among special tokens

CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """A tokenizer that converts text to token ids and back.

    Attributes:
      pad_token_id: The id that fills unused positions; the end-of-sequence id if the tokenizer names no other.
      eos_token_id: The id that ends a response.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, named: Mapping[str, str], chat_template: str | None = None
    ) -> None:
        """Prepares a tokenizer of the ``tokenizers`` library, which is changed in place.

        ``named`` are the special tokens by the names in chat templates (``eos_token``, ``pad_token``, ...). The chat
        template is a jinja2 text. Raises ValueError without an ``eos_token``.
        """
        if "eos_token" not in named:
            raise ValueError("the tokenizer names no eos_token")
        _add_missing(tokenizer, [tokenizers.AddedToken(token, special=True) for token in named.values()])
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._named, self._chat_template = tokenizer, dict(named), chat_template
        self.eos_token_id = _id(tokenizer, named["eos_token"])
        self.pad_token_id = _id(tokenizer, named.get("pad_token", named["eos_token"]))

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text, int32 [t], without special tokens. Raises ValueError if it is no UTF-8."""
        text.encode()
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Returns the token ids of a prompt that no chat template wrote, int32 [t], with the ``prefix`` before them.

        Raises ValueError if the text is no UTF-8.
        """
        ids = self.encode(text)
        return np.concatenate([np.asarray(self.prefix, np.int32), ids]) if self.prefix else ids

    @functools.cached_property
    def prefix(self) -> tuple[int, ...]:
        """The ids of the special tokens that the tokenizer puts before a text, such as a BOS, not those behind it."""
        processor = self._tokenizer.post_processor
        if processor is None:
            return ()
        word = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": _NO_ID}, "a")).encode("a")
        ids = processor.process(word).ids
        return tuple(ids[: ids.index(_NO_ID)]) if _NO_ID in ids else ()

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of token ids without special tokens."""
        return str(self._tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token by itself; an id without a token gives "".

        Special tokens have their names. A token that is a part of a character gives the replacement character.
        """
        if isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel):
            return [self._tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
        # The decoder of other tokenizers would drop the space before a word.
        return [(self._tokenizer.id_to_token(token) or "").replace("\u2581", " ") for token in token_ids]

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template, which ``render_chat`` needs."""
        return bool(self._chat_template)

    def render_chat(self, messages: Sequence[Mapping[str, str]], **arguments: Any) -> str:
        """Renders a chat with the tokenizer's template, up to the beginning of the model's answer.

        A last message of the assistant begins this answer. The template gets ``arguments`` such as ``enable_thinking``.

        Raises:
          ValueError: The template refuses the messages, or does not use an argument.
        """
        begun = any(message.get("role") == "assistant" and message.get("content") for message in messages[-1:])
        ending = {"add_generation_prompt": not begun, "continue_final_message": begun}
        return self._checked(messages, "a prompt", **ending, **arguments)

    def render_reply(self, messages: Sequence[Mapping[str, str]], *, ended: bool, **arguments: Any) -> str:
        """Renders the text of the template from the end of an answer to the beginning of the model's next answer.

        The text does not depend on the chat before, so it is taken from a short chat that ends with ``messages``. These
        have for example the roles tool and user. ``ended`` says whether the answer's tokens hold the token
        ``template_stop`` already. Its text is then left out. ``arguments`` go to the template, such as
        ``enable_thinking``.

        Raises:
          ValueError: The template refuses the messages or leaves one out, does not use an argument, or ends an answer
            in another way when messages follow.
        """
        if not self.has_chat_template:
            raise ValueError("messages need a chat template, but the tokenizer has none; reply with a text")
        marks = [dict(message) | {"content": f"mark{i}of{len(messages)}"} for i, message in enumerate(messages)]
        text, marked = (
            self._behind_answer(chat, add_generation_prompt=True, **arguments) for chat in (messages, marks)
        )
        missing = [mark["role"] for mark in marks if mark["content"] not in marked]
        if missing:
            raise ValueError(f"the chat template leaves out messages of role {', '.join(missing)} behind an answer")
        if self.template_stop is None:
            return text
        stop = self._tokenizer.id_to_token(self.template_stop) or ""
        ending, stop, _ = self._behind_answer([], add_generation_prompt=False, **arguments).partition(stop)
        if not text.startswith(ending + stop):
            raise ValueError(f"the chat template does not end an answer with {ending + stop!r} when messages follow")
        return text.removeprefix(ending + stop) if ended else text

    def _behind_answer(self, messages: Sequence[Mapping[str, str]], **arguments: Any) -> str:
        """Renders a short chat in which ``messages`` follow the model's answer; returns the text after that answer."""
        text = self._checked([*_SHORT_CHAT, *messages], "a reply", **arguments)
        _, found, behind = text.partition(_SHORT_CHAT[-1]["content"])
        if not found:
            raise ValueError("the chat template leaves out the model's answer when messages follow")
        return behind

    def _checked(self, messages: Sequence[Mapping[str, str]], what: str, **arguments: Any) -> str:
        """Renders messages. Raises ValueError if that fails; the error calls the messages ``what``."""
        given = [name for name in arguments if name not in ("add_generation_prompt", "continue_final_message")]
        unknown = [name for name in given if not re.search(rf"\b{re.escape(name)}\b", self._chat_template or "")]
        if unknown:
            whose = " (tools are a key of the row)" if "tools" in unknown else ""
            said = f"the chat template does not use {', '.join(unknown)}"
            raise ValueError(f"{said}: leave it out, or correct its name{whose}")
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return _render(chat, self._chat_template or "", arguments | self._named)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses {what}: {error}") from error
        except Exception as error:  # a template is a program that may raise anything
            raise ValueError(f"the chat template fails on {what}: {describe(error)}") from error

    @functools.cached_property
    def template_stop(self) -> int | None:
        """The id of the special token with which the chat template ends an answer, or None if it cannot be told."""
        if not self.has_chat_template:
            return None
        try:
            ending = self._behind_answer([], add_generation_prompt=False)
        except ValueError:
            return None
        special = {key for key, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return next((token for token in self.encode(ending).tolist() if token in special), None)

    def facts(self) -> dict[str, Any]:
        """Returns all facts that decide the tokens of a run, as JSON: ``tokenizer`` (ids, texts) and ``chat_template``.

        Files that differ only in their form, such as the order of keys, or in a padding token, have equal facts.
        """
        parts = json.loads(self._tokenizer.to_str())
        names = ("normalizer", "pre_tokenizer", "model", "decoder", "added_tokens")
        ids = self._tokenizer.encode("").ids  # what is put around a text with special tokens
        template = (self._chat_template or "").replace("\r\n", "\n").removesuffix("\n")
        used = {key: token for key, token in self._named.items() if re.search(rf"\b{re.escape(key)}\b", template)}
        splits = self._tokenizer.encode_special_tokens
        return {
            "tokenizer": [{name: _without_unset(parts.get(name)) for name in names}, ids, splits, self.eos_token_id],
            "chat_template": [template, used],
        }

    def digest(self) -> str:
        """Returns a hash, in hexadecimal digits, of the facts under ``tokenizer``, which decide ids and texts."""
        return hashlib.sha256(json.dumps(self.facts()["tokenizer"], sort_keys=True).encode()).hexdigest()

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer's files into a Hugging Face directory."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(Path(directory) / TOKENIZER_FILE))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._named}
        if self._chat_template is not None:
            config["chat_template"] = self._chat_template
        (Path(directory) / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _render(chat: list[dict[str, Any]], template: str, arguments: Mapping[str, Any]) -> str:
    """Renders one chat as transformers does, but for the date."""
    template = _TODAY.sub(lambda found: found[1] + _DAY.strftime(found[2]) + found[1], template)
    # This import takes half a second, and would say on stderr if there is no torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template([chat], chat_template=template, **arguments)  # and the places of answers
    return str(rendered[0][0])


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face directory.

    Raises:
      ValueError: There is no ``tokenizer.json``, or the tokenizer cannot be read.
    """
    directory = Path(directory)
    if not (directory / TOKENIZER_FILE).is_file():
        place = repr(str(directory))
        remedy = f"AutoTokenizer.from_pretrained({place}).save_pretrained({place}) writes it"
        raise ValueError(f"no tokenizer at {directory}: {TOKENIZER_FILE} does not exist; {remedy}")
    try:
        return _read(directory)
    except (LookupError, TypeError, AttributeError, AssertionError, UnicodeDecodeError) as error:
        reason = "a file of it is not UTF-8 text, or not of the form that transformers writes"
        raise ValueError(f"the tokenizer at {directory} cannot be read: {reason}") from error
    except Exception as error:  # the tokenizers library raises plain Exception on a file it cannot parse
        raise ValueError(f"the tokenizer at {directory} cannot be read: {error}") from error


def _read(directory: Path) -> Tokenizer:
    """Reads tokenizer.json and adds the tokens that only the configuration names, as transformers does."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    config = _read_json(directory / CONFIG_FILE)
    if "added_tokens_decoder" not in config:
        config |= _read_json(directory / "special_tokens_map.json")
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    _add_missing(tokenizer, [tokenizers.AddedToken(**token) for _, token in listed])
    if tokenizer.padding is not None:
        config.setdefault("pad_token", tokenizer.padding["pad_token"])
    named = {key: _content(token) for key, token in config.items() if key.endswith("_token") and _content(token)}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(more, Mapping):
        named |= {key: _content(token) for key, token in more.items()}
        more = []
    made = Tokenizer(tokenizer, named, _read_chat_template(directory, config))
    _add_missing(tokenizer, [tokenizers.AddedToken(_content(token), special=True) for token in more])
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
    return made


def _read_chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template. Raises ValueError if the configuration lists several without a default."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template: str | list[dict[str, str]] | None = config.get("chat_template")
    if not isinstance(template, list):
        return template
    several = {one["name"]: one["template"] for one in template}
    if "default" not in several:
        said = f"the list of chat templates has no entry default, only {', '.join(several)}"
        raise ValueError(f"{said}: write one into chat_template.jinja")
    return several["default"]


def _without_unset(value: Any) -> Any:
    """Returns a JSON value without the keys that are null or false, which a newer library may write."""
    if isinstance(value, dict):
        return {key: _without_unset(each) for key, each in value.items() if each is not None and each is not False}
    return [_without_unset(each) for each in value] if isinstance(value, list) else value


def _read_json(file: Path) -> dict[str, Any]:
    with naming(file.name):
        return dict(parse_json(file.read_bytes())) if file.is_file() else {}


def _content(token: Any) -> str:
    """Returns the text of a token that is written as text or as a mapping; "" for anything else."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


def _add_missing(tokenizer: tokenizers.Tokenizer, tokens: Iterable[tokenizers.AddedToken]) -> None:
    """Adds the tokens that are not added yet; a token of the vocabulary keeps its id."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([token for token in tokens if token.content not in added])


def _id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id
