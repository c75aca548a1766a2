"""``rljax prepare`` drops, counts and notes the right rows, and continues scoring after an interruption."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from problem_files import read_problems
from toy_texts import toy_config

from rljax.commands.prepare import main
from rljax.data.files import read_provenance, read_rows
from rljax.data.toy import build_tokenizer
from rljax.errors import run_cli
from rljax.policy.families import config_to_hf

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"

# This reward solves the first problem["extra_info"]["solved"] of each problem's responses. It interrupts on request,
# and fails at the problems in FAILING.
REWARD = """
from collections import Counter

CALLS, STOP_AFTER, FAILING = Counter(), [None], []

def reward(problem, response, truncated):
    if STOP_AFTER[0] is not None and CALLS.total() >= STOP_AFTER[0]:
        raise KeyboardInterrupt
    if problem["prompt"] in FAILING:
        raise OSError("no service")
    CALLS[problem["prompt"]] += 1
    return float(CALLS[problem["prompt"]] <= problem["extra_info"]["solved"])
"""


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def model(tmp_path):
    build_tokenizer().save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_to_hf(toy_config(), "float32")))
    return str(tmp_path / "model")


@pytest.fixture
def scoring(tmp_path, monkeypatch, model, fake):
    """Yields the arguments and the reward's module of a pass-rate run over five problems with the stand-in server."""
    (tmp_path / "counting_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": f"{i}+1=", "answer": "0", "extra_info": {"solved": i}} for i in range(5)]
    words = [write_rows(tmp_path / "in.jsonl", rows), str(tmp_path / "out.parquet"), "--model", model]
    words += ["--urls", fake.url, "--samples", "4", "--max-response-tokens", "4", "--reward", "counting_reward:reward"]
    words += ["--reward-workers", "0", "--batch-size", "2"]
    import counting_reward

    yield words, counting_reward
    sys.modules.pop("counting_reward")


def test_repeats_and_long_prompts_are_dropped_and_counted(tmp_path, model, capsys):
    problems = [("1+1=", "2"), (" 1+1=\n", "2"), ([{"role": "user", "content": "1+1="}], "3")]
    problems += [("100+100=", "200"), ("1000+100=", "1100")]
    out, rows = tmp_path / "out.parquet", [{"prompt": prompt, "answer": answer} for prompt, answer in problems]
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert run_cli(main, [source, str(out), "--model", model, "--max-prompt-tokens", "8"]) == 0
    kept = [(problem["prompt"], problem["answer"]) for problem in read_problems(out)]
    assert kept == [("1+1=", "2"), ("100+100=", "200")]
    noted = read_provenance(out)
    assert noted["steps"] == [
        {"step": "repeats", "dropped": 2, "kept": 3, "read": 5, "repeats_with_another_answer": 1},
        {"step": "prompt length", "dropped": 1, "kept": 2, "max_prompt_tokens": 8, "longest": 9},
    ]
    assert noted["source"] == source
    assert noted["source_sha256"] == hashlib.sha256(Path(source).read_bytes()).hexdigest()
    assert noted["command"].startswith("rljax prepare ")
    assert noted["command"].endswith("--max-prompt-tokens 8")
    assert "repeats: 2 dropped, 3 kept, read 5, repeats with another answer 1" in capsys.readouterr().out
    tools = [[{"name": name}] for name in ("add", "add", "multiply")]  # equal prompts with other tools are two problems
    write_rows(tmp_path / "in.jsonl", [{"prompt": "1+1=", "answer": "2", "tools": each} for each in tools])
    assert run_cli(main, [source, str(out)]) == 0
    assert [problem["chat_tools"] for problem in read_problems(out)] == [tools[0], tools[2]]


def test_a_file_of_verls_form_keeps_every_column_and_splits(tmp_path):
    source, out = DATA / "additions_chat.parquet", tmp_path / "out.parquet"
    assert run_cli(main, [str(source), str(out), "--hold-out", "6", "--seed", "1"]) == 0
    kept, held = ([row for _, row in read_rows(path)] for path in (out, tmp_path / "out-held.parquet"))
    assert (len(kept), len(held)) == (18, 6)
    texts = [row["prompt"][0]["content"] for row in kept + held]
    assert len(set(texts)) == 24
    firsts = {row["prompt"][0]["content"]: row for _, row in reversed(list(read_rows(source)))}
    assert all(row == firsts[row["prompt"][0]["content"]] for row in kept + held)
    # Prepared problems are prepared again: the record of the first time is kept.
    assert run_cli(main, [str(out), str(tmp_path / "twice.parquet")]) == 0
    twice = read_provenance(tmp_path / "twice.parquet")
    assert twice["source_provenance"] == read_provenance(out)
    assert twice["steps"][0]["dropped"] == 0


def test_a_published_file_is_looked_at_and_rewritten(tmp_path, capsys):
    rows = [{"question": f"{i}+1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}", "level": 1} for i in range(4)]
    rows += [{"question": "5+1?", "answer": ""}, {"question": "6+1?", "answer": "7\n\nSo it is."}, rows[0]]
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    assert run_cli(main, [source, str(out), "--form", "gsm8k", "--reward-workers", "1"]) == 0
    looked = read_provenance(out)["looked"]
    assert "\n".join(looked) in capsys.readouterr().out
    assert looked[0] == "warning: right answers get no reward when they are given as the response"
    assert looked[2:4] == [
        "in.jsonl  7     1          -            1                 1 of 5",
        "fails: '7 So it is.' to '6+1?'",
    ]
    assert looked[4:] == ["keys not read: level"]
    assert [step["dropped"] for step in read_provenance(out)["steps"]] == [1, 1]
    assert [row["reward_model"]["ground_truth"] for _, row in read_rows(out)][:4] == ["1", "2", "3", "4"]


