"""Tests of the look at a data set before a run: right answers that fail, counts, and data that is never refused."""

import json
import re

import pytest
from toy_runs import TOY_BASE, complete, completed, tiny

from rljax.data.files import Tally
from rljax.data.tokenizer import load_tokenizer
from rljax.run.build import load_problems, look_at_data
from rljax.run.config import Config
from rljax.run.config_file import load_config
from rljax.run.data_check import AnswerCheck, check_answers, table

SLEEPS = "import time\n\ndef sleeps(problem, response, truncated):\n    time.sleep(60)\n"
VALUES = {
    "needs_tests": 'float(problem["tests"][0] == response)',
    "misled": "1.0 if response == str(truncated) else 0.1",
    "longer": "len(response) / 100",
    "boxed": r"""1.0 if response == "\\boxed{" + problem["answer"] + "}" else 0.1""",
    "half": r"""1.0 if response == problem["answer"] and "\n" not in response else 0.5""",
    "partial": '0.9 + 0.1 * (response == problem["answer"])',
    "penalty": '0.0 if response == problem["answer"] else -1.0',
    "near": '1 / (1 + abs(float(response) - float(problem["answer"])))',
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    defined = [f"def {name}(problem, response, truncated):\n    return {value}\n" for name, value in VALUES.items()]
    (tmp_path / "rewards_of_mine.py").write_text("".join([SLEEPS, *defined]))
    monkeypatch.syspath_prepend(tmp_path)


def problems(*answers):
    return [{"prompt": f"p{i}", "answer": answer, "extra_info": {}} for i, answer in enumerate(answers)]


def check(*answers, reward, count=1000, workers=1, timeout_s=10.0):
    sets = [problems(*answers)]
    (found,) = check_answers(sets, reward, count=count, seed=0, workers=workers, timeout_s=timeout_s)
    return found


def test_answers_that_a_response_cannot_match_fail(own):
    bad = ["It is 5.\n\nSo it is.", "Adding, the answer is $\\boxed{5}$."]
    found = check("5", "\\frac{1}{2}", "(C)", "[1,2)", "yes", "1,080", *bad, reward="math")
    assert (found.checked, found.reason) == (8, "")
    assert sorted(problem["answer"] for problem in found.failed) == sorted(bad)
    # An answer that gets no more than others fails.
    found = check("5", "6", "7", "a\nb", reward="rewards_of_mine:half", workers=0)
    assert [problem["answer"] for problem in found.failed] == ["a\nb"]
    assert check("5", "6", "7", "8", reward="addition", count=3) == AnswerCheck(3, [], "")


NUMBERS = [str(i * i % 61) for i in range(24)]
WORDS = ["yes"] * 9 + ["no"] * 3


@pytest.mark.parametrize(("reward", "answers"), [("misled", NUMBERS), ("longer", WORDS)])
def test_a_reward_that_cannot_tell_answers_apart_is_said(own, reward, answers):
    found = check(*answers, reward=f"rewards_of_mine:{reward}", workers=0)
    form = r"(\S+) gives right answers (\S+) on average and .* of other problems (\S+): it does.*"
    said = re.fullmatch(form, found.control)
    assert (said[1], said[2]) == (f"rewards_of_mine:{reward}", said[3])
    assert (said[2] == "0.1") == (reward == "misled")
    lines = table([(Tally("x", problems(*answers), rows=12, too_long=0), found)], None).splitlines()
    assert lines[0] == f"warning: x: {found.control}"


@pytest.mark.parametrize("reward", ["boxed", "partial", "near", "penalty", "math"])
def test_a_reward_that_tells_answers_apart_is_not_accused(own, reward):
    for answers in (NUMBERS, WORDS, ["5", "6"], ["7"] * 5, ["1/2"], ["[1, 2]", "[2, 1]"]):
        if reward == "near" and not answers[0].isdigit():
            continue
        found = check(*answers, reward=reward if reward == "math" else f"rewards_of_mine:{reward}", workers=0)
        assert found.control == ""
        if reward == "penalty" and len(set(answers)) == 1:  # no answer of another problem shows that 0 is the best
            assert "rewards no right answer" in found.reason
        else:
            assert (found.checked, list(found.failed)) == (len(answers), [])


def test_placeholders_are_counted_and_kept():
    answers = ["4", "N/A", "n/a", "None", "nan", "NULL", "?", "-", "[]", "{}", "0", "no", "undefined"]
    found = check(*answers, reward="math", count=0)
    assert found.placeholders == 9
    lines = table([(Tally("x", problems(*answers), rows=13, too_long=0), found)], None).splitlines()
    assert lines[-1] == "x: 9 of 13 right answers are placeholders, such as 'N/A', and are used as they are"
    assert check("None", reward="reasoning_gym", count=0) == AnswerCheck(0, (), "")


def test_the_time_of_the_check_is_bounded(own, monkeypatch):
    monkeypatch.setattr("rljax.run.data_check.LONGEST_S", 1.0)
    found = check("1", "2", reward="rewards_of_mine:sleeps")
    assert found.reason == "no answer was scored within 1 s"


def test_the_table_by_hand():
    rows = [*problems("1", "2"), {"prompt": " p1\n", "answer": "3"}]
    train = Tally("a.jsonl", rows, rows=5, unanswered=1, too_long=1)
    train.unread.update({"ability": 5, "year": 4})
    sums = Tally("eval sums", problems("1"), rows=1, too_long=0)
    failed = problems("x" * 50, "2")
    text = table([(train, AnswerCheck(3, failed)), (sums, AnswerCheck(reason="no module"))], 16)
    assert text.splitlines() == [
        "warning: right answers get no reward when they are given as the response",
        "data       rows  no answer  over 16 tokens  repeated prompts  answers that fail",
        "a.jsonl    5     1          1               1                 2 of 3",
        "eval sums  1     0          0               0                 not checked",
        "fails: 'xxxxxxxxxxxxxxxxxxx ... xxxxxxxxxxxxxxxxxxx' to 'p0'",
        "fails: '2' to 'p1'",
        "keys not read: ability, year",
        "eval sums: the right answers could not be checked: no module",
    ]
    assert not table([(sums, AnswerCheck(100, failed[:1]))], 16).startswith("warning")


def sums(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("--data.task", "file", "--data.path", str(path), "--data.reward")


GOOD = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]


def test_a_run_leaves_out_what_it_cannot_use_and_says_so(tmp_path):
    rows = [*GOOD, {"prompt": "7+1=", "answer": ""}, {"prompt": "1234567+1=", "answer": "8"}, GOOD[0] | {"year": 1}]
    output = completed(tiny(TOY_BASE, tmp_path / "run", 1, *sums(tmp_path / "x.jsonl", rows), "addition"))
    lines = [
        "data     rows  no answer  over 8 tokens  repeated prompts  answers that fail",
        "x.jsonl  9     1          1              1                 0 of 7",
        "keys not read: year",
    ]
    assert "\n".join(lines) in output
    assert (tmp_path / "run" / "data.txt").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("rows", "reward", "message"),
    [
        ([GOOD[0], *({"prompt": "12345678+1=", "answer": "1"},) * 3], "addition", "only 1 of 4 rows are left: 0 have"),
        ([row | {"answer": "a\nb"} for row in GOOD], "math", "the response, such as 'a b'; choose another reward"),
        ([row | {"answer": "N/A"} for row in GOOD], "math", "no row has a right answer; all 6 hold a placeholder, su"),
        ([row | {"answer": None} for row in GOOD], "math", "x.jsonl: row 1: no right answer"),
    ],
)
def test_a_run_without_usable_problems_is_refused(rows, reward, message, tmp_path):
    status, output = complete(tiny(TOY_BASE, tmp_path / "run", 1, *sums(tmp_path / "x.jsonl", rows), reward))
    assert status == 2
    (line,) = [line for line in output.splitlines() if not line.startswith("warning: nothing is evaluated")]
    assert message in line
    assert not (tmp_path / "run").exists()


