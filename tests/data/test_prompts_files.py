"""Tests of problems on disk: rows that are read or refused, and the written files and their provenance."""

import csv
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from problem_files import read_problems
from toy_runs import TOY_BASE, outcome, tiny

from rljax import evaluate, train
from rljax.commands import prepare
from rljax.data.files import parse_row, read_provenance, read_rows, write_rows
from rljax.rewards.math_answer import math_reward

DATA = Path(__file__).parents[1] / "data"
GOOD = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}


def cases(name):
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def written(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_every_form_reads_to_the_same_problems(tmp_path):
    chat = read_problems(DATA / "math_chat.jsonl")
    plain = read_problems(DATA / "plain.jsonl")
    assert len(chat) == len(plain) == 12
    for one, other in zip(chat, plain, strict=True):
        (message,) = one["prompt"]
        assert (message["role"], one["answer"]) == ("user", other["answer"])
        assert other["prompt"] in message["content"]
    assert plain[0]["answer"] == "100"
    rows = [{"prompt": p["prompt"], "answer": p["answer"]} for p in plain]
    assert read_problems(written(tmp_path / "plain.parquet", rows)) == plain
    assert chat[3]["extra_info"] == {"index": 3}
    text = read_problems(DATA / "additions_text.parquet")
    assert text[2]["extra_info"] == {"index": 2, "split": "test"}
    truth = pa.array([[("ground_truth", "7"), ("style", "rule")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"prompt": ["a?"], "reward_model": truth}), tmp_path / "map.parquet")
    assert read_problems(tmp_path / "map.parquet")[0]["answer"] == "7"
    # Two escapes may make a whole character.
    escaped = written(tmp_path / "x.jsonl", ['{"prompt": "\\ud83d\\ude00", "answer": "2"}'])
    assert read_problems(escaped)[0]["prompt"] == "\N{GRINNING FACE}"


@pytest.mark.parametrize("case", cases("refused_rows"), ids=lambda case: case["message"])
def test_a_wrong_row_is_named(case, tmp_path):
    with pytest.raises(ValueError, match=rf"^file: row 2: .*{case['message']}"):
        parse_row(case["row"], "file: row 2")
    path = written(tmp_path / "x.jsonl", [GOOD, "", case["row"]])
    # The blank line counts, so the number is that of the line.
    with pytest.raises(ValueError, match=rf"x\.jsonl: row 3: .*{case['message']}"):
        read_problems(path)


@pytest.mark.parametrize("command", ["train", "evaluate", "prepare"])
def test_each_command_reads_a_file_in_the_same_way(command, tmp_path):
    """The keys that a user names are read, a reward of TRL gets the other columns, and a wrong row is named."""
    path, reward = tmp_path / "x.jsonl", tmp_path / "of_trl.py"
    rows = [{"input": f"{i}+1=", "meta": {"sol": i + 1}, "nums": [i, 1]} for i in range(4)]
    reward.write_text("def f(completions, nums, **columns):\n    return [float(str(sum(nums[0])) in completions[0])]\n")
    keys = ["--prompt-key", "input", "--answer-key", "meta.sol", "--reward", f"{reward}:f"]
    in_run = [word.replace("--", "--data.") for word in keys] + ["--data.path", path]

    def run(out):
        if command == "train":
            return outcome(train.main, tiny(TOY_BASE, out, 1, "--data.task", "file", *in_run))
        if command == "evaluate":
            words = ["--path", TOY_BASE, "--dataset", path, *keys, "--max-response-tokens", "4"]
            return outcome(evaluate.main, words)
        return outcome(prepare.main, [path, out.with_suffix(".parquet"), *keys])

    written(path, rows)
    status, said, error = run(tmp_path / "first")
    assert status == 0, error
    assert not re.search("column|not read", error)
    assert '"reward_errors": 0' in said if command == "evaluate" else "0 of 4" in said + error
    if command == "prepare":
        found = read_problems(tmp_path / "first.parquet")
        assert [(one["prompt"], one["answer"]) for one in found] == [(f"{i}+1=", str(i + 1)) for i in range(4)]
    written(path, [*rows, {"input": "1+1="}])
    status, _, error = run(tmp_path / "second")
    assert status == 2
    assert re.match(r"error: .*x\.jsonl: row 5: there is no meta.sol; the keys are input", error.splitlines()[-1])
    assert "Traceback" not in error


@pytest.mark.parametrize("case", cases("refused_files"), ids=lambda case: case["message"])
def test_a_file_that_cannot_be_read_is_one_line(case, tmp_path):
    if case["content"] is not None:
        (tmp_path / case["name"]).write_text(case["content"])
    with pytest.raises(ValueError, match=case["message"]) as caught:
        read_problems(tmp_path / case["name"])
    assert "\n" not in str(caught.value)


def test_wrong_rows_and_columns_of_parquet_are_named(tmp_path):
    path = written(tmp_path / "x.parquet", [GOOD, GOOD, GOOD | {"prompt": ""}])
    with pytest.raises(ValueError, match=r"x\.parquet: row 3: the prompt is empty"):
        read_problems(path)
    path.write_bytes(path.read_bytes().replace(b"prompt", b"prom\xb5t"))
    with pytest.raises(ValueError, match=r"x\.parquet cannot be read as Parquet: 'utf-8' codec"):
        read_problems(path)


def test_parquet_keeps_columns_types_and_its_source(tmp_path):
    source, out = DATA / "additions_chat.parquet", tmp_path / "new" / "out.parquet"
    rows = [row for number, row in read_rows(source) if number in (3, 5)]
    write_rows(out, rows, like=source, provenance={"source": "there", "steps": [1, 2]})
    assert read_provenance(out) == {"version": 1, "source": "there", "steps": [1, 2]}
    assert read_provenance(source) is None
    assert pq.read_schema(out).remove_metadata() == pq.read_schema(source)
    assert [row for _, row in read_rows(out)] == rows
    assert [path.name for path in out.parent.iterdir()] == ["out.parquet"]
    write_rows(out, [row | {"pass_rate": 0.25} for row in rows], like=source, provenance={})
    assert [row["pass_rate"] for _, row in read_rows(out)] == [0.25, 0.25]


def test_a_csv_file_is_read_as_text(tmp_path):
    path, chat = tmp_path / "x.csv", [{"role": "user", "content": 'it\'s\n"1" + 1'}]
    with path.open("w", newline="") as file:  # chats and records are in the form of Python
        csv.writer(file).writerows([["prompt", "reward_model"], [chat, {"ground_truth": "2", "style": "rule"}]])
    assert [(p["prompt"], p["answer"]) for p in read_problems(path)] == [(chat, "2")]
    long = "x" * 200_000
    rows = f'\ufeff,question,label\r\n0,"What is\n""1""?",007\r\n\r\n1,{long},"1,5"\r\n'
    path.write_text(rows, encoding="utf-8", newline="")
    assert [(p["prompt"], p["answer"]) for p in read_problems(path)] == [('What is\n"1"?', "007"), (long, "1,5")]
    assert [number for number, _ in read_rows(path)] == [3, 5]


def test_several_right_answers_survive_a_written_file(tmp_path):
    truths = [["3", "x=3"], '["3", "x=3"]', ["65"], '["65"]', [1, 2], "[1, 2]", "[]", ["[", ""]]
    rows = [{"prompt": f"p{i}", "reward_model": {"ground_truth": truth}} for i, truth in enumerate(truths)]
    rows += [{"prompt": "p", "answer": ["a", "b"]}, {"prompt": "o", "answer": ["65"]}]
    path, out = written(tmp_path / "x.jsonl", rows), tmp_path / "out.parquet"
    problems = read_problems(path)
    answers = ["3", "3", "65", "65", "[1, 2]", "[1, 2]", "[]", "[", "a", "65"]
    assert [problem["answer"] for problem in problems] == answers
    assert [problem.get("alternatives") for problem in problems] == [["3", "x=3"]] * 2 + [None] * 6 + [["a", "b"], None]
    write_rows(out, rows, like=path, provenance={})
    assert read_problems(out) == problems
    for problem, response, reward in ((0, "x=3", 1), (1, "3", 1), (1, "4", 0), (2, "65", 1), (4, "[1, 2]", 1)):
        assert math_reward(problems[problem], f"\\boxed{{{response}}}", False) == reward


def test_tools_and_calls_survive_a_written_file(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
    ]
    rows = [{"prompt": chat, "answer": "3", "tools": [{"type": "function"}]}]
    rows += [{"prompt": "q", "answer": "4", "data_source": "mine"}]
    path, out = written(tmp_path / "x.jsonl", rows), tmp_path / "out.parquet"
    write_rows(out, rows, like=path, provenance={})
    first, second = read_problems(out)
    assert [row["reward_model"] for _, row in read_rows(out)] == [{"ground_truth": n, "style": "rule"} for n in "34"]
    assert (first["prompt"], first["chat_tools"]) == (chat, [{"type": "function"}])
    assert (second["prompt"], second["data_source"]) == ([{"role": "user", "content": "q"}], "mine")
    assert "chat_tools" not in second


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_lines_are_read_in_json_and_behind_a_byte_order_mark(name, mark, tmp_path):
    path = tmp_path / name
    path.write_text(f"{mark}{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n", encoding="utf-8")
    assert list(read_rows(path)) == [(1, GOOD), (3, GOOD)]
    path.write_text(f"{json.dumps(GOOD)}\n{{", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{name}:2: not JSON"):
        list(read_rows(path))