def test_problems_solved_sometimes_are_kept_with_their_rate(scoring, tmp_path, capsys):
    """A failed scoring counts as wrong and is tried again. Other bounds need no new responses."""
    words, reward = scoring
    out = tmp_path / "out.parquet"
    reward.FAILING.append("2+1=")
    assert run_cli(main, words) == 0
    assert "warning: 4 responses could not be scored and count as wrong; the same" in capsys.readouterr().err
    assert [row["pass_rate"] for _, row in read_rows(out)] == [0.25, 0.75]
    reward.FAILING.clear()
    assert run_cli(main, words) == 0
    assert dict(reward.CALLS) == {f"{i}+1=": 4 for i in range(5)}
    rates = [(row["prompt"], row["pass_rate"]) for _, row in read_rows(out)]
    assert rates == [("1+1=", 0.25), ("2+1=", 0.5), ("3+1=", 0.75)]
    step = read_provenance(out)["steps"][-1]
    assert (step["never_solved"], step["always_solved"], step["samples"], step["kept"]) == (1, 1, 4, 3)
    assert run_cli(main, [*words, "--min-pass-rate", "0.5", "--max-pass-rate", "0.7"]) == 0
    assert reward.CALLS.total() == 20
    assert [problem["prompt"] for problem in read_problems(out)] == ["2+1="]


def test_an_interrupted_scoring_goes_on_with_what_is_missing(scoring, tmp_path, fake, capsys):
    words, reward = scoring
    out, path = tmp_path / "out.parquet", tmp_path / "out.parquet.scores.jsonl"
    reward.STOP_AFTER[0] = 13  # inside the second batch, which has problems 2 and 3
    assert run_cli(main, words) == 130
    assert not out.exists()
    done = len(path.read_text().splitlines()) - 1
    assert 2 <= done <= 3
    path.write_text(path.read_text() + '{"key": "cut sho')
    reward.STOP_AFTER[0] = None
    reward.CALLS.clear()
    assert run_cli(main, words) == 0
    assert reward.CALLS.total() == 4 * (5 - done)
    assert [row["pass_rate"] for _, row in read_rows(out)] == [0.25, 0.5, 0.75]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 6
    assert run_cli(main, [*words, "--temperature", "0.5"]) == 2
    assert "was scored with other settings: temperature (1.0 there, 0.5 now)" in capsys.readouterr().err
    path.write_text(path.read_text() + "[1]\n{}\n")
    assert run_cli(main, words) == 2
    assert f"{path} does not hold scores: TypeError" in capsys.readouterr().err


def test_all_shards_of_a_data_set_are_read(tmp_path, monkeypatch, capsys):
    names, out = [f"data/train-0000{i}-of-00002.jsonl" for i in range(2)], tmp_path / "out.parquet"
    listed = [*names, "data/test.jsonl", "dataset_infos.json", "README.md"]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda self, repository, repo_type: listed)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repository, name, repo_type: str(tmp_path / name))
    (tmp_path / "data").mkdir()
    for i, name in enumerate(names):
        write_rows(tmp_path / name, [{"prompt": f"{i}+1=", "answer": f"{i + 1}"}])
    whole = hashlib.sha256(b"".join((tmp_path / name).read_bytes() for name in names)).hexdigest()
    for source in ("owner/name:data/train-*.jsonl", f"{tmp_path}/data", f"{tmp_path}/data/train-*.jsonl"):
        assert run_cli(main, [source, str(out), "--check-answers", "0"]) == 0
        assert [problem["prompt"] for problem in read_problems(out)] == ["0+1=", "1+1="]
        assert read_provenance(out)["source_sha256"] == whole
    (tmp_path / names[1]).unlink()
    several = "owner/name:FILE is needed, there are 2 files of problems: data/test.jsonl, data/train-*.jsonl"
    partial = "data/train-*.jsonl: only 1 of 2 shards are there"
    for source, message in (("owner/name", several), (f"{tmp_path}/data", partial)):
        assert run_cli(main, [source, str(out)]) == 2
        assert message in capsys.readouterr().err


def test_a_mistake_is_one_line(tmp_path, model, monkeypatch, capsys):
    for words, message in (
        (["nowhere.parquet", "out.parquet"], "no problems at nowhere.parquet: there is no such file"),
        (["{plain}", "out.csv"], "OUT must end in .parquet, got out.csv"),
        (["{plain}", "out.parquet", "--max-prompt-tokens", "5"], "--model is needed"),
        (["{plain}", "out.parquet", "--min-pass-rate", "0.2"], "pass rates are bounded but not measured"),
        (["{plain}", "out.parquet", "--model", "{model}", "--samples", "1"], "at least 2 samples"),
        (["{plain}", "out.parquet", "--model", "{model}", "--max-prompt-tokens", "2"], "no problem is left after the"),
        (["{plain}", "out.parquet", "--hold-out", "12"], "--hold-out 12 leaves nothing of 12 problems"),
        (["{plain}", "out.parquet", "--chat-template", "true"], "chat_template = true, but the tokenizer has none"),
        (["owner/name", "out.parquet"], "owner/name is not a local file and the Hugging Face hub does not give it: "),
    ):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.chdir(tmp_path)
        places = {"plain": DATA / "plain.jsonl", "model": model}
        assert run_cli(main, [word.format(**places) for word in words]) == 2
        assert message in capsys.readouterr().err.strip().splitlines()[-1]
        assert not (tmp_path / "out.parquet").exists()
