"""The renderer of chats in the process of ``verifiers``: a turn appends tokens, and the past is never encoded again.

The first prompt is rendered by the chat template and encoded. Before each later turn, only the text of the new messages
is encoded and appended to the sampled tokens. Without a template the texts of the messages are joined.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from renderers import RenderedTokens
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.configs import BaseRendererConfig

from rljax.data.tokenizer import Tokenizer, load_tokenizer

_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

Message = Mapping[str, Any]


class AppendingConfig(BaseRendererConfig):
    """The settings of :class:`AppendingRenderer`."""

    name: Literal["rljax"] = "rljax"
    directory: str
    """The directory of the tokenizer."""
    stops: tuple[int, ...] = ()
    """The token ids that end a turn."""
    chat_template: bool = True
    """Whether the tokenizer's chat template is applied, where it has one."""
    arguments: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """The further arguments of the template."""
    parser: str | None = None
    """The function ``module:function`` that finds the calls of tools in a text. None: JSON in ``<tool_call>`` tags."""

    _internal_fields: ClassVar[frozenset[str]] = frozenset(
        {"directory", "stops", "chat_template", "arguments", "parser"}
    )


class AppendingRenderer:
    """The renderer that ``renderers`` loads by its import path.

    Attributes:
      has_template: Whether the chat template writes the texts.
    """

    config_class = AppendingConfig
    supports_tools = True
    is_prefix_stable = False  # Whole renders depend on the template; only ``bridge_to_next_turn`` appends.

    def __init__(self, tokenizer: Any, config: AppendingConfig) -> None:
        """Reads the trainer's tokenizer from ``config.directory``. The argument ``tokenizer`` is not used."""
        self._config, self._tokenizer = config, load(config.directory)
        self.has_template = config.chat_template and self._tokenizer.has_chat_template
        self._parse = tagged_calls if config.parser is None else imported(config.parser)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Returns the tokens of a whole chat up to the beginning of the next answer."""
        encode = self._tokenizer.encode if self.has_template else self._tokenizer.encode_prompt
        return _rendered(encode(self.text(messages, tools)).tolist(), 0, messages)

    def render_ids(self, messages: Sequence[Message], **arguments: Any) -> list[int]:
        """Returns the token ids of ``render``."""
        return list(self.render(messages, **arguments).token_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
    ) -> RenderedTokens | None:
        """Returns the prompt and the answer of a turn, followed by the tokens of the new messages.

        It returns None if one of the new messages is an answer, which was not sampled, or the template refuses the
        messages. Then the caller renders the whole chat.
        """
        if any(message["role"] == "assistant" for message in new_messages):
            return None
        past = [*previous_prompt_ids, *previous_completion_ids]
        try:
            reply = self._reply(new_messages, tools, ended=past[-1] == self._tokenizer.template_stop)
        except ValueError:
            return None
        added = self._tokenizer.encode(reply).tolist()
        return _rendered(past + added, len(past), new_messages)

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Sequence[Any] | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse:
        """Returns the text of a turn, and the calls in it if the chat has tools."""
        ids = list(token_ids)
        text = self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._config.stops else ids)
        return ParsedResponse(content=text, tool_calls=self._parse(text) if tools else [])

    def get_stop_token_ids(self) -> list[int]:
        """Returns the token ids that end a turn."""
        return list(self._config.stops)

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """Returns the text of a chat up to the beginning of the next answer.

        Raises ValueError if the template refuses the messages, or a message has parts that are not text.
        """
        if not self.has_template:
            return "".join(content_text(message) for message in messages)
        known = {"tools": list(tools)} if tools else {}
        return self._tokenizer.render_chat(messages, **self._config.arguments, **known)

    def _reply(self, new_messages: Sequence[Message], tools: Sequence[Any] | None, *, ended: bool) -> str:
        """Returns the text between the end of an answer, which the policy may have ``ended``, and the next answer."""
        texts = [{**message, "content": content_text(message)} for message in new_messages]
        if not self.has_template:
            return "".join(message["content"] for message in texts)
        known = {"tools": list(tools)} if tools else {}
        return self._tokenizer.render_reply(texts, ended=ended, **self._config.arguments, **known)


@functools.cache
def load(directory: str) -> Tokenizer:
    """Returns the tokenizer of a directory, which is read once."""
    return load_tokenizer(directory)


def content_text(message: Message) -> str:
    """Returns the text of a message. Raises ValueError if it has parts that are not text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise ValueError("a message has parts that are not text, such as an image")
    return "".join(part["text"] for part in content)


def tagged_calls(text: str) -> list[ParsedToolCall]:
    """Returns the calls ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` in a text."""
    return [_call(body) for body in _TAGGED.findall(text)]


def imported(path: str) -> Callable[[str], list[ParsedToolCall]]:
    """Imports the function ``module:function`` that finds the calls in a text, and returns a parser around it.

    The function takes a text, and returns the calls as pairs of a name and a mapping of arguments.
    """
    module, _, name = path.partition(":")
    find = getattr(importlib.import_module(module), name)

    def parse(text: str) -> list[ParsedToolCall]:
        return [ParsedToolCall(raw=text, name=called, arguments=dict(arguments)) for called, arguments in find(text)]

    return parse


def _call(body: str) -> ParsedToolCall:
    try:
        call = json.loads(body)
    except ValueError:
        return ParsedToolCall(raw=body, status=ToolCallParseStatus.INVALID_JSON)
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ParsedToolCall(raw=body, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw=body, name=name, arguments=call.get("arguments") or {})


def _rendered(ids: list[int], past: int, messages: Sequence[Message]) -> RenderedTokens:
    """Returns ``ids`` as rendered tokens. The tokens after the first ``past`` belong to the last message."""
    return RenderedTokens(
        token_ids=ids,
        message_indices=[-1] * past + [len(messages) - 1] * (len(ids) - past),
        message_roles=[message["role"] for message in messages],
    )
