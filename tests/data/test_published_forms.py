"""Tests of the forms in which data sets are published: prompts and answers that are read, and rows that are refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from problem_files import read_problems

from rljax.commands.prepare import main
from rljax.data.files import Tally, answered_rows
from rljax.data.forms import last_box, take
from rljax.errors import run_cli

CHAT = [{"content": "Solve it.\n\nWhat is 1+2?\n\nWrite Answer: $Answer.", "role": "user"}]
WORKED = "Add them.\nSo $1 + 2 = \\boxed{\\frac{6}{2}}$, as wanted."
ADD = {"problem": "Add.", "solution": WORKED}
TURNS = [{"content": "Add.", "role": "user"}, {"content": WORKED, "role": "assistant"}]
OF_DAPO = {"data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": "9"}}
OLYMPIAD = {"problem_type": "Algebra", "question_type": "math-word-problem"}
# The rows are our own, with the keys, nesting and types of the published files: (form, row, prompt, answer).
PUBLISHED = [
    ("gsm8k", {"question": "Add?", "answer": "1+2=<<1+2=3>>3 apples\n#### 1,003"}, "Add?", "1,003"),
    ("math-500", ADD | {"answer": "\\frac{6}{2}", "level": 2, "unique_id": "a/1.json"}, "Add.", "\\frac{6}{2}"),
    ("aime-2024", ADD | {"id": 60, "answer": "003", "url": "u", "year": "2024"}, "Add.", "003"),
    ("aime-2024", {"ID": "2024-I-1", "Problem": "Add.", "Solution": WORKED, "Answer": 3}, "Add.", "3"),
    ("aime-2024", {"id": 1, "problem": "Add.", "solution": "\\boxed{204}", "url": "u"}, "Add.", "204"),
    ("aime-2025", {"question": "Add.", "answer": "3"}, "Add.", "3"),
    ("aime-2025", {"problem": "Add.", "answer": "3", "id": "0"}, "Add.", "3"),
    ("aime-2025", {"problem_idx": 1, "problem": "Add.", "answer": 3, "problem_type": ["Algebra"]}, "Add.", "3"),
    ("dapo-math-17k", OF_DAPO | {"prompt": CHAT, "reward_model": {"ground_truth": "3", "style": "rule"}}, CHAT, "3"),
    (
        "dapo-math-17k",
        OF_DAPO | {"prompt": "1+2?", "solution": "3", "source_prompt": CHAT, "reward_model": {"ground_truth": "3"}},
        "1+2?",
        "3",
    ),
    ("numinamath", ADD | {"source": "aops_forum", "messages": TURNS}, "Add.", "\\frac{6}{2}"),
    ("numinamath", ADD | OLYMPIAD | {"answer": "3", "problem_is_valid": "Yes", "source": "olympiads"}, "Add.", "3"),
    ("deepscaler", ADD | {"answer": "3"}, "Add.", "3"),
    ("big-math", {"problem": "Add.", "answer": "3", "domain": ["Algebra"], "llama8b_solve_rate": 0.5}, "Add.", "3"),
    ("big-math", {"prompt": "Add.", "solution": "3", "domain": [], "llama8b_solve_rate": None}, "Add.", "3"),
    (
        "openr1-math",
        ADD
        | OLYMPIAD
        | {"answer": "3", "uuid": "u", "generations": ["<think>no</think> \\boxed{4}"], "messages": TURNS},
        "Add.",
        "3",
    ),
]


def plain(messages):
    """Returns the messages with keys in any order, or the text."""
    return messages if isinstance(messages, str) else [dict(message) for message in messages]


@pytest.mark.parametrize(("form", "row", "prompt", "answer"), PUBLISHED)
@pytest.mark.parametrize("suffix", ["parquet", "json"])
def test_a_published_form_is_read_by_keys_and_by_name(form, row, prompt, answer, suffix, tmp_path):
    source, out = tmp_path / f"in.{suffix}", tmp_path / "out.parquet"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), source)
    else:
        source.write_text(json.dumps([row]))
    for name in (None, form):
        (problem,) = read_problems(source, name)
        assert (plain(problem["prompt"]), problem["answer"]) == (prompt, answer)
        words = [str(source), str(out), "--check-answers", "0", *(["--form", name] if name else [])]
        assert run_cli(main, words) == 0
        (written,) = read_problems(out)
        assert (plain(written["prompt"]), written["answer"]) == (prompt, answer)


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        ({"text": "1+1=2", "label": 2}, None, "the prompt is empty .*; the keys are text, label"),
        ({"question": "1+1", "final": "2"}, None, "no right answer .*; the keys are question, final"),
        ({"problem": "1+1", "question": "2+2", "answer": "2"}, None, "both problem and question may be the prompt"),
        ({"prompt": "1+1=", "answer": "2"}, "gsm8k", "gsm8k has question, and answer; the keys are prompt, answer"),
        ({"conversations": [], "answer": "2"}, "aime-2025", "has problem or question, and answer; the keys are conv"),
        ({f"k{i}": 1 for i in range(14)}, None, "the keys are k0, .*, k11 and 2 more"),
    ],
)
def test_other_keys_are_refused_and_listed(row, form, message):
    with pytest.raises(ValueError, match=f"^file: row 1: .*{message}"):
        take(row, form, "file: row 1")


def test_messages_may_be_the_text_of_json():
    row = {"prompt": json.dumps(CHAT), "reward_model": '{"ground_truth": "3", "style": "rule"}'}
    assert take(row, None, "") == (CHAT, "3")
    turns = [*CHAT, {"role": "assistant", "content": "Answer: 3"}]
    assert take({"messages": turns, "answer": "3"}, None, "") == (CHAT, "3")
    assert take({"messages": json.dumps(turns), "answer": "3"}, None, "") == (CHAT, "3")
    for text in ("[1, 2] has how many parts?", "[1, 2]", "[{1}]", '{"role": 1'):
        assert take({"prompt": text, "answer": "2"}, None, "") == (text, "2")


def test_only_gsm8k_loses_what_is_before_the_hashes():
    assert take({"prompt": "p", "answer": "a\n#### b"}, None, "")[1] == "a\n#### b"
    assert take({"question": "p", "answer": "a #### b"}, None, "")[1] == "a #### b"
    assert take({"question": "p", "answer": "a\n#### -2 \n"}, None, "")[1] == "-2"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        *[("\\boxed{1} or \\boxed{x_{2}}.", "x_{2}"), ("\\boxed{\\{1\\}}", "\\{1\\}"), ("\\boxed{1", None)],
        *[("\\fbox{7}", "7"), ("so $\\boxed 7$", "7"), ("\\boxed\\frac{1}{2}.", "\\frac{1}{2}"), ("1", None)],
        *[("\\boxed{7}. We use \\boxed to mark it", "7"), ("\\boxed{7}, and \\fbox{QED}", "7")],
    ],
)
def test_the_last_box_is_closed_by_its_own_brace(text, content):
    assert last_box(text) == content


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
