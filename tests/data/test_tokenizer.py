"""The tokenizer is compared with transformers: ids, text and chats. Text between two answers is compared by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rljax.data.files import parse_row
from rljax.data.prompts import render_problem, template_arguments
from rljax.data.tokenizer import Tokenizer, load_tokenizer
from rljax.data.toy import build_tokenizer

# This is Qwen3's chat template as published (Apache-2.0).
TEMPLATE = (Path(__file__).parent / "qwen3_chat_template.jinja").read_text(encoding="utf-8")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEXTS = [
    "What is 12 + 30? It's 42.",
    "naïve café ﬁnal \u0065\u0301 日本語 🙂\n\n  two  spaces\t",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\nwell</think> so , yes .",
    "",
]


def byte_level_bpe() -> tokenizers.Tokenizer:
    """Returns a tokenizer with the parts of Qwen's: NFC, its words, bytes, and added tokens after the vocabulary."""
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(WORDS), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    made.add_special_tokens(SPECIAL)
    made.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ADDED])
    return made


def write(directory: Path, tokenizer: tokenizers.Tokenizer, **config) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def qwen(directory: Path) -> Path:
    made = byte_level_bpe()
    listed = {
        str(made.token_to_id(token)): {"content": token, "special": token in SPECIAL, "normalized": False}
        for token in SPECIAL + ADDED
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False}
    config |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "add_bos_token": False}
    config |= {"added_tokens_decoder": listed, "additional_special_tokens": SPECIAL[1:]}
    return write(directory, made, **config)


def with_template(directory: Path, template: str) -> Tokenizer:
    (qwen(directory) / "chat_template.jinja").write_text(template)
    return load_tokenizer(directory)


def toy(directory: Path) -> Path:
    build_tokenizer().save(directory)
    return directory


def tokens_in_the_configuration_alone(directory: Path) -> Path:
    """Writes a tokenizer with an ordinary word as its end token, and with tokens that tokenizer.json does not have."""
    made = byte_level_bpe()
    made.enable_truncation(3)
    made.enable_padding(pad_token="!", pad_id=made.token_to_id("!"))
    listed = {"400": {"content": "<late>", "special": False, "normalized": True}}
    more = {"extra_special_tokens": ["<more>"], "added_tokens_decoder": listed}
    return write(directory, made, eos_token={"__type": "AddedToken", "content": "."}, unk_token="<new>", **more)


def tokens_in_a_map_of_their_own(directory: Path) -> Path:
    (directory / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "<|endoftext|>"})
    )
    (directory / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }}")
    return write(directory, byte_level_bpe(), eos_token="<|endoftext|>", chat_template="not this")


KINDS = [toy, qwen, tokens_in_the_configuration_alone, tokens_in_a_map_of_their_own]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def pair(request, tmp_path_factory) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    directory = request.param(tmp_path_factory.mktemp(request.param.__name__))
    return load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*SPECIAL, *ADDED, *TEXTS, "<late>", "<new>", "<more>", "."]) | st.text()).map("".join))
def test_ids_and_text_are_those_of_transformers(pair, text):
    ours, theirs = pair
    ids = theirs.encode(text, add_special_tokens=False)
    got = ours.encode(text)
    assert got.dtype == np.int32
    assert got.tolist() == ids
    assert ours.decode(got) == theirs.decode(ids, skip_special_tokens=True)


def test_each_token_alone_has_a_text(tmp_path):
    ours = load_tokenizer(qwen(tmp_path))
    assert "".join(ours.pieces(ours.encode(" the end").tolist())) == " the end"
    assert ours.pieces(ours.encode("€").tolist()) == ["\ufffd"] * 3
    assert ours.pieces([ours.eos_token_id, 10**6]) == ["<|im_end|>", ""]
    words = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"▁the": 0, "</s>": 1}, "</s>")), {"eos_token": "</s>"})
    assert words.pieces([0, 1, 7]) == [" the", "</s>", ""]


def test_whatever_is_sampled_becomes_the_text_of_transformers(pair):
    """The ids are halves of characters in any order, special tokens between them, and ids beyond the vocabulary."""
    ours, theirs = pair
    assert (len(ours), ours.has_chat_template) == (len(theirs), theirs.chat_template is not None)
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    rng = np.random.default_rng(0)
    for ids in rng.integers(0, len(ours) + 40, (200, 60)):
        assert ours.decode(ids) == theirs.backend_tokenizer.decode(ids.tolist(), skip_special_tokens=True)


