"""Tests of the problems that a run draws, the form of their text, and their order."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from rljax.data.prompts import DataConfig, drop_long, evaluation_datasets, render_problem, say_marks, training_problems
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import build_tokenizer

DATA = Path(__file__).parents[1] / "data"
CHAT = [{"role": "system", "content": "1+1="}, {"role": "user", "content": "2+2="}]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }},{{ m.content }}>{% endfor %}{{ '0>' if add_generation_prompt }}"


@pytest.fixture
def bare():
    return build_tokenizer()


@pytest.fixture
def chatty(tmp_path):
    build_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(tmp_path)


def file_config(name="additions_chat.parquet", **changes):
    return DataConfig(task="file", path=str(DATA / name), **changes)


@pytest.mark.parametrize(
    ("prompt", "template", "with_template", "without"),
    [
        (CHAT, "auto", "s,1+1=>u,2+2=>0>", "1+1=\n\n2+2="),
        ("2+2=", "auto", "2+2=", "2+2="),
        ("2+2=", True, "u,2+2=>0>", None),
        (CHAT, False, "1+1=\n\n2+2=", "1+1=\n\n2+2="),
    ],
)
def test_the_chat_template_is_applied_as_configured(prompt, template, with_template, without, bare, chatty):
    def rendered(tokenizer):
        return render_problem({"prompt": prompt}, tokenizer, template)["prompt"]

    assert rendered(chatty) == with_template
    if without is None:
        with pytest.raises(ValueError, match="chat_template = true, but the tokenizer has none"):
            rendered(bare)
    else:
        assert rendered(bare) == rendered(None) == without


@pytest.mark.parametrize(("template", "count"), [(True, 4), ("auto", 1)])
def test_texts_with_the_marks_of_a_template_are_counted(template, count, chatty, capsys):
    texts = ["<|im_start|>user 1", "<｜User｜>2", "[INST] 3", "4+4=", [{"role": "user", "content": "[INST] 5"}]]
    say_marks([render_problem({"prompt": text}, chatty, template) for text in texts], chatty)
    mark = "[INST]" if template == "auto" else "<|im_start|>"
    assert capsys.readouterr().err == (
        f"warning: {count} prompts hold marks of a chat template, such as {mark}, and get it again; "
        "chat_template = false gives the model the bare text\n"
    )


def test_a_file_of_verls_form_becomes_problems(bare):
    problems = training_problems(file_config(), bare)
    assert len(problems) == 60
    counts = Counter(problem["prompt"] for problem in problems)
    assert sorted(set(counts.values())) == [2, 3]
    for problem in problems:
        a, b = problem["prompt"].removesuffix("=").split("+")
        assert problem["answer"] == str(int(a) + int(b))
        assert problem["data_source"] == "additions"
        assert set(problem["extra_info"]) == {"index"}


def test_long_prompts_are_counted_and_fractions_are_nested(bare):
    problems = [{"prompt": "1+1="}, {"prompt": "12+1="}, {"prompt": "123+1="}]
    assert drop_long(problems, bare, 6, "", may_drop=False) is problems
    with pytest.raises(ValueError, match=r"tokens = 4, but a prompt has 6 tokens, and 2 of 3 are longer; do this"):
        drop_long(problems, bare, 4, "; do this", may_drop=False)

    def drawn(fraction):
        problems = training_problems(file_config(fraction=fraction), bare)
        return [problem["extra_info"]["index"] for problem in problems]

    quarter, half, whole = drawn(0.25), drawn(0.5), drawn(1.0)
    assert (len(quarter), len(set(half)), len(whole), len(drawn(0.001))) == (15, 30, 60, 1)
    assert half[:15] == quarter == drawn(0.25) != whole[:15]
    assert set(half) < set(whole)
    assert len(training_problems(DataConfig(fraction=0.025))) == 500


def test_each_task_has_its_reward():
    tasks = {"toy": "addition", "toy_swaps": "swaps", "reasoning_gym:lcm+gcd": "reasoning_gym"}
    assert {task: DataConfig(task=task).reward_name for task in tasks} == tasks
    assert (file_config().reward_name, file_config(reward="module:function").reward_name) == ("math", "module:function")


def test_datasets_of_an_evaluation_are_named(bare, tmp_path):
    assert list(evaluation_datasets([], DataConfig(), bare)) == ["toy"]
    assert evaluation_datasets([], file_config(), bare) == {}
    paths = [str(DATA / "additions_text.parquet"), f"sums={DATA / 'additions_chat.parquet'}", "toy_swaps"]
    found = evaluation_datasets(paths, file_config(), bare)
    counts = {name: len(problems) for name, problems in found.items()}
    assert counts == {"additions_text": 10, "sums": 60, "toy_swaps": 200}
    with pytest.raises(ValueError, match="two datasets are called additions_text: give one as NAME=FILE"):
        evaluation_datasets([paths[0], paths[0]], file_config(), bare)
    (tmp_path / "split=test").mkdir()  # a path may hold the sign, too
    part = shutil.copy(paths[0], tmp_path / "split=test/part.parquet")
    assert list(evaluation_datasets([str(part)], file_config(), bare)) == ["part"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "file"}, "path is needed with task = file"),
        ({"chat_template": False, "enable_thinking": True}, "chat_template = false applies no template, but enable_"),
        ({"chat_template_kwargs": ("effort",)}, "chat_template_kwargs must be NAME=VALUE"),
        ({"check_answers": -1}, "check_answers must "),
        ({"path": "x.parquet"}, "path is given, but task = toy reads no file"),
        ({"fraction": 0.0}, "fraction must be above 0 and at most 1, got 0.0"),
        ({"fraction": 1.5}, "fraction must be above 0 and at most 1, got 1.5"),
        ({"reward_workers": -1}, "reward_workers must not be negative, got -1"),
        ({"reward_timeout_s": 0.0}, "reward_timeout_s must be positive and finite, got 0.0"),
        ({"task": "tyo"}, "task must be toy, toy_swaps, calculator, file or reasoning_gym:NAME, got 'tyo'"),
        ({"task_options": ("a=1",)}, "task_options is for a reasoning-gym task, but task = toy"),
        ({"task_instruction": "Hi"}, "task_instruction is for a reasoning-gym task, but task = toy"),
        ({"task": "reasoning_gym:lcm", "path": "x.jsonl"}, "path is given, but task = reasoning_gym:lcm reads no file"),
        ({"task": "reasoning_gym:lcm", "task_options": ("a",)}, "task_options must be NAME=VALUE, each name once"),
        ({"task": "reasoning_gym:lcm", "task_options": ("gcd.a=1",)}, "task_options has gcd.a, but .* has no task gcd"),
        ({"task": "reasoning_gym:lcm", "task_problems": 0}, "task_problems must be at least 1, got 0"),
    ],
)
def test_a_configuration_that_cannot_be(wrong, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**wrong)
