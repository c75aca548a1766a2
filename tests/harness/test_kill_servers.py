"""The harness that kills servers finds what it must find; it runs with real servers by hand (docs/vllm.md)."""

import random

import kill_servers
import pytest
from kill_servers import GROUP, PROMPTS

from rljax.record.token_dumps import make_dump, write_dump
from rljax.run.sampling import step_seed

SEED = 5
ROWS = [
    {"step": step, "rollout/policy_version": step - 1, "rollout/staleness": 0.0, "mismatch/logprob_abs_diff_max": 1e-6}
    for step in (1, 2)
]


@pytest.fixture
def record(tmp_path):
    """Returns the directory of a sound run of two steps."""
    places = [f"{step_seed(SEED, step)} {i} {j}\n" for step in (1, 2) for i in range(PROMPTS) for j in range(GROUP)]
    (tmp_path / "handed_on").write_text("".join(places))
    for step in (1, 2):
        dump(tmp_path, step, PROMPTS * GROUP)
    return tmp_path


def dump(directory, step, count):
    names = [str(i) for i in range(count)]
    path = directory / "run" / "rollouts" / f"step_{step:06d}.parquet"
    write_dump(path, make_dump(names, [[1]] * count, [[True]] * count, {}))


def test_nothing_is_wrong_with_a_sound_run(record):
    assert kill_servers.problems_of(ROWS, record, SEED, 2) == []


def test_a_response_lost_and_one_handed_on_twice_are_seen(record):
    lines = (record / "handed_on").read_text().splitlines(keepends=True)
    (record / "handed_on").write_text("".join([*lines[1:], lines[-1]]))
    assert kill_servers.problems_of(ROWS, record, SEED, 2) == ["1 responses lost", "1 responses handed on too often"]


def test_other_counts_versions_and_weights_are_seen(record):
    dump(record, 2, PROMPTS * GROUP - 1)
    rows = [ROWS[0], ROWS[1] | {"rollout/policy_version": 0, "mismatch/logprob_abs_diff_max": 0.2}]
    assert kill_servers.problems_of(rows, record, SEED, 2) == [
        "step 2 has responses of version 0",
        "step 2: |engine - trainer| is 0.2",
        f"the dump of step 2 has {PROMPTS * GROUP - 1} rollouts, expected {PROMPTS * GROUP}",
    ]
    assert kill_servers.problems_of(ROWS[:1], record, SEED, 2)[0] == "rows of the steps [1], expected 1 to 2"


@pytest.mark.parametrize(("kills", "lists"), [(1, 0), (2, 0), (20, 0), (6, 12)])
def test_a_plan_has_as_many_kills_and_lists_as_asked_for(kills, lists):
    plans = [kill_servers.plan(kills, lists, random.Random(seed)) for seed in range(50)]
    assert {sum(plan) for plan in plans} == {kills}
    assert {plan.count(0) for plan in plans} == {lists}
    assert {count for plan in plans for count in plan} - {0} == ({1, 2} if kills > 1 else {1})
