"""Batches of another program's trajectories: their sequences, waiting rows, rows that are too old, and resumes."""

import contextlib
import json
import os
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from changed_configs import changed
from external_rows import make_row, write_file
from scripted_runs import POLICY, settings

from rljax.data.prompts import PromptStream
from rljax.errors import ConfigError, StoppedWaitingError
from rljax.rollout.build import check_engine
from rljax.rollout.types import InjectConfig, RolloutConfig, SamplingParams
from rljax.run.external import make_external_batches
from rljax.run.sampling import rollout_row, training_sequences
from rljax.run.stop import StopRequest, Timers

PROBLEMS = [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(100, 110)]
STOP = StopRequest()


@pytest.fixture
def place(tmp_path):
    (tmp_path / "rows").mkdir()
    return tmp_path / "rows"


def make_config(place, batch_size=2, **rollout):
    config = settings(place.parent, data={"batch_size": batch_size})
    return changed(config, rollout={"trajectories": str(place)} | rollout)


def make_batches(config, step=0, state=None, stop=STOP, reported=0):
    stream, sampling = PromptStream(PROBLEMS, config.data.batch_size, 0), SamplingParams(8, reported=reported)
    made = make_external_batches(config, POLICY, stream, sampling, stop)
    if state is not None:
        made.load_state_dict(json.loads(json.dumps(state)))
    made.start(step)
    return made


def take(batches):
    return batches.take(Timers(STOP))


def rewards_of(sampled):
    return sampled.rewards.tolist()


def test_hand_worked_rows_become_sequences(place):
    """RLOO in a group of two makes each advantage the difference. Versions 1 and 2 are trained at version 3."""
    turns = make_row("a", 0.0, 1, (3, 4, 5, 6), mask=[True, False, False, True], logprobs=[-1, None, None, -2])
    failed = make_row("b", None, 2)
    rows = [make_row("a", 1.0, [1, 2, 2]), failed, turns, make_row("b", 1.0, 2, prompt_ids=[9])]
    write_file(place / "x.jsonl", rows)
    config = make_config(place, max_staleness=2)
    sampled = take(make_batches(config, step=3))
    sequences = training_sequences(sampled, config, 3)
    assert [s.advantage for s in sequences] == [1.0, -1.0, 0.0, 0.0]
    assert [s.in_loss for s in sequences] == [True, True, False, False]
    assert [s["staleness"].tolist() for s in sequences[:2]] == [[2, 1, 1], [2, 2, 2, 2]]
    assert [s.turns.tolist() for s in sequences[:2]] == [[1, 1, 1], [1, 0, 0, 2]]
    assert sequences[1].sampled.tolist() == [True, False, False, True]
    assert sequences[1]["rollout_logprobs"].tolist() == [-1.0, 0.0, 0.0, -2.0]
    assert [s.prompt.tolist() for s in sequences] == [[1, 2], [1, 2], [1, 2], [9]]
    row = rollout_row(sampled, 3)
    assert (row["response_length/mean"], row["reward/mean"]) == ((3 + 2 + 3 + 3) / 4, pytest.approx(2 / 3))
    assert (row["rollout/policy_version"], row["rollout/staleness"]) == (1, 1.5)
    assert sampled.row["rollout/failed_trajectories"] == 1


def test_files_are_taken_in_the_order_of_names(place):
    """Groups come in the order in which they become complete. Files with other names do not count."""
    write_file(place / "2.jsonl", [make_row("a", 3), make_row("c", 5), make_row("c", 6)])
    table = pa.Table.from_pylist([make_row("a", 1), make_row("b", 2), make_row("b", 4)])
    pq.write_table(table, place / "1.parquet")
    (place / "0.jsonl.partial").write_text("{")
    (place / ".0.jsonl").write_text("{")
    config = make_config(place, batch_size=3)
    sampled = take(make_batches(config))
    assert rewards_of(sampled) == [[2, 4], [1, 3], [5, 6]]
    assert sampled.row["rollout/waiting_groups"] == 0


