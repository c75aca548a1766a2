"""A Parquet file in verl's form becomes a trained and evaluated policy, by the steps that a person takes."""

import json

import numpy as np
import pytest
from problem_files import read_problems
from toy_runs import ROOT, command, comparable, completed, printed

from rljax import evaluate
from rljax.commands import prepare
from rljax.data.files import read_provenance
from rljax.data.tokenizer import load_tokenizer
from rljax.run.build import load_problems
from rljax.run.config import Config
from rljax.run.config_file import load_config

pytestmark = pytest.mark.slow

DATA = ROOT / "tests/data"
STEPS = 4
LIMIT = "12"  # tokens of an evaluated response; answers without a scratchpad fit, and some of them are right
DRAWS = ["--n", "2", "--temperature", "1.0", "--pass-k", "1", "2"]
EVALUATED = [
    *("--eval.max-response-tokens", LIMIT),
    *("--eval.at-start", "true", "--eval.every", "3", "--eval.n", "2", "--eval.temperature", "1.0"),
    *("--eval.pass-k", "1", "2", "--checkpoint.keep-best", "true"),
]


@pytest.fixture(scope="module")
def prepared(toy_base, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "additions.parquet"
    words = [DATA / "additions_chat.parquet", out, "--model", toy_base]
    words += ["--max-prompt-tokens", "8", "--chat-template", "false", "--hold-out", "4"]
    assert "wrote 20 problems" in printed(prepare.main, words)
    return out


@pytest.fixture(scope="module")
def train(prepared, toy_base, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")

    def run(name, *options):
        words = [
            *("--data.task", "file", "--data.path", str(prepared), "--data.chat-template", "false"),
            *("--data.reward", "rljax.data.toy:addition_reward", "--data.batch-size", "4"),
            *("--rollout.group-size", "8", "--packing.rows-per-micro-batch", "4", "--optimizer.learning-rate", "2e-4"),
            *("--packing.share-prefixes", "false"),
        ]
        completed(command(toy_base, place / name, *words, *options))
        return place / name

    return run


@pytest.fixture(scope="module")
def evaluated(train, prepared):
    held = prepared.with_name("additions-held.parquet")
    return train("evaluated", "--run.steps", str(STEPS), *EVALUATED, "--eval.datasets", f"held={held}", "toy")


def test_a_run_from_the_file_learns_and_is_evaluated(evaluated, prepared):
    rows = comparable(evaluated)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert any(row["reward/mean"] > 0 for row in rows)
    assert any(row["optimizer/grad_norm"] > 0 for row in rows)
    for row in rows:
        assert row["reward/errors"] == row["reward/timeouts"] == 0
        due = row["step"] in (3, STEPS)
        assert ("eval/held/accuracy" in row) == ("eval/toy/pass@2" in row) == due
        assert ("eval/held/accuracy_at_start" in row) == (row["step"] == 1)
        if due:
            assert row["eval/toy/accuracy"] == pytest.approx(row["eval/toy/pass@1"])
            assert row["eval/toy/accuracy"] < row["eval/toy/pass@2"] < 1
            # The accuracy is a multiple of 1 / (4 problems x 2 responses).
            assert (8 * row["eval/held/accuracy"]).is_integer()
    assert read_provenance(prepared)["steps"][0]["read"] == 60


def test_evaluations_and_a_pause_change_no_bit(evaluated, train):
    for steps in ("2", str(STEPS)):
        run = train("plain", "--run.steps", steps, "--eval.every", "0")
    expected = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in comparable(evaluated)]
    assert comparable(run) == expected


def test_a_checkpoint_evaluated_alone_gives_what_its_row_says(evaluated, prepared, tmp_path):
    rows = {row["step"]: row for row in comparable(evaluated)}
    means = {step: np.mean([rows[step][f"eval/{d}/accuracy"] for d in ("held", "toy")]) for step in (3, STEPS)}
    best = max(means, key=means.get)
    words = [*DRAWS, "--dtype", "bfloat16", "--max-response-tokens", LIMIT]
    held = str(prepared.with_name("additions-held.parquet"))
    from_file = [*words, "--dataset", held, "--chat-template", "false", "--reward", "addition"]
    of_best = json.loads(printed(evaluate.main, [*words, "--path", str(evaluated), "--best", "true"]))
    newest = [*from_file, "--path", str(evaluated / "checkpoints" / str(STEPS)), "--out", str(tmp_path / "all.jsonl")]
    of_newest = json.loads(printed(evaluate.main, newest))
    assert (of_best["step"], of_newest["step"]) == (best, STEPS)
    assert (of_best["dataset"], of_newest["dataset"]) == ("toy", "additions-held")
    for found, name in ((of_best, "toy"), (of_newest, "held")):
        for key in ("accuracy", "pass@1", "pass@2", "response_length", "truncated_fraction"):
            assert found[key] == rows[found["step"]][f"eval/{name}/{key}"], key
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [(line["problem"], line["sample"]) for line in lines] == [(i, j) for i in range(4) for j in range(2)]
    answers = [problem["answer"] for problem in read_problems(held)]
    assert [line["answer"] for line in lines[::2]] == answers
    # The reward by hand compares the text after the last comma. A response that was cut off earns nothing.
    assert [line["reward"] for line in lines] == [
        float(not line["truncated"] and line["response"].rsplit(",", 1)[-1] == line["answer"]) for line in lines
    ]
    assert np.mean([line["reward"] for line in lines]) == of_newest["accuracy"]


def test_long_prompts_are_counted_and_the_remedy_named(toy_base, capsys):
    words = ["--data.task", "file", "--data.path", str(DATA / "math_chat.jsonl"), "--model.path", str(toy_base)]

    def check(*more):
        config = load_config(Config, [*words, "--data.batch-size", "4", *more], prog="", description="")
        load_problems(config, load_tokenizer(toy_base))
        return capsys.readouterr().err

    with pytest.raises(ValueError, match=r"and 12 of 12 are longer in .*; raise it, or: rljax prepare"):
        check("--data.max-prompt-tokens", "30")
    assert "warning: nothing is evaluated: eval.datasets is empty" in check()
    assert check("--eval.every", "0") == ""
