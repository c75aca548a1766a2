"""The mathematical reward is compared with a table of agreed verdicts, and tested beyond the table."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.rewards.final_answer import final_answer
from rljax.rewards.math_answer import math_reward, same_answer
from rljax.rewards.math_text import tidy
from rljax.rewards.pool import RewardPool

TABLE = Path(__file__).parents[1] / "gold/math_answers.jsonl"
ROWS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def test_agreed_verdicts():
    wrong = {}
    for number, row in enumerate(ROWS):
        verdict = math_reward({"answer": row["answer"]}, row["response"], row.get("truncated", False))
        if verdict != row["verdict"]:
            wrong[f"{number}-{row['group']}"] = f"final answer read as {final_answer(row['response'])!r}"
    assert wrong == {}
    notes = {row.get("note", "") for row in ROWS}
    limits = {note.removeprefix("known limit: ") for note in notes if note.startswith("known limit")}
    text = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
    assert limits
    assert {limit for limit in limits if limit not in text} == set()


HOW = {"boxed": "Hence it is $\\boxed{%s}$.", "answer_line": "Some steps.\n\nAnswer: %s", "response": "%s"}


@pytest.mark.parametrize("table", ["answer_pairs", "answer_forms"])
def test_verdicts_on_what_people_and_models_write(table):
    """``answer_pairs`` has forms from public reports with their sources. ``answer_forms`` has more of their kinds."""
    lines = (TABLE.parent / f"{table}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) >= 200
    wrong = [
        (row["gold"], row["text"], row["expected"])
        for row in rows
        if math_reward({"answer": row["gold"]}, HOW[row["how"]] % row["text"], False) != row["expected"]
    ]
    assert wrong == []


@pytest.mark.slow
def test_a_power_tower_is_stopped_and_the_next_are_scored():
    """The pool gives the verdicts of the table."""
    bomb, rows = r"\boxed{\int_0^1 \sin(x^{9^{9^{9}}}) \, dx + 9^{9^{9^{9}}}}", ROWS[::7]
    with RewardPool("math", 1, timeout_s=3.0) as pool:
        pool.submit({"answer": "42"}, "Answer: 42", False).result(timeout=60)
        start = time.monotonic()
        stopped = pool.submit({"answer": "\\pi"}, bomb, False)
        after = [pool.submit(row, row["response"], row.get("truncated", False)) for row in rows]
        assert stopped.result(timeout=60) == 0.0
        assert time.monotonic() - start < 10.0
        assert [future.result(timeout=120) for future in after] == [row["verdict"] for row in rows]
        assert pool.pop_metrics()["reward/errors"] == 1


def test_numbers_and_other_fields_of_a_problem_are_taken():
    assert math_reward({"answer": 42, "data_source": "x"}, "Answer: 42", False) == 1.0
    assert math_reward({"answer": 0.5}, "Answer: 1/2", False) == 1.0
    for answer in ("", "  "):
        with pytest.raises(ValueError, match="the problem's answer is empty"):
            math_reward({"answer": answer}, "Answer: 42", False)
    with pytest.raises(KeyError):
        math_reward({}, "Answer: 42", False)


@settings(max_examples=60, deadline=None)
@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_integers_are_equal_only_to_themselves(one, other):
    assert same_answer(str(one), f"{one:,}")
    assert same_answer(str(one), f"${one}$")
    assert same_answer(str(one), str(other)) == (one == other)


PIECES = [*"answer:boxed{}\\$().,0129 \nx=%/^", "\\boxed{", "Answer:", "\\frac{", "\\text{"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
def test_reading_never_fails(text):
    stated = final_answer(text)
    assert stated is None or isinstance(tidy(stated), str)


# What begins a text, is repeated, and ends it.
REPEATED = {
    **{"boxed": ("", "\\boxed{", ""), "answers": ("", "Answer:", ""), "words": ("Answer: ", "1 a1 a1 a", "")},
    **{"spaces": ("Answer: ", " " * 5, "1"), "braces": ("", "{" * 5, ""), "labels": ("\\boxed{", "the ", "}")},
}


@pytest.mark.parametrize("kind", REPEATED)
def test_the_time_does_not_grow_with_the_square_of_the_text(kind):
    """Processor time counts, the best of three. It is below two seconds, and 0.05 s are for time that does not grow."""
    head, part, tail = REPEATED[kind]

    def seconds(count):
        taken = []
        for _ in range(3):
            start = time.process_time()
            assert math_reward({"answer": "7"}, head + part * count + tail, False) == 0.0
            taken.append(time.process_time() - start)
        return min(taken)

    whole = seconds(20_000)
    assert whole < 2.0
    assert whole < 9 * seconds(5_000) + 0.05