def test_a_directory_is_listed_once_for_all_its_files(place, monkeypatch):
    """A file that someone removes before it is read is left out."""
    for number in range(3):
        write_file(place / f"{number}.jsonl", [make_row("a", number)])
    listed, names = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or names(path))
    queue = make_batches(make_config(place)).queue
    assert queue.read_file()
    (place / "1.jsonl").unlink()
    assert (queue.read_file(), len(listed)) == (True, 1)
    assert not queue.read_file()
    assert queue.state_dict()["begun"] == [["0.jsonl", []], ["2.jsonl", []]]


@pytest.mark.parametrize(("source", "looks"), [("directory", 3), ("http://127.0.0.1:0", 1)])
def test_a_directory_of_the_receiver_is_looked_into_once(place, monkeypatch, source, looks):
    answers, looked = iter([False] * 3 + [True]), []
    stop = SimpleNamespace(is_requested=lambda: next(answers), progress=None)
    batches = make_batches(make_config(place, **({} if looks > 1 else {"trajectories": source})), stop=stop)
    monkeypatch.setattr(batches.queue, "read_file", lambda: looked.append(1))
    with contextlib.closing(batches), pytest.raises(StoppedWaitingError, match="waited for trajectories"):
        take(batches)
    assert len(looked) == looks


def test_groups_with_old_rows_are_dropped_and_counted(place):
    """At step 4 the policy is version 3. With a staleness of at most two versions, rows of version 0 are too old."""
    write_file(place / "1.jsonl", [make_row("a", 1, 0), make_row("a", 2, 3), make_row("b", 1, 0)])
    write_file(place / "2.jsonl", [make_row("c", 1, 1), make_row("c", 5, 3)])
    batches = make_batches(make_config(place, batch_size=1, max_staleness=2), step=3)
    sampled = take(batches)
    assert rewards_of(sampled) == [[1, 5]]
    assert sampled.row["rollout/dropped_stale_rows"] == 3
    assert batches.state_dict()["trajectories"]["finished"] == {"1.jsonl": 4, "2.jsonl": 4}


def test_odd_rows_and_names_of_two_problems_are_said_once(place, capsys):
    """The client names its groups by their place in its batch, and loses a trajectory of the first batch."""
    odd = {"tokens": tuple(range(3, 11)), "logprobs": [-0.5] * 8}
    varying = odd | {"logprobs": [-0.5] * 7 + [-0.25]}
    kinds = (("a\x1b", odd), ("a\x1b", odd), ("b", varying), ("b", {}))
    rows = [make_row(group, 1, prompt_ids=[step, 7], **more) for step in range(1, 5) for group, more in kinds]
    write_file(place / "1.jsonl", rows[1:])
    batches = make_batches(make_config(place, max_staleness=9))
    counted = [take(batches).row for _ in range(3)]
    assert [row["rollout/mixed_prompts"] for row in counted] == [1, 1, 1]
    assert [row["rollout/constant_logprobs"] for row in counted] == [2, 2, 2]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(lines) == 2
    said = "warning: step 1: the trajectories of group 'a\\x1b' have different prompts; give each"
    assert any(line.startswith(said) for line in lines)
    said = f"step 1: {place}/1.jsonl: row 1: logprobs are -0.5 at all 8 sampled tokens; send"
    assert any(said in line and line.endswith("(rollout/constant_logprobs: 2)") for line in lines)


def test_a_resume_loses_no_row_and_uses_none_twice(place):
    """Rewards name the rows. After step 1 the first file is partly used, and the run goes on from there twice."""
    write_file(place / "1.jsonl", [make_row(g, r) for g, r in [("a", 0), ("b", 1), ("a", 2), ("c", 3)]])
    write_file(place / "2.jsonl", [make_row(g, r) for g, r in [("c", 4), ("b", 5), ("d", 6)]])
    config = make_config(place, batch_size=1, max_staleness=9)
    first = make_batches(config)
    assert rewards_of(take(first)) == [[0, 2]]
    state = first.state_dict()
    assert rewards_of(take(first)) == [[3, 4]]
    write_file(place / "0.jsonl", [make_row("d", 7)])
    again = make_batches(config, 1, state)
    assert [rewards_of(take(again)) for _ in range(2)] == [[[3, 4]], [[1, 5]]]
    third = make_batches(config, 3, again.state_dict())
    assert rewards_of(take(third)) == [[7, 6]]
    assert third.state_dict()["trajectories"]["finished"] == {"1.jsonl": 3, "0.jsonl": 4, "2.jsonl": 4}


