"""Tests of the problems of reasoning-gym's tasks: existing tasks, seeds that fix the problems, and refused settings."""

import os
import random
import re
import subprocess
import sys

import pytest
from toy_runs import ROOT, TOY_BASE

from rljax.data import gym_problems
from rljax.data.gym_problems import own_options, right_answer, task_names
from rljax.data.prompts import DataConfig, evaluation_datasets, training_problems
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import build_tokenizer
from rljax.run.build import load_problems, look_at_data
from rljax.run.config import Config
from rljax.run.config_file import load_config

CHECKSUM = """
import hashlib
from rljax.data import gym_problems as gym
gym.EVAL_PROBLEMS = 40
made = gym.gym_problems(["list_functions", "word_ladder"], "eval", count=0, options={})
print(hashlib.sha256(repr([(one["prompt"], one["answer"]) for one in made]).encode()).hexdigest())
"""


def test_tasks_are_named_with_a_prefix_and_have_own_settings():
    assert task_names("reasoning_gym:lcm") == ("lcm",)
    assert task_names("reasoning_gym:lcm+gcd") == ("lcm", "gcd")
    assert task_names("toy") == task_names("data/reasoning_gym.parquet") == ()
    for wrong in ("reasoning_gym:", "reasoning_gym:lcm+", "reasoning_gym:lcm+lcm", "reasoning_gym:a b"):
        with pytest.raises(ValueError, match=r"task must be reasoning_gym:NAME or .*, each name once, got"):
            task_names(wrong)
    options, task = {"max_value": 9, "lcm.min_value": 2}, "reasoning_gym:lcm+gcd"
    own = [own_options(name, task, options) for name in ("lcm", "gcd", "dice")]
    assert own == [{"max_value": 9, "min_value": 2}, {"max_value": 9}, {}]


def test_an_answer_may_stand_in_the_metadata_and_a_library_lack(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"reasoning_gym:lcm needs reasoning-gym .*: pip install '\.\[gym\]'"):
        gym_problems.make("lcm", {}, 0, 1)
    assert right_answer({"answer": "", "metadata": {}}) == ""
    held = [{"possible_answer": {0: 1, 5: 2}}, {"example_answer": "P"}, {"example_correct_answer": "U R"}, {"moves": 3}]
    answers = [right_answer({"answer": None, "metadata": metadata}) for metadata in held]
    assert answers == ['{"0": 1, "5": 2}', "P", "U R", ""]


@pytest.fixture
def library():
    found = pytest.importorskip("reasoning_gym.factory")
    state = random.getstate()
    yield found
    random.setstate(state)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("codeio", {}, "codeio makes other problems each time: choose another task"),
        ("composite", {}, "reasoning_gym has no task 'composite'"),
        ("chian_sum", {}, "reasoning_gym has no task 'chian_sum'; did you mean chain_sum or "),
        ("chain_sum", {"min_digit": 1}, "has no setting 'min_digit' of its own; its settings: min_terms, max"),
        ("chain_sum", {"seed": 1}, "chain_sum has no setting 'seed' of its own"),
        ("chain_sum", {"min_digits": 5}, "cannot be made with {'min_digits': 5}: max_digits must be >= min_di"),
        ("chain_sum", {"min_digits": "x"}, "cannot be made with {'min_digits': 'x'}: '>' not supported"),
    ],
)
def test_what_the_library_refuses_is_one_line(library, name, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        gym_problems.make(name, options, 0, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.harness
@pytest.mark.slow
def test_problems_do_not_depend_on_the_hash_seed(library):
    """word_ladder depends on the hash seed, and list_functions draws from Python's global random numbers."""
    environment, words = os.environ | {"PYTHONPATH": str(ROOT)}, [sys.executable, "-c", CHECKSUM]
    first, second = (
        subprocess.check_output(words, env=environment | {"PYTHONHASHSEED": seed}, timeout=300) for seed in "12"
    )
    assert len(first.strip()) == 64
    assert first == second


@pytest.mark.harness
def test_the_splits_of_a_mixture_share_no_prompt(library, tmp_path, monkeypatch):
    monkeypatch.setattr(gym_problems, "EVAL_PROBLEMS", 40)
    options = {"task_options": ("lcm.max_value=40", "chain_sum.max_terms=2"), "task_problems": 301}
    config = DataConfig(task="reasoning_gym:lcm+chain_sum", task_instruction="Only the number.", **options)
    build_tokenizer().save(tmp_path)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path)
    training = training_problems(config, tokenizer)
    evaluated = evaluation_datasets(["both=reasoning_gym:lcm+chain_sum", "reasoning_gym:lcm"], config, tokenizer)
    assert list(evaluated) == ["both", "lcm"]
    prompts = {problem["prompt"] for problem in training}
    for problems in evaluated.values():
        assert not prompts & {problem["prompt"] for problem in problems}
    assert {problem["prompt"] for problem in evaluated["both"][:18]} <= {one["prompt"] for one in evaluated["lcm"]}
    sources = [problem["data_source"] for problem in training]
    assert sources.count("reasoning_gym/chain_sum") in range(130, 151)
    assert sources.count("reasoning_gym/lcm") in range(90, 152)
    first = training[0]["prompt"]
    assert first.startswith("<user>Find the Least Common Multiple (LCM) of these numbers: ")
    assert first.endswith("\n\nOnly the number.<end>")
    again = training_problems(config, tokenizer)
    assert [one["prompt"] for one in again] == [one["prompt"] for one in training]


@pytest.mark.harness
@pytest.mark.slow
def test_a_task_with_too_few_problems_is_refused(library):
    config = DataConfig(task="reasoning_gym:coin_flip", task_options=("min_trials=3", "max_trials=3"), task_problems=20)
    with pytest.raises(ValueError, match="coin_flip has too few different problems: all 20 are in"):
        training_problems(config)


@pytest.mark.slow
def test_a_run_reads_a_task_and_its_evaluation(library, monkeypatch):
    """The task's rewards score the right answers. Training leaves out what its evaluation has, which has its name."""
    monkeypatch.setattr(gym_problems, "EVAL_PROBLEMS", 8)
    words = ["--data.task", "reasoning_gym:lcm", "--data.task-options", "max_value=9", "--data.task-problems", "40"]
    words += ["--model.path", str(TOY_BASE), "--data.max-prompt-tokens", "80", "--data.batch-size", "2"]
    config = load_config(Config, words, prog="", description="")
    assert config.data.task_options == ("max_value=9",)
    problems = load_problems(config, load_tokenizer(TOY_BASE))
    table = look_at_data(config, problems)
    assert re.search(r"^reasoning_gym:lcm .*0 of 3\d\neval lcm .*0 of 8$", table, re.MULTILINE)
    trained = {problem["prompt"] for problem in training_problems(config.data, load_tokenizer(TOY_BASE))}
    assert not trained & {problem["prompt"] for problem in problems.evaluation["lcm"]}
    assert {name: len(found) for name, found in problems.evaluation.items()} == {"lcm": 8}
