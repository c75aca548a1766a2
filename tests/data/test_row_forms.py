"""Tests of the forms of rows: published data sets, other frameworks' keys, and keys that a user names."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from problem_files import read_problems

from rljax.commands.prepare import main
from rljax.data.files import Tally, answered_rows, parse_row, write_rows
from rljax.data.forms import NoAnswerError, OwnKeys, last_box, take
from rljax.data.prompts import DataConfig, evaluation_datasets, training_problems
from rljax.errors import run_cli
from rljax.rewards.math_answer import math_reward
from rljax.run.config import Config

TASK = [{"content": "Solve it.\n\nWhat is 1+2?\n\nWrite Answer: $Answer.", "role": "user"}]
# Rows are our own, with the keys, nesting and types of published files (``form``) and of other frameworks.
FORMS = [json.loads(line) for line in Path(__file__).with_name("forms.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("suffix", ["parquet", "json"])
def test_a_published_form_is_read_by_keys_and_by_name(suffix, tmp_path):
    source, out = tmp_path / f"in.{suffix}", tmp_path / "out.parquet"
    for form in (form for form in FORMS if "form" in form):
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist([form["row"]]), source)
        else:
            source.write_text(json.dumps([form["row"]]))
        for words in ([], ["--form", form["form"]]):
            (problem,) = read_problems(source, *words[1:])
            assert run_cli(main, [str(source), str(out), "--check-answers", "0", *words]) == 0
            (written,) = read_problems(out)
            for found in (problem, written):
                assert (found["prompt"], found["answer"]) == (form["prompt"], form["answer"])


def test_messages_may_be_the_text_of_json():
    row = {"prompt": json.dumps(TASK), "reward_model": '{"ground_truth": "3", "style": "rule"}'}
    assert take(row, None, "") == (TASK, "3")
    turns = [*TASK, {"role": "assistant", "content": "Answer: 3"}]
    assert take({"messages": turns, "answer": "3"}, None, "") == (TASK, "3")
    assert take({"messages": json.dumps(turns), "answer": "3"}, None, "") == (TASK, "3")
    for text in ("[1, 2] has how many parts?", "[1, 2]", "[{1}]", '{"role": 1'):
        assert take({"prompt": text, "answer": "2"}, None, "") == (text, "2")


def test_only_gsm8k_loses_what_is_before_the_hashes():
    with pytest.raises(ValueError, match="gsm8k has question, and answer; the keys are prompt, answer"):
        take({"prompt": "1+1=", "answer": "2"}, "gsm8k", "")
    with pytest.raises(ValueError, match="has problem or question, and answer; the keys are conv"):
        take({"conversations": [], "answer": "2"}, "aime-2025", "")
    assert take({"prompt": "p", "answer": "a\n#### b"}, None, "")[1] == "a\n#### b"
    assert take({"question": "p", "answer": "a #### b"}, None, "")[1] == "a #### b"
    assert take({"question": "p", "answer": "a\n#### -2 \n"}, None, "")[1] == "-2"


def test_the_last_box_is_closed_by_its_own_brace():
    boxes = {
        **{"\\boxed{1} or \\boxed{x_{2}}.": "x_{2}", "\\boxed{\\{1\\}}": "\\{1\\}", "\\boxed{1": None},
        **{"\\fbox{7}": "7", "so $\\boxed 7$": "7", "\\boxed\\frac{1}{2}.": "\\frac{1}{2}", "1": None},
        **{"\\boxed{7}. We use \\boxed to mark it": "7", "\\boxed{7}, and \\fbox{QED}": "7"},
    }
    assert {text: last_box(text) for text in boxes} == boxes


def test_empty_answers_are_counted_and_missing_keys_refused(tmp_path):
    answers = [{"answer": answer} for answer in ("1", "proof", "notfound", " ")]
    rows = [{"problem": "a", "question_type": "MCQ"} | each for each in [*answers, {"solution": "It is clear."}]]
    path, tally = tmp_path / "x.json", Tally("x")
    path.write_text(json.dumps(rows))
    assert [problem["answer"] for _, problem in answered_rows(path, tally)] == ["1"]
    assert (tally.rows, tally.unanswered, dict(tally.unread)) == (5, 4, {"question_type": 1})
    refused = {
        r"row 1: no right answer": rows[1:],
        r"row 2: no right answer .*; the keys are problem": [rows[0], {"problem": "b"}],
    }
    for message, left in refused.items():
        path.write_text(json.dumps(left))
        with pytest.raises(ValueError, match=rf"x\.json: {message}"):
            list(answered_rows(path, Tally("x")))


def test_keys_of_other_frameworks_are_read():
    for form in FORMS:
        problem = parse_row(form["row"], "x")
        assert (problem["prompt"], problem["answer"]) == (form["prompt"], form["answer"])


def test_a_list_of_texts_holds_alternatives():
    for key in ("answer", "ground_truth", "label", "expected_answer"):
        problem = parse_row({"prompt": "q", key: ["1/2", "0.5"]}, "x")
        assert (problem["answer"], problem["alternatives"]) == ("1/2", ["1/2", "0.5"])
        assert [math_reward(problem, f"Answer: {said}", False) for said in ("1/2", "0.5", "2")] == [1, 1, 0]
        assert parse_row({"prompt": "q", key: [1, 2]}, "x")["answer"] == "[1, 2]"
    problem = parse_row({"prompt": "q", "solutions": ["so \\boxed{4}", "so it is", "\\boxed{2^2}"]}, "x")
    assert (problem["answer"], problem["alternatives"]) == ("4", ["4", "2^2"])


@pytest.mark.parametrize(
    "more", [{}, {"verification_info": {"language": "python", "test_cases": []}}, {"reward_model": {"style": "rule"}}]
)
def test_a_reward_of_ones_own_needs_no_right_answer(more, tmp_path):
    row, out = {"prompt": "q", "extra_info": {"index": 7}, "tests": ["f(1)"]} | more, tmp_path / "out.parquet"
    assert parse_row(row, "x", whole=True)["answer"] == ""
    write_rows(out, [row], like="x.jsonl", provenance={}, whole=True)
    ((_, problem),) = answered_rows(out, None, whole=True)
    assert (problem["prompt"], problem["answer"], problem["extra_info"]) == ("q", "", {"index": 7})
    kept = {"tests", "verification_info"} & row.keys()
    assert {key: problem["columns"][key] for key in kept} == {key: row[key] for key in kept}
    with pytest.raises(ValueError, match="x: no right answer"):
        parse_row(row, "x")
    with pytest.raises(NoAnswerError):
        parse_row(row | {"answer": " "}, "x", whole=True)


@pytest.mark.parametrize("tests", [[1, "a"], ["a", 1], [2**70, 1], [{}, {}]])
def test_what_parquet_cannot_hold_is_refused(tests, tmp_path):
    rows = [{"prompt": "q", "answer": ["4"], "tests": each} for each in tests]
    assert parse_row(rows[0], "x", whole=True)["answer"] == '["4"]'
    with pytest.raises(ValueError, match="no column of Parquet holds the values of tests: write them as text"):
        write_rows(tmp_path / "out.parquet", rows, like="x.jsonl", provenance={}, whole=True)


def test_a_right_answer_is_written_once_and_odd_facts_left_out(tmp_path, capsys):
    held = {"verification_info": {"ground_truth": {"k": 1}, "tests": ["a"]}, "extra_info": {"index": 7}}
    rows, out = [{"prompt": "q"} | held, {"prompt": "p", "answer": "4"}], tmp_path / "out.parquet"
    write_rows(out, rows, like="x.jsonl", provenance={}, whole=True)
    first, second = [problem for _, problem in answered_rows(out, None, whole=True)]
    assert first["columns"]["verification_info"]["tests"] == ["a"]
    assert (first["answer"], second["answer"]) == ('{"k": 1}', "4")
    rows = [{"prompt": "q", "answer": "4", "extra_info": {"index": index}} for index in (7, "x")]
    write_rows(out, rows, like="x.jsonl", provenance={})
    assert len(list(answered_rows(out, None))) == 2
    assert "warning: no column of Parquet holds the values of extra_info" in capsys.readouterr().err


NESTED = {"input": "q", "meta": '{"Sol": "4"}', "answer": "5"}


def test_own_keys_may_lead_into_records():
    problem = parse_row(NESTED, "x", OwnKeys("input", "meta.sol"))
    assert (problem["prompt"], problem["answer"]) == ("q", "4")
    assert parse_row(NESTED, "x", OwnKeys("input"))["answer"] == "5"
    assert parse_row({"problem": "a", "question": "b", "answer": 1}, "x", OwnKeys("problem"))["prompt"] == "a"
    assert parse_row({"a.b": "q", "answer": 1}, "x", OwnKeys("a.b"))["prompt"] == "q"
    listed = {"prompt": "q", "reward_model": {"ground_truth": ["3", "4"]}, "answer": "5"}
    assert parse_row(listed, "x", OwnKeys("", "reward_model.ground_truth"))["alternatives"] == ["3", "4"]
    for missing in ("meta.x", "sol", "answer.x"):
        with pytest.raises(ValueError, match=rf"^x: row 17: there is no {missing}; the keys are input, meta, answer$"):
            parse_row(NESTED, "x: row 17", OwnKeys("input", missing))


def test_own_keys_hold_for_evaluations_that_have_them(tmp_path):
    path, other = str(tmp_path / "x.jsonl"), str(tmp_path / "y.jsonl")
    for name, row in ((path, NESTED), (other, {"problem": "p", "answer": "6"})):
        Path(name).write_text(json.dumps(row))
    config = DataConfig(task="file", path=path, prompt_key="input", answer_key="meta.sol")
    assert [problem["answer"] for problem in training_problems(config)] == ["4"]
    found = evaluation_datasets([path, other], config)
    assert [(p["prompt"], p["answer"]) for (p,) in found.values()] == [("q", "4"), ("p", "6")]
    with pytest.raises(ValueError, match=r"data\.prompt_key and data\.answer_key are for files, but the run"):
        Config(data=DataConfig(prompt_key="input"))