def test_fingerprints_are_those_of_before(own, tmp_path):
    """Runs go on of an rljax that gave rewards and environments only texts as the right answers."""

    def load(reward, answer_of, *more):
        data = sums(tmp_path / "x.jsonl", [row | {"answer": answer_of(row["answer"]), "board": [7]} for row in GOOD])
        words = tiny(TOY_BASE, tmp_path / "run", 1, *data, reward, *more)
        return load_problems(load_config(Config, words, prog="", description=""), load_tokenizer(TOY_BASE))

    assert load("rewards_of_mine:half", int).fingerprints == load("rewards_of_mine:half", str).fingerprints
    played = load("math", lambda answer: [answer], "--rollout.environment", "counting_environments:Doubling")
    assert played.fingerprints == load("math", str).fingerprints
    assert played.tallies[0].problems[0]["columns"]["board"] == [7]


def test_a_reward_of_ones_own_is_never_refused(own, tmp_path):
    data = sums(tmp_path / "x.jsonl", GOOD)
    words = tiny(TOY_BASE, tmp_path / "run", 1, *data, "rewards_of_mine:needs_tests", "--data.reward-workers", "1")
    config = load_config(Config, words, prog="", description="")
    said = look_at_data(config, load_problems(config, load_tokenizer(TOY_BASE)))
    why = "rewards_of_mine:needs_tests rewards no right answer in any tried form; it failed 30 times"
    assert f"x.jsonl: the right answers could not be checked: {why}" in said
