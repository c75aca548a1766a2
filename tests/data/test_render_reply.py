"""Tests of the text that a chat template writes between two answers, by hand for templates of several families."""

import re
from pathlib import Path

import pytest
import tokenizers

from rljax.data.tokenizer import Tokenizer

QWEN, LLAMA = (
    Path(__file__).with_name(f"{name}_chat_template.jinja").read_text(encoding="utf-8") for name in ("qwen3", "llama")
)
PLAIN = """{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
# Only the last answer ends with the stop token, as in templates that train on the last answer only.
LAST_ONLY = """{% for message in messages %}{{ message.content }}
{% if loop.last and message.role == "assistant" %}<|im_end|>{% endif %}{% endfor %}"""
USERS_ONLY = """{% for message in messages %}{% if message.role != "tool" %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}"""
STRICT = """{% for message in messages %}
{% if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{{ message.content }}<|im_end|>{% endfor %}"""
FORGETFUL = "{{ messages[-1].content }}<|im_end|>"
TOOL = {"role": "tool", "content": "42"}
USER = {"role": "user", "content": "And now?"}
LIKE_THE_DUMMY = {"role": "user", "content": "the-answer the-answer"}


def tokenizer_of(template):
    special = ["<|bos|>", "<|im_end|>", "<|eot_id|>", "<|im_start|>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    return Tokenizer(tokenizer, {"eos_token": "<|im_end|>", "bos_token": "<|bos|>"}, template)


QWEN_TOOL = "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
QWEN_SEVERAL = (
    "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
)


def llama(role, text):
    """Returns a message of Llama's template, and the head of the next answer."""
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return f"{head.format(role)}{text}<|eot_id|>{head.format('assistant')}"


@pytest.mark.parametrize(
    ("template", "messages", "stop", "expected"),
    [
        (QWEN, [TOOL], "<|im_end|>", "\n" + QWEN_TOOL),
        (QWEN, [TOOL, TOOL, USER], "<|im_end|>", "\n" + QWEN_SEVERAL),
        (LLAMA, [TOOL], "<|eot_id|>", llama("ipython", '"42"')),
        (LLAMA, [USER], "<|eot_id|>", llama("user", "And now?")),
        (PLAIN, [TOOL, USER], "", "\nTool: 42\nUser: And now?\nAssistant:"),
        (PLAIN, [LIKE_THE_DUMMY], "", "\nUser: the-answer the-answer\nAssistant:"),
    ],
    ids=["qwen", "qwen-several", "llama-tool", "llama-user", "plain", "dummy"],
)
def test_the_text_between_two_answers(template, messages, stop, expected):
    tokenizer = tokenizer_of(template)
    assert tokenizer.render_reply(messages, ended=True) == expected
    assert tokenizer.render_reply(messages, ended=False) == stop + expected


def test_arguments_reach_the_template():
    tokenizer = tokenizer_of(QWEN)
    without_thinking = "\n" + QWEN_TOOL + "<think>\n\n</think>\n\n"
    assert tokenizer.render_reply([TOOL], ended=True, enable_thinking=False) == without_thinking
    with pytest.raises(ValueError, match="the chat template does not use effort: leave it out"):
        tokenizer.render_reply([TOOL], ended=True, effort=1)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (USERS_ONLY, [TOOL, USER], "the chat template leaves out messages of role tool behind an answer"),
        (STRICT, [TOOL, USER], "the chat template refuses a reply: roles must alternate"),
        (LAST_ONLY, [USER], "does not end an answer with '\\n<|im_end|>' when messages follow"),
        (FORGETFUL, [USER], "the chat template leaves out the model's answer when messages follow"),
        (None, [USER], "messages need a chat template, but the tokenizer has none; reply with a text"),
    ],
    ids=["users-only", "strict", "last-only", "forgetful", "none"],
)
def test_templates_that_cannot_be_continued_are_refused(template, messages, message):
    tokenizer = tokenizer_of(template)
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer.render_reply(messages, ended=True)
