"""The harnesses that kill runs and servers find the differences and losses that they must find.

Real servers are killed by hand (docs/vllm.md).
"""

import json
import random
import shutil

import kill_run
import kill_servers
import pytest
from kill_servers import GROUP, PROMPTS
from records import write_record
from toy_runs import printed

from rljax.record.token_dumps import make_dump, write_dump
from rljax.run.sampling import step_seed

SEED = 5
ROWS = [
    {"step": step, "rollout/policy_version": step - 1, "rollout/staleness": 0.0, "mismatch/logprob_abs_diff_max": 1e-6}
    for step in (1, 2)
]


def dump(run_dir, step, ids, masks):
    names = [str(i) for i in range(len(ids))]
    write_dump(run_dir / "rollouts" / f"step_{step:06d}.parquet", make_dump(names, ids, masks, {}))


def record(run_dir, *rows, tokens):
    """Writes a run directory with these rows, from step 1 on, and one dump of one sequence."""
    write_record(run_dir, [{"step": step, **row} for step, row in enumerate(rows, 1)])
    dump(run_dir, 3, [tokens], [[True] * len(tokens)])
    return run_dir


def test_each_difference_is_named(tmp_path):
    whole = record(tmp_path / "whole", {"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}, tokens=[1, 2])
    far = record(tmp_path / "far", {"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 2.0000001}, tokens=[1, 3])
    without = record(tmp_path / "without", {"a": 1.0, "b": 2.0}, {"b": 2.0, "time/step_s": 1.0}, tokens=[1, 2])
    named = [f"{far}: other tokens in step_000003.parquet", f"{far}: step 2 differs in a, b"]
    assert kill_run.differences(far, whole) == named
    assert kill_run.differences(without, whole) == [f"{without}: step 2 differs in a"]
    shutil.rmtree(far / "rollouts")
    (far / "metrics.jsonl").write_text('{"step": 1, "a": 1.0, "b": 2.0}\n')
    assert kill_run.differences(far, whole) == [f"{far}: steps [1]", f"{far}: dumps []"]


def sampled_ahead(run_dir, versions, prompts, **more):
    """Writes a run directory with a row for each step, whose oldest version is given, and a dump of its prompts."""
    rows = [{"step": step, "rollout/policy_version": version, **more} for step, version in enumerate(versions, 1)]
    write_record(run_dir, rows)
    for step, of_step in enumerate(prompts, 1):
        dump(run_dir, step, [[*prompt, 9] for prompt in of_step], [[False] * len(p) + [True] for p in of_step])
    return run_dir


def test_accounts_of_runs_that_sample_ahead(tmp_path):
    asked = [[(1, 2), (3,)], [(4,), (5,)], [(6,), (7,)]]
    whole = sampled_ahead(tmp_path / "whole", [0, 0, 1], asked)
    sound = sampled_ahead(tmp_path / "sound", [0, 1, 0], [asked[0][::-1], *asked[1:]])
    assert kill_run.broken_accounts(sound, whole, 2) == []
    assert kill_run.broken_accounts(sound, whole, 1) == [f"{sound}: step 3 has a token of version 0"]
    for name, last in (("twice", asked[1]), ("uneven", [(6,), (6,)])):
        other = sampled_ahead(tmp_path / name, [0, 1, 2], [*asked[:2], last])
        assert kill_run.broken_accounts(other, whole, 1) == [f"{other}: other prompts in step_000003.parquet"]
    short = sampled_ahead(tmp_path / "short", [0, 0], asked[:2])
    dumps = f"{short}: dumps ['step_000001.parquet', 'step_000002.parquet']"
    assert kill_run.broken_accounts(short, whole, 1) == [f"{short}: steps [1, 2]", dumps]
    other = sampled_ahead(tmp_path / "other", [0], asked[:1], **{"mismatch_numerics/logprob_abs_diff_max": 0.01})
    assert f"{other}: numerics of step 1 are 0.01" in kill_run.broken_accounts(other, whole, 1)


@pytest.mark.harness
def test_two_kills_keep_the_rows(tmp_path):
    words = ["--kills", "2", "--seeds", "3", "--steps", "6", "--directory", tmp_path, "--json", tmp_path / "found.json"]
    printed(kill_run.main, words)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["kills"] == sum(found["by_phase"].values()) == 2
    assert found["differences"] == []


def full_dump(directory, step, count):
    dump(directory / "run", step, [[1]] * count, [[True]] * count)


def test_lost_and_doubled_responses_and_other_steps_are_seen(tmp_path):
    places = [f"{step_seed(SEED, step)} {i} {j}\n" for step in (1, 2) for i in range(PROMPTS) for j in range(GROUP)]
    for step in (1, 2):
        full_dump(tmp_path, step, PROMPTS * GROUP)
    (tmp_path / "handed_on").write_text("".join([*places[1:], places[-1]]))
    twice = ["1 responses lost", "1 responses handed on too often"]
    assert kill_servers.problems_of(ROWS, tmp_path, SEED, 2) == twice
    (tmp_path / "handed_on").write_text("".join(places))
    assert kill_servers.problems_of(ROWS, tmp_path, SEED, 2) == []
    full_dump(tmp_path, 2, PROMPTS * GROUP - 1)
    rows = [ROWS[0], ROWS[1] | {"rollout/policy_version": 0, "mismatch/logprob_abs_diff_max": 0.2}]
    assert kill_servers.problems_of(rows, tmp_path, SEED, 2) == [
        "step 2 has responses of version 0",
        "step 2: |engine - trainer| is 0.2",
        f"the dump of step 2 has {PROMPTS * GROUP - 1} rollouts, expected {PROMPTS * GROUP}",
    ]
    assert kill_servers.problems_of(ROWS[:1], tmp_path, SEED, 2)[0] == "rows of the steps [1], expected 1 to 2"


def test_a_plan_has_as_many_kills_and_lists_as_asked_for():
    for kills, lists in ((1, 0), (2, 0), (6, 12)):
        plans = [kill_servers.plan(kills, lists, random.Random(seed)) for seed in range(50)]
        assert ({sum(plan) for plan in plans}, {plan.count(0) for plan in plans}) == ({kills}, {lists})
        assert {count for plan in plans for count in plan} - {0} == ({1, 2} if kills > 1 else {1})
