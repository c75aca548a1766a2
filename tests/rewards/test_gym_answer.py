"""Tests of the rewards of reasoning-gym's tasks: the search for an answer, the strict score, and executed answers."""

import ast
import collections
import functools
import inspect
import json
import random
import re
from pathlib import Path

import pytest

from rljax.data import gym_problems
from rljax.data.gym_problems import right_answer
from rljax.rewards.pool import RewardPool
from rljax.rewards.resolve import resolve_reward
from rljax.run.data_check import check_answers

factory = pytest.importorskip("reasoning_gym.factory")
from rljax.rewards import gym_answer  # noqa: E402
from rljax.rewards.gym_answer import FORMULAS, LITERALS, library_reward, strict_reward  # noqa: E402


@functools.cache
def entry_of(name, place):
    return gym_problems.make(name, {}, 11, place + 1)[place]


@pytest.fixture
def problem():
    """Yields a function that makes the problem of a task at a place, with the library's seed 11."""
    state = random.getstate()

    def make(name, place=0):
        entry = entry_of(name, place)
        facts = {"task": name, "options": "{}", "entry": entry}
        return {"prompt": entry["question"], "answer": right_answer(entry), "extra_info": facts}

    yield make
    random.setstate(state)


def test_the_answer_in_a_response():
    twelve = ["12", "Adding gives\n 12 \n\n", "<answer>\\boxed{12}</answer>", "<think><answer>11</answer></think>12"]
    twelve += ["\\boxed{7} <answer>12</answer> \\boxed{8}", "\\boxed{11} is wrong; it is \\boxed{12}\nQED"]
    stated = dict.fromkeys(twelve, "12") | {"": "", "\\boxed{11} and \\boxed{12}\nQED": "11, 12"}
    stated["<answer>11</answer> no, <answer> 12\n3 </answer> done"] = "12\n3"
    stated["<answer>x = \\boxed{12}</answer>"] = "x = \\boxed{12}"
    assert {response: gym_answer.stated_answer(response) for response in stated} == stated


EXECUTING = FORMULAS | LITERALS
# The number of calls in each file of the library that execute a text, texts that are no formulas, and programs that
# open a file, of which two are those of the first attack. "%c" writes a bracket without a bracket.
ANSWERS = json.loads(Path(__file__).with_name("gym_answers.json").read_text(encoding="utf-8"))
NO_FORMULA = [*ANSWERS["no_formulas"], "(" * 4000 + ")" * 4000, "+".join(["1"] * 600), "x" * 5000]
EXECUTORS = {"eval", "exec", "__import__", "import_module", "parse_expr", "sympify", "S", "Popen", "system"}


def test_the_calls_of_the_library_that_execute_text_are_known():
    found = collections.Counter()
    root = Path(factory.__file__).parent
    for path in root.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in EXECUTORS:
                found[str(path.relative_to(root))] += 1
    assert found == ANSWERS["executing_calls"]
    executes = r"(?<!literal_)eval\(answer|parse_expr\(answer"
    sources = {name: inspect.getsource(task.score_answer) for name, (task, _) in factory.DATASETS.items()}
    assert {name for name, source in sources.items() if re.search(executes, source)} == EXECUTING


A_FORMULA = ["(5 + 1)*(8/2) - 1", "x**2*sin(x)/2 + sqrt (x) + C", "(\n1.5\n)", "log(x, 10)", "exp(x**9)"]
A_FORMULA += ["+".join(["1"] * 400)]


def test_formulas_are_told_from_all_else():
    assert [answer for answer in A_FORMULA if not gym_answer.is_formula(answer)] == []
    assert [answer for answer in NO_FORMULA if gym_answer.is_formula(answer)] == []


@pytest.mark.parametrize("program", ANSWERS["programs"])
def test_a_program_is_never_executed(problem, tmp_path, program):
    """Each program is run once by a scorer of the library first, so that it is known to be one."""
    program = program.replace("FILE", str(tmp_path / "file"))
    ran = False
    for name in ("countdown", "binary_matrix"):
        factory.create_dataset(name, size=1).score_answer(program, problem(name)["extra_info"]["entry"])
        ran |= (tmp_path / "file").exists()
    assert ran
    (tmp_path / "file").unlink()
    for name in EXECUTING:
        one = problem(name)
        for score in (library_reward, strict_reward):
            assert score(one, f"<answer>{program}</answer>", False) == 0.0
            assert score(one, f"<answer>{one['answer']} + {program}</answer>", False) == 0.0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXECUTING))
