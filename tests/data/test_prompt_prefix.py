"""Tests of the special tokens before plain texts: the ids are those of transformers, without the tokens behind."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from toy_runs import TOY_BASE, complete, completed, outcome, tiny
from transformers import AutoTokenizer

from rljax import evaluate
from rljax.compare.sampling import toy_prompts
from rljax.data.prompts import DataConfig, drop_long, evaluation_datasets, prompt_ids, render_problem
from rljax.data.tokenizer import load_tokenizer
from rljax.record.rows import run_dumps
from rljax.record.token_dumps import read_dump

SPECIAL = ["<bos>", "<eos>", "<user>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ '<user>' + m['content'] }}{% endfor %}"
TEXTS = ["1+1?", " a  b\n", "<bos>1+1?", "é<user>日"]


def written(directory, kind, **config):
    """Writes a tokenizer of single bytes with a post-processor; returns the ids that it puts before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    ids = {token: made.token_to_id(token) for token in SPECIAL}
    pairs, byte_level = [*ids.items()], processors.ByteLevel(trim_offsets=False)

    def template(single):
        return processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=pairs)

    post_processor, names = {
        "none": (None, []),
        "bytes": (byte_level, []),
        "behind": (template("$A <eos>"), []),
        "template": (template("<bos> $A <eos>"), ["<bos>"]),
        "several": (template("<bos> <user> $A"), ["<bos>", "<user>"]),
        "sequence": (processors.Sequence([byte_level, template("<bos> $A <eos>")]), ["<bos>"]),
        "roberta": (processors.RobertaProcessing(pairs[1], pairs[0]), ["<bos>"]),
    }[kind]
    if post_processor is not None:
        made.post_processor = post_processor
    made.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return [ids[name] for name in names]


@pytest.mark.parametrize("more", [{}, {"add_bos_token": True}, {"add_bos_token": False, "chat_template": TEMPLATE}])
@pytest.mark.parametrize("kind", ["none", "bytes", "behind", "template", "several", "sequence", "roberta"])
def test_plain_texts_begin_as_in_transformers(kind, more, tmp_path):
    prefix = written(tmp_path, kind, **more)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        whole = theirs(text)["input_ids"]
        got = prompt_ids(render_problem({"prompt": text}, ours, "auto"), ours)
        assert got.dtype == np.int32
        assert got.tolist() == whole[: len(prefix) + len(bare)] == prefix + bare
        assert ours.encode(text).tolist() == bare


def test_what_the_template_wrote_keeps_its_own_beginning(tmp_path):
    written(tmp_path, "template", chat_template=TEMPLATE)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "1+1?"}]
    expected = theirs.apply_chat_template(chat, tokenize=True, return_dict=False)
    for prompt, mode in ((chat, "auto"), (chat, True), ("1+1?", True)):
        assert prompt_ids(render_problem({"prompt": prompt}, ours, mode), ours).tolist() == expected
    # Without the template the text of a chat is a plain text.
    assert prompt_ids(render_problem({"prompt": chat}, ours, False), ours).tolist() == theirs("1+1?")["input_ids"][:-1]


@pytest.fixture
def model(tmp_path):
    """Returns a copy of the toy's base model whose tokenizer puts its pad token before a text, and ``>`` behind it."""
    directory = shutil.copytree(TOY_BASE, tmp_path / "model")
    made = Tokenizer.from_file(str(directory / "tokenizer.json"))
    pairs = [(token, made.token_to_id(token)) for token in "_>"]
    made.post_processor = processors.TemplateProcessing(single="_ $A >", pair="$A $B", special_tokens=pairs)
    made.save(str(directory / "tokenizer.json"))
    return directory


LINE = "prompts that are plain texts begin with _, which the tokenizer puts before a text"


@pytest.mark.harness
def test_a_run_samples_after_the_prefix_and_says_so(model, tmp_path):
    status, output = complete(tiny(model, tmp_path / "short", 1))
    assert status == 2
    assert "data.max_prompt_tokens = 8, but a prompt has 9 tokens" in output
    words = tiny(model, tmp_path / "run", 1, "--rollout.dump-every", "1", "--data.max-prompt-tokens", "9")
    output = completed(words)
    assert output.splitlines().count(LINE) == 1
    dump = read_dump(run_dumps(tmp_path / "run")[0])
    tokenizer = load_tokenizer(model)
    for ids, is_sampled in zip(dump.token_ids, dump.response_mask, strict=True):
        prompt = ids[: int(np.argmax(is_sampled))]
        assert len(prompt) == 9
        assert prompt[0] == tokenizer.pad_token_id
        assert (prompt[1:] < 12).all()


def test_evaluate_and_compare_begin_prompts_in_the_same_way(model, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "123+456=", "answer": "579"}\n{"prompt": "_1+1=", "answer": "2"}')
    words = ["--path", model, "--dataset", tmp_path / "x.jsonl", "--reward", "addition", "--max-response-tokens", "4"]
    status, _, error = outcome(evaluate.main, words)
    assert status == 0, error
    assert f"{LINE}; 1 of 2 texts begin with it themselves, and have it twice" in error.splitlines()
    dump = toy_prompts(2, model)
    assert [ids[0] for ids in dump.token_ids] == [load_tokenizer(model).pad_token_id] * 2
    assert load_tokenizer(TOY_BASE).prefix == ()
    with pytest.raises(ValueError, match="tokens = 8, but a prompt has 9 tokens"):  # the prefix counts
        drop_long([{"prompt": "123+456="}], load_tokenizer(model), 8, "", may_drop=False)


def test_tasks_of_reasoning_gym_begin_in_the_same_way(model):
    pytest.importorskip("reasoning_gym")
    tokenizer = load_tokenizer(model)
    ((_, problems),) = evaluation_datasets((), DataConfig(task="reasoning_gym:lcm"), tokenizer).items()
    assert prompt_ids(problems[0], tokenizer)[0] == tokenizer.pad_token_id