def test_rows_of_a_lost_policy_wait_for_their_version(place):
    """A killed run had published version 2. It starts again from step 0, so a group of version 2 waits for step 3."""
    write_file(place / "1.jsonl", [make_row("a", 0), make_row("a", 1)])
    config = make_config(place, batch_size=1, max_staleness=9)
    killed, policy = make_batches(config), place.parent / "policy.json"
    take(killed)
    for version in (1, 2):
        assert json.loads(policy.read_text()) == {"policy_version": version - 1, "highest_version": version - 1}
        with killed.paused(None, version, Timers(STOP), drains=False):
            assert json.loads(policy.read_text()) == {"policy_version": version - 1, "highest_version": version}
    write_file(place / "0.jsonl", [make_row("z", 8, 2), make_row("z", 9, 2)])
    write_file(place / "2.jsonl", [make_row("b", 2), make_row("b", 3)])
    again = make_batches(config)
    assert [rewards_of(take(again)) for _ in range(3)] == [[[0, 1]], [[2, 3]], [[8, 9]]]


def test_another_source_begins_anew(place, tmp_path):
    write_file(place / "1.jsonl", [make_row("a", 0), make_row("a", 1)])
    config = make_config(place, batch_size=1)
    first = make_batches(config)
    take(first)
    state = first.state_dict()
    state["trajectories"]["source"] = "elsewhere"
    assert rewards_of(take(make_batches(config, 0, state))) == [[0, 1]]
    plain = {"problems_drawn": 4}  # a run without rollout.trajectories, from which this one is a fork
    assert rewards_of(take(make_batches(config, 0, plain))) == [[0, 1]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"refill": True}, "another program samples, so .*refill must be false"),
        ({"update": "keep"}, "another program samples, so .*update must be wait"),
        ({"inject": InjectConfig(weight_noise=0.1)}, "another program samples, so .*inject changes nothing"),
        ({"engine": "exact"}, r"rollout\.trajectories works with rollout\.engine = jax, vllm or sglang, not"),
        *(
            ({"trajectories": f"http{rest}"}, r"(trajectories|host) must be")
            for rest in ("s://127.0.0.1:80", "://127.0.0.1", "://8.8.8.8:80", "://name:80", "://127.0.0.1:80/a")
        ),
    ],
)
def test_settings_that_do_not_go_with_trajectories_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        check_engine(RolloutConfig(**{"trajectories": "rows"} | wrong))


def test_a_wrong_file_ends_the_run_before_it_is_used(place):
    write_file(place / "1.jsonl", [make_row("a", 1), make_row("a", 2)])
    bad = make_row("b", 2)
    del bad["logprobs"]
    write_file(place / "2.jsonl", [make_row("b", 1), bad])
    batches = make_batches(make_config(place))
    with pytest.raises(ConfigError, match=r"2\.jsonl: row 2: Object missing required field `logprobs`"):
        take(batches)
    assert batches.state_dict()["trajectories"]["begun"] == [["1.jsonl", []]]


def test_a_directory_and_likeliest_tokens_of_rows_are_needed(place):
    with pytest.raises(ValueError, match="is not a directory; make it before"):
        make_batches(make_config(place / "none"))
    write_file(place / "1.jsonl", [make_row("a", 0), make_row("a", 1)])
    with pytest.raises(ConfigError, match="lacks top_ids, which a run with 2 likeliest tokens needs"):
        take(make_batches(make_config(place, batch_size=1, top_logprobs=2), reported=2))