def test_right_answers_and_literals_earn_what_the_library_gives(name):
    """The names of a scorer's variables are worth nothing."""
    task = factory.create_dataset(name, seed=1, size=6)
    for entry in task:
        facts = {"extra_info": {"task": name, "options": "{}", "entry": entry}}
        for answer in ("oracle_answer", "[oracle_answer]", "entry['metadata']['solution']"):
            assert name not in LITERALS or library_reward(facts, f"<answer>{answer}</answer>", False) == 0.0
        right = str(entry["answer"])
        rows = [line.split() for line in right.split("\n")]
        for answer in (right, str(rows), str(rows[0]), str(list(right)), right.replace(" ", ""), right + " + C"):
            if "Integral" not in answer:
                score = min(max(task.score_answer(answer, entry), 0.0), 1.0)
                given = library_reward(facts, f"<answer>{answer}</answer>", False)
                # Text that is no Python earns 0.01 from two scorers of the library.
                assert given == score or (given, score) == (0.0, 0.01)
                assert answer != right or given == score == strict_reward(facts, f"<answer>{answer}</answer>", False)


@pytest.mark.parametrize(
    ("name", "wrong", "score"),
    [
        *(("game_of_life_halting", "zzz", 1.0), ("gsm_symbolic", "{} or 999", 1.0)),
        *(("letter_jumble", "{} and more", 1.0), ("coin_flip", "0", 1.0), ("caesar_cipher", "the text is {}", None)),
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
    assert resolve_reward("reasoning_gym_library") is library_reward
    one = problem("fraction_simplification")
    numerator, denominator = re.findall(r"\d+", one["answer"])
    assert strict_reward(one, f"{numerator}/{denominator}", False) == 1.0
    assert strict_reward(one, f"{numerator}/{denominator} or 1/2", False) == 0.0
    with pytest.raises(ValueError, match="none of a reasoning-gym task: set data"):
        strict_reward({"answer": "1", "extra_info": {"index": 3}}, "1", False)


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.harness)])
def test_right_answers_pass_their_own_check(problem, every):
    """An unevaluated integral is a right answer that fails. For some tasks the library gives no answer."""
    failed, unknown = set(), set()
    without = {"codeio", "composite", "intermediate_integration"}
    for name in (names := sorted(set(factory.DATASETS) - without)[::every]):
        one = problem(name)
        if not one["answer"]:
            unknown.add(name)
        elif strict_reward(one, f"<answer>{one['answer']}</answer>", False) != 1.0:
            failed.add(name)
    assert (failed, unknown) == (set(), {"boxnet", "rush_hour"} & {*names})
    sets = [[problem("lcm"), problem("caesar_cipher")], [problem("rush_hour")]]
    first, second = check_answers(sets, "reasoning_gym", count=9, seed=0, workers=1, timeout_s=10.0)
    assert (first.checked, list(first.failed), second.checked) == (2, [], 0)
    assert second.reason == "no right answer is known"


@pytest.mark.slow
def test_an_endless_answer_is_a_timeout_and_junk_an_error(problem):
    countdown, primes, integral = map(problem, ("countdown", "prime_factorization", "simple_integration"))
    with RewardPool("reasoning_gym", 1, timeout_s=1.0) as pool:
        assert pool.submit(countdown, countdown["answer"], False).result() == 1.0
        assert pool.submit(countdown, "9**9**8", False).result() == 0.0
        assert pool.pop_metrics() == {"reward/errors": 0, "reward/timeouts": 0}
        assert pool.submit(integral, "(X+x+1)**40 * (x+2)**40", False).result() == 0.0
        assert pool.pop_metrics() == {"reward/errors": 1, "reward/timeouts": 1}
        assert pool.submit(primes, "zzz", False).result() == 0.0
        assert pool.pop_metrics() == {"reward/errors": 1, "reward/timeouts": 0}
        assert pool.submit(primes, primes["answer"], False).result() == 1.0