CHATS = json.loads(Path(__file__).with_name("chats.json").read_text(encoding="utf-8"))
QUESTION = CHATS["a question"]
TOOL = {"type": "function", "function": {"name": "add", "description": "a & b > é", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_a_chat_is_rendered_as_transformers_renders_it(tmp_path, messages):
    ours, theirs = load_tokenizer(qwen(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for options in ({}, {"tools": [TOOL]}, {"enable_thinking": False}, {"tools": [TOOL], "enable_thinking": True}):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        assert ours.render_chat(messages, **options) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "  {% generation %}\n  {{ messages[0].content }}{% set a = 1 %}\n{% endgeneration %}{{ a is defined }}",
        "{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}{{ messages | tojson(indent=2) }}",
        "{{ dict(a=1) }}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}",
    ],
)
def test_what_transformers_adds_to_jinja_is_there(tmp_path, template):
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "no"}]
    ours = with_template(tmp_path, template).render_chat(messages)
    assert ours == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)


def test_a_template_that_writes_the_date_writes_one_day(tmp_path):
    today = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{{ strftime_now(\"%Y-%m-%d\") }}{% endif %}"
    tokenizer = with_template(tmp_path, today)
    assert tokenizer.render_chat(QUESTION) == "26 Jul 20242024-07-26"
    assert tokenizer.facts()["chat_template"][0] == today  # as the checkpoints of runs before have it


def test_a_prompt_may_begin_the_answer(tmp_path):
    chat = [*QUESTION, {"role": "assistant", "content": "So 1+1 "}]
    assert load_tokenizer(qwen(tmp_path)).render_chat(chat) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nSo 1+1 "
    )
    with pytest.raises(ValueError, match=r"fails on a prompt: ValueError: .* message does not appear") as said:
        with_template(tmp_path, "{{ messages[0].content }}").render_chat(chat)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_and_calls_of_a_row_reach_the_template(tools, tmp_path):
    ours, theirs = load_tokenizer(qwen(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    question, called, answer = CHATS["a tool's answer"]
    chat = [question, called | {"content": None, "reasoning_content": "hm"}, answer | {"name": "add"}]
    problem = parse_row({"prompt": chat, "answer": "3", "tools": tools}, "row 1")
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, tools=[TOOL])
    assert render_problem(problem, ours, "auto")["prompt"] == expected
    with pytest.raises(ValueError, match="the chat template does not use tools: leave it out"):
        render_problem(problem, with_template(tmp_path, "{{ messages[0].content }}"), "auto")


def test_a_chat_that_the_template_refuses_is_a_config_error(tmp_path):
    said = {"{{ raise_exception('no system') }}": "no system", "{% if %}": "Expected an expression", "{{ a.b.c }}": "a"}
    for template, message in said.items():
        with pytest.raises(ValueError, match=f"the chat template refuses a prompt: .*{message}"):
            with_template(tmp_path, template).render_chat(QUESTION)


def test_one_of_several_templates_is_the_default(tmp_path):
    content, both = "{{ messages[0].content }}", [{"name": name, "template": "no"} for name in ("tool_use", "rag")]
    several = [*both, {"name": "default", "template": content}]
    write(tmp_path, byte_level_bpe(), eos_token="<|im_end|>", chat_template=several)
    assert load_tokenizer(tmp_path).render_chat(QUESTION) == "1+1?"
    write(tmp_path, byte_level_bpe(), eos_token="<|im_end|>", chat_template=both)
    message = "chat templates has no entry default, only tool_use, rag: write one into chat_template.jinja"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(content)
    assert load_tokenizer(tmp_path).render_chat(QUESTION) == "1+1?"


def test_an_argument_that_nothing_uses_is_refused(tmp_path):
    plain, ours = "effort is given for the chat template, but a prompt is plain text", load_tokenizer(qwen(tmp_path))
    for prompt, mode, message in (
        (QUESTION, "auto", "the chat template does not use effort: leave it out, or correct its name"),
        *(("text", "auto", f"{plain}; chat_template = true"), ("text", False, plain)),
    ):
        with pytest.raises(ValueError, match=message):
            render_problem({"prompt": prompt}, ours, mode, {"effort": "low"})


def test_arguments_are_json_or_text_and_reach_the_template(tmp_path):
    ours = load_tokenizer(qwen(tmp_path))
    for thinking, is_written in ((False, True), (None, False)):
        text = render_problem({"prompt": QUESTION}, ours, "auto", template_arguments(thinking, ()))["prompt"]
        assert ("<think>\n\n</think>" in text) == ("<think>" in text) == is_written
    words = ("effort=low", "builtin_tools=[1]", "date=null", "text=")
    assert template_arguments(True, words) == {
        **{"enable_thinking": True, "effort": "low", "builtin_tools": [1], "date": None, "text": ""}
    }
    for wrong in ("effort", "=1", "a b=1", "enable_thinking=false"):
        with pytest.raises(ValueError, match="chat_template_kwargs must be NAME=VALUE, each name once"):
            template_arguments(True, (wrong,))


@pytest.mark.parametrize(
    ("template", "stop"),
    [
        (TEMPLATE, "<|im_end|>"),
        ("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}", "<|endoftext|>"),
        ("{% for m in messages %}{{ m.content }}</think>{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_token_that_ends_an_answer_is_found(template, stop, tmp_path):
    tokenizer = with_template(tmp_path, template)
    assert tokenizer.template_stop == (None if stop is None else tokenizer.encode(stop)[0])
    assert build_tokenizer().template_stop is None


def test_what_is_saved_reads_back_here_and_in_transformers(tmp_path):
    (tmp_path / "first").mkdir()
    first = load_tokenizer(qwen(tmp_path / "first"))
    first.save(tmp_path / "second")
    again, theirs = load_tokenizer(tmp_path / "second"), AutoTokenizer.from_pretrained(tmp_path / "second")
    for text in TEXTS:
        assert first.encode(text).tolist() == again.encode(text).tolist() == theirs.encode(text)
    assert (again.eos_token_id, again.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert again.render_chat(QUESTION) == first.render_chat(QUESTION)
    assert theirs.chat_template == TEMPLATE


def test_a_missing_tokenizer_json_has_a_remedy(tmp_path):
    fast = load_tokenizer(qwen(tmp_path))
    byte_level_bpe().model.save(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer at .*: tokenizer\.json does not exist; ") as refused:
        load_tokenizer(tmp_path)
    eval(str(refused.value).partition("; ")[2].removesuffix(" writes it"), {"AutoTokenizer": AutoTokenizer})
    again = load_tokenizer(tmp_path)
    assert [again.encode(text).tolist() for text in TEXTS] == [fast.encode(text).tolist() for text in TEXTS]
    assert again.eos_token_id == fast.eos_token_id
    assert again.render_chat(QUESTION) == fast.render_chat(QUESTION)


def test_an_unreadable_tokenizer_is_a_config_error(tmp_path):
    write(tmp_path, byte_level_bpe())
    with pytest.raises(ValueError, match="names no eos_token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(tmp_path)


LLAMA = Path(__file__).with_name("llama_chat_template.jinja").read_text(encoding="utf-8")
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
TOLD = {"role": "tool", "content": "42"}
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
        (TEMPLATE, [TOLD], "<|im_end|>", "\n" + QWEN_TOOL),
        (TEMPLATE, [TOLD, TOLD, USER], "<|im_end|>", "\n" + QWEN_SEVERAL),
        (LLAMA, [TOLD], "<|eot_id|>", llama("ipython", '"42"')),
        (LLAMA, [USER], "<|eot_id|>", llama("user", "And now?")),
        (PLAIN, [TOLD, USER], "", "\nTool: 42\nUser: And now?\nAssistant:"),
        (PLAIN, [LIKE_THE_DUMMY], "", "\nUser: the-answer the-answer\nAssistant:"),
    ],
    ids=["qwen", "qwen-several", "llama-tool", "llama-user", "plain", "dummy"],
)
def test_the_text_between_two_answers(template, messages, stop, expected):
    tokenizer = tokenizer_of(template)
    assert tokenizer.render_reply(messages, ended=True) == expected
    assert tokenizer.render_reply(messages, ended=False) == stop + expected


def test_arguments_reach_the_template():
    tokenizer = tokenizer_of(TEMPLATE)
    without_thinking = "\n" + QWEN_TOOL + "<think>\n\n</think>\n\n"
    assert tokenizer.render_reply([TOLD], ended=True, enable_thinking=False) == without_thinking
    with pytest.raises(ValueError, match="the chat template does not use effort: leave it out"):
        tokenizer.render_reply([TOLD], ended=True, effort=1)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (USERS_ONLY, [TOLD, USER], "the chat template leaves out messages of role tool behind an answer"),
        (STRICT, [TOLD, USER], "the chat template refuses a reply: roles must alternate"),
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
