"""The kill harness kills as it says, and finds the differences that it must find."""

import json
import shutil

import kill_run
import pytest
from toy_runs import printed

from rljax.record.token_dumps import make_dump, write_dump


def record(run_dir, *rows, tokens):
    """Writes a run directory with these rows, from step 1 on, and one dump of one sequence."""
    run_dir.mkdir()
    lines = [json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows, 1)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    write_dump(run_dir / "rollouts" / "step_000003.parquet", make_dump(["a"], [tokens], [[True] * len(tokens)], {}))
    return run_dir


def test_each_difference_is_named(tmp_path):
    whole = record(tmp_path / "whole", {"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}, tokens=[1, 2])
    far = record(tmp_path / "far", {"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 2.0000001}, tokens=[1, 3])
    without = record(tmp_path / "without", {"a": 1.0, "b": 2.0}, {"b": 2.0}, tokens=[1, 2])
    assert kill_run.differences(far, whole) == [
        f"{far}: step 2 differs in a, b",
        f"{far}: other tokens in step_000003.parquet",
    ]
    assert kill_run.differences(without, whole) == [f"{without}: step 2 differs in a"]


def sampled_ahead(run_dir, versions, prompts, **more):
    """Writes a run directory with a row for each step, whose oldest version is given, and a dump of its prompts."""
    run_dir.mkdir()
    rows = [{"step": step, "rollout/policy_version": version, **more} for step, version in enumerate(versions, 1)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, of_step in enumerate(prompts, 1):
        ids = [[*prompt, 9] for prompt in of_step]
        masks = [[False] * len(prompt) + [True] for prompt in of_step]
        names = [str(i) for i in range(len(ids))]
        write_dump(run_dir / "rollouts" / f"step_{step:06d}.parquet", make_dump(names, ids, masks, {}))
    return run_dir


def test_accounts_of_runs_that_sample_ahead(tmp_path):
    asked = [[(1, 2), (3,)], [(4,), (5,)], [(6,), (7,)]]
    whole = sampled_ahead(tmp_path / "whole", [0, 0, 1], asked)
    sound = sampled_ahead(tmp_path / "sound", [0, 1, 0], [asked[0][::-1], *asked[1:]])
    assert kill_run.broken_accounts(sound, whole, 2) == []
    assert kill_run.broken_accounts(sound, whole, 1) == [f"{sound}: step 3 has a token of version 0"]
    twice = sampled_ahead(tmp_path / "twice", [0, 1, 2], [asked[0], asked[1], asked[1]])
    assert kill_run.broken_accounts(twice, whole, 1) == [f"{twice}: other prompts in step_000003.parquet"]
    uneven = sampled_ahead(tmp_path / "uneven", [0, 1, 2], [*asked[:2], [(6,), (6,)]])
    assert kill_run.broken_accounts(uneven, whole, 1) == [f"{uneven}: other prompts in step_000003.parquet"]
    short = sampled_ahead(tmp_path / "short", [0, 0], asked[:2])
    assert kill_run.broken_accounts(short, whole, 1) == [
        f"{short}: steps [1, 2]",
        f"{short}: dumps ['step_000001.parquet', 'step_000002.parquet']",
    ]
    numerics = {"mismatch_numerics/logprob_abs_diff_max": 0.01}
    other = sampled_ahead(tmp_path / "other", [0], asked[:1], **numerics)
    assert f"{other}: numerics of step 1 are 0.01" in kill_run.broken_accounts(other, whole, 1)


@pytest.mark.harness
def test_two_kills_keep_the_rows_and_a_changed_row_is_seen(tmp_path):
    words = ["--kills", "2", "--seeds", "3", "--steps", "6", "--directory", tmp_path, "--json", tmp_path / "found.json"]
    out = printed(kill_run.main, words)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["kills"] == sum(found["by_phase"].values()) == 2
    assert found["differences"] == []
    assert out.startswith(f"2 kills in {found['runs']} runs of 6 steps, ")
    whole, killed = tmp_path / "runs" / "whole3", tmp_path / "runs" / "killed3-0"
    assert kill_run.differences(killed, whole) == []
    rows = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(rows[3]) | {"reward/mean": 0.123}
    (killed / "metrics.jsonl").write_text("".join([*rows[:3], json.dumps(row) + "\n", *rows[4:]]))
    assert kill_run.differences(killed, whole) == [f"{killed}: step 4 differs in reward/mean"]
    (killed / "metrics.jsonl").write_text("".join(rows[:5]))
    assert kill_run.differences(killed, whole)[0] == f"{killed}: steps [1, 2, 3, 4, 5]"
    shutil.rmtree(killed / "rollouts")
    assert f"{killed}: dumps []" in kill_run.differences(killed, whole)
