"""Tests of the search for a subject, and of the stories: problems, written solutions, rewards and verdicts."""

import numpy as np
import pytest
import story_task
from records import study_row
from subject_base import packed_rows
from subject_search import fork_step, judge
from subject_task import ALPHABET, MAX_PROMPT_TOKENS, Mistakes, short_problem, solution, worked_sum, worked_word

from rljax.data.toy import addition_reward

SUM = short_problem("chain_sum", "State the final answer to the following arithmetic problem: 84 - 97 + 45 =", "32")
WORD = short_problem("spell_backward", "Spell this word backward (example: sun -> nus): Stone", "enotS")


def test_problems_and_solutions_by_hand():
    texts = [solution(np.random.default_rng(i), WORD, Mistakes(0.0, 1.0, 0.0, wrong_letters=0.5)) for i in range(20)]
    assert {len(text) for text in texts} == {2}  # a wrong direct answer has int(5 / 2) of the letters
    assert set("".join(texts)) <= set("stone")
    assert (SUM, WORD) == ({"prompt": "84-97+45=", "answer": "32"}, {"prompt": "stone:", "answer": "enots"})
    assert short_problem("spell_backward", "Spell this word backward (example: sun -> nus): naïve", "evïan") is None
    assert worked_sum("84-97+45") == ">84-97=-13,-13+45=32,32"
    assert worked_sum("84-97+45", 0, 3) == ">84-97=-10,-10+45=35,35"
    assert worked_word("stone") == ">0s1t2o3n4e,enots"
    assert worked_word("stone", 1, 2) == ">0s1n2o3n4e,enons"


@pytest.mark.parametrize("problem", [SUM, WORD])
def test_the_shares_of_solutions(problem):
    rng = np.random.default_rng(0)
    texts = [solution(rng, problem, Mistakes(worked=0.25, wrong_direct=0.5, wrong_step=0.5)) for _ in range(2000)]
    worked = [text for text in texts if text.startswith(">")]
    assert len(worked) == pytest.approx(500, abs=60)
    right = sum(addition_reward(problem, text, False) for text in texts)
    assert right == pytest.approx(1000, abs=90)


def test_rows_are_packed_with_whole_solutions():
    rng = np.random.default_rng(0)
    tokens, segments, positions, mask = packed_rows(rng, [SUM, WORD], Mistakes(0.5, 0.0, 0.0), rows=2, row_tokens=64)
    for row in range(2):
        for segment in range(1, segments[row].max() + 1):
            here = segments[row] == segment
            text = "".join(ALPHABET[token] for token in tokens[row][here])
            problem = SUM if text.startswith(SUM["prompt"]) else WORD
            size = len(problem["prompt"])
            assert size <= MAX_PROMPT_TOKENS
            assert list(positions[row][here]) == list(range(len(text)))
            assert list(mask[row][here]) == [False] * size + [True] * (len(text) - size)
            assert text.endswith("$")
            assert addition_reward(problem, text[size:-1], False) == 1.0


def rows_of(rewards, mismatch):
    steps = enumerate(zip(rewards, mismatch, strict=True), 1)
    return [study_row(step, reward) | {"mismatch/log_ppl_abs_diff": value} for step, (reward, value) in steps]


def test_a_collapse_from_above_the_bound_by_hand():
    # The accuracy is 1 up to step 30. Means of ten steps are 0.9 at step 31 and 0.5 at step 35, and below 0.5 from step
    # 36 on.
    run = judge(rows_of([1.0] * 30 + [0.0] * 20, [0.01] * 20 + [0.03] * 30))
    assert (run["verdict"], run["peak"], run["fall_step"]) == ("collapsed from above 0.6", 1.0, 36)
    assert run["stops"] == {"plateau": 1, "onset": 31, "end": 36}
    assert run["at"]["plateau"]["mismatch"] == pytest.approx(0.01)
    assert run["at"]["onset"]["mismatch"] == pytest.approx(0.03)


def test_a_fork_counts_from_its_own_first_step():
    run = judge(rows_of([1.0] * 30 + [0.0] * 20, [0.01] * 30 + [0.02] * 2 + [0.04] * 18), fork=30)
    assert run["stops"] == {"plateau": 31, "onset": 31, "end": 36}
    assert [run["at"][when]["mismatch"] for when in run["stops"]] == pytest.approx([0.02, 0.02, 0.2 / 6])
    assert fork_step({"run.fork": "runs/a/checkpoints/160"}) == 160


def test_a_series_of_few_steps_holds_its_last_value():
    """Only some steps compare the trainer with itself. The fall at step 36 ends a mean of ten steps."""
    rows = rows_of([1.0] * 30 + [0.0] * 20, [0.01] * 50)
    assert "self-mismatch" not in judge(rows)["at"]["end"]
    for step in (1, 20, 30):
        rows[step - 1]["mismatch_self/log_ppl_abs_diff"] = step / 1000
    assert judge(rows)["at"]["end"]["self-mismatch"] == pytest.approx((3 * 0.02 + 7 * 0.03) / 10)


def test_the_other_verdicts():
    courses = ([0.2] * 30, [0.5] * 30, [0.5] * 30 + [0.0] * 20, [0.7] * 30, [0.8] * 30 + [0.0] * 20 + [0.7] * 10)
    verdicts = [judge(rows_of(rewards, [0.01] * len(rewards)))["verdict"] for rewards in courses]
    assert verdicts == ["never learned", "learned", "collapsed", "learned above 0.6", "learned above 0.6"]


def test_a_story_is_scored_by_the_words_its_problem_asks_for():
    texts = ["", "A cat isn't 3 dogs.", "One two three four five six"]  # numbers are no words
    assert [story_task.reward({"answer": "5"}, text, False) for text in texts] == [0.0, 0.8, 1.0]
    assert story_task.reward({"answer": "5"}, texts[-1], True) == 0.0

    made = story_task.problems()
    assert len({problem["prompt"] for problem in made}) == len(made) == 24 * 9
    assert all(f"at least {problem['answer']} words" in problem["prompt"] for problem in made)
