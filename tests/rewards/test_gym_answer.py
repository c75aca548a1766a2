"""Tests of the rewards of reasoning-gym's tasks: the search for an answer, the strict score, and executed answers."""

import inspect
import random
import re

import pytest

from rljax.data import gym_maker
from rljax.data.gym_problems import right_answer
from rljax.rewards.pool import RewardPool
from rljax.run.data_check import check_answers

factory = pytest.importorskip("reasoning_gym.factory")
from rljax.rewards.gym_answer import (  # noqa: E402
    EXECUTING,
    is_program,
    library_reward,
    stated_answer,
    strict_reward,
)


@pytest.fixture
def problem():
    """Yields a function that makes the problem of a task at a place, with the library's seed 11."""
    state = random.getstate()

    def make(name, place=0):
        entry = gym_maker.make(name, {}, 11, place + 1)[place]
        facts = {"task": name, "options": "{}", "entry": entry}
        return {"prompt": entry["question"], "answer": right_answer(entry), "extra_info": facts}

    yield make
    random.setstate(state)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("12", "12"),
        ("Adding gives\n 12 \n\n", "12"),
        ("<answer>11</answer> no, <answer> 12\n3 </answer> done", "12\n3"),
        ("\\boxed{11} and \\boxed{12}\nQED", "11, 12"),
        ("\\boxed{11} is wrong; it is \\boxed{12}\nQED", "12"),
        ("<answer>\\boxed{12}</answer>", "12"),
        ("<answer>x = \\boxed{12}</answer>", "x = \\boxed{12}"),
        ("\\boxed{7} <answer>12</answer> \\boxed{8}", "12"),
        ("<think><answer>11</answer></think>12", "12"),
        ("", ""),
    ],
)
def test_the_answer_in_a_response(response, answer):
    assert stated_answer(response) == answer


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("(5 + 1)*(8/2) - 9**9**8", False),
        ("x**2*sin(x)/2 + sqrt (x) + C", False),
        ("['A', 'B', 'C']", False),
        ("[[0, 1], [1, -0.5]]", False),
        ("open('x')", True),
        ("__import__('os')", True),
        ("[].__class__", True),
        ("(eval)('1')", True),
        ("[eval][0]('1')", True),
        ("[sqrt:=eval, sqrt('1')]", True),
        ("[sqrt('1') for sqrt in [eval]]", True),
        ("(eval # \n('1'))", True),
        ("f(x)", True),
    ],
)
def test_an_answer_is_a_formula_or_a_program(answer, program):
    assert is_program(answer) == program


def test_the_tasks_that_execute_an_answer_are_known():
    executes = {
        name
        for name, (task, _) in factory.DATASETS.items()
        if re.search(r"(?<!literal_)eval\(answer|parse_expr\(answer", inspect.getsource(task.score_answer))
    }
    assert executes == EXECUTING


def test_a_program_is_never_executed(problem, tmp_path):
    for name in EXECUTING - {"intermediate_integration"}:
        response = f"<answer>[open({str(tmp_path / name)!r}, 'w'), 24][1]</answer>"
        assert library_reward(problem(name), response, False) == 0.0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "wrong", "score"),
    [
        ("game_of_life_halting", "zzz", 1.0),
        ("gsm_symbolic", "{} or 999", 1.0),
        ("letter_jumble", "{} and more", 1.0),
        ("coin_flip", "0", 1.0),
        ("caesar_cipher", "the text is {}", None),
        ("puzzle24", "4*6*1*1", 1.0),
    ],
)
def test_the_strict_score_refuses_what_the_library_rewards(problem, name, wrong, score):
    """If the score is None, the library gives a part of the reward."""
    one = problem(name, place=2)
    response = f"<answer>{wrong.format(one['answer'])}</answer>"
    given = library_reward(one, response, False)
    assert given == score or (score is None and 0.0 < given < 1.0)
    assert strict_reward(one, response, False) == 0.0
    assert strict_reward(one, f"<answer>{one['answer']}</answer>", False) == 1.0
    assert strict_reward(one, f"<answer>{one['answer']}</answer>", True) == 0.0


def test_a_fraction_may_be_written_in_another_notation(problem):
    one = problem("fraction_simplification")
    numerator, denominator = re.findall(r"\d+", one["answer"])
    assert strict_reward(one, f"{numerator}/{denominator}", False) == 1.0
    assert strict_reward(one, f"{numerator}/{denominator} or 1/2", False) == 0.0


def test_a_problem_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="none of a reasoning-gym task: set data"):
        strict_reward({"answer": "1", "extra_info": {"index": 3}}, "1", False)


@pytest.mark.slow
def test_right_answers_pass_their_own_check(problem):
    """Tasks for which the library gives no answer are left out.

    An unevaluated integral is a right answer that fails.
    """
    failed, unknown = set(), set()
    for name in set(factory.DATASETS) - {"codeio", "composite", "intermediate_integration"}:
        one = problem(name)
        if not one["answer"]:
            unknown.add(name)
        elif strict_reward(one, f"<answer>{one['answer']}</answer>", False) != 1.0:
            failed.add(name)
    assert (failed, unknown) == (set(), {"boxnet", "rush_hour"})


@pytest.mark.slow
def test_an_endless_answer_is_a_timeout_and_junk_an_error(problem):
    countdown, primes = problem("countdown"), problem("prime_factorization")
    with RewardPool("reasoning_gym", 1, timeout_s=1.0) as pool:
        assert pool.submit(countdown, countdown["answer"], False).result() == 1.0
        assert pool.submit(countdown, "9**9**8", False).result() == 0.0
        assert pool.pop_metrics() == {"reward/errors": 1, "reward/timeouts": 1}
        assert pool.submit(primes, "zzz", False).result() == 0.0
        assert pool.pop_metrics() == {"reward/errors": 1, "reward/timeouts": 0}
        assert pool.submit(primes, primes["answer"], False).result() == 1.0


@pytest.mark.slow
def test_the_look_at_the_data_scores_right_answers(problem):
    sets = [[problem("lcm"), problem("caesar_cipher")], [problem("rush_hour")]]
    first, second = check_answers(sets, "reasoning_gym", count=9, seed=0, workers=1, timeout_s=10.0)
    assert (first.checked, list(first.failed)) == (2, [])
    assert (second.checked, second.reason) == (0, "no right answer is known")
