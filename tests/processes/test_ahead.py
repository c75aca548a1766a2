"""Processes with a real vLLM server: their rows, and runs ahead that are stopped and killed, or lose their server."""

import dataclasses
import signal

import pytest
from kill_run import broken_accounts
from process_runs import FLOAT32, TINY, Run, assert_alike, complete_together, replay, without_publish
from toy_runs import comparable, tiny
from vllm_processes import kill_server

from rljax.errors import START_AGAIN_STATUS
from rljax.record.rows import read_rows
from rljax.rollout.servers.process import environment_python
from rljax.rollout.servers.vllm.server import VllmConfig, start

pytestmark = pytest.mark.processes
STEPS = 9
AHEAD = ("--rollout.max-staleness", "1")
TRAINING = (*FLOAT32, *TINY, "--rollout.dump-every", "1", "--optimizer.learning-rate", "2e-4")


@pytest.fixture(scope="module")
def servers(toy_base, tmp_path_factory):
    """Yields the list of servers, which all had one port. Only the last one runs, because the others were killed."""
    log = tmp_path_factory.mktemp("vllm") / "float32.log"
    python = str(environment_python("vllm"))
    started = [start(VllmConfig(str(toy_base), python, dtype="float32", max_model_len=512, log_path=log))]
    yield started
    started[-1].stop()


@pytest.fixture(scope="module")
def whole(toy_base, tmp_path_factory):
    """Returns the directory of a run without staleness and without a server, which shows the prompts of each step."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    complete_together(tiny(toy_base, run_dir, STEPS, *TRAINING), 1, run_dir.with_name("printed"))
    return run_dir


def words(toy_base, run_dir, servers, *options, steps=STEPS):
    engine = ("--rollout.engine", "vllm", "--rollout.urls", servers[-1].url)
    return tiny(toy_base, run_dir, steps, *TRAINING, *AHEAD, *engine, *options)


def assert_sound(run_dir, whole):
    """Checks that the run trained on each batch once, in order, and on no token more than one version old."""
    assert broken_accounts(run_dir, whole, 1) == []
    rows = read_rows(run_dir / "metrics.jsonl")
    assert all(row["publish/verified_tensors"] > 10 for row in rows)
    split = [row["mismatch_drift/logprob_abs_diff_max"] for row in rows if row["rollout/staleness"] > 0]
    assert len(split) > STEPS // 2
    assert max(split) > 1e-4


# The first tests have the rows of one process, given the server's answers to it.
@pytest.mark.parametrize("kind", ["directory", "http"])
def test_the_rows_are_those_of_one_process(kind, servers, toy_base, tmp_path):
    """Each process writes its shards, by deltas, over HTTP into a directory that no other process reads."""

    def own(index):
        return "--rollout.transfer-dir", tmp_path / ("weights" if kind == "directory" else f"weights_{index}")

    def of(run_dir):
        engine = ("--rollout.engine", "vllm", "--rollout.urls", servers[-1].url, "--publish.store", kind)
        return tiny(toy_base, run_dir, 4, *FLOAT32, *TINY, *engine, "--loss.mini-batches", "2")

    replay(tmp_path, {str(count): (count, of) for count in (1, 2, 4)}, own=own)
    assert len(list(tmp_path.glob("weights*"))) == (1 if kind == "directory" else 4)
    assert not list(tmp_path.glob("weights*/*")), "what was published is left"
    first = comparable(tmp_path / "1")
    for name in ("1", "2", "4"):
        rows = comparable(tmp_path / name)
        assert_alike(without_publish(tmp_path / "1"), without_publish(tmp_path / name))
        assert all(row["publish/verified_tensors"] > 10 for row in rows)
        assert not any("publish/mirrors_repaired" in row for row in rows)
        fractions = [[row["publish/changed_fraction"] for row in each] for each in (first, rows)]
        assert fractions[1] == pytest.approx(fractions[0], rel=1e-3)


def test_colocated_state_is_on_the_host_during_sampling(servers, toy_base, tmp_path):
    """The rows must equal those of a run whose state stays on the device. Each of two processes moves its shards."""
    shared = ("--rollout.colocated", "true")

    def of(run_dir, *options):
        engine = ("--rollout.engine", "vllm", "--rollout.urls", servers[-1].url)
        return tiny(toy_base, run_dir, 3, *FLOAT32, *TINY, *engine, *options)

    runs = {"stays": (1, of), "moves": (1, lambda run_dir: of(run_dir, *shared))}
    replay(tmp_path, runs | {"both_move": (2, lambda run_dir: of(run_dir, *shared, "--publish.store", "http"))})
    for name in ("stays", "moves", "both_move"):
        for row in read_rows(tmp_path / name / "metrics.jsonl"):
            assert (row.keys() >= {"time/offload_s", "time/reload_s", "time/sleep_s"}) == (name != "stays")
            assert row["publish/verified_tensors"] > 10
    stays = without_publish(tmp_path / "stays")
    assert_alike(stays, without_publish(tmp_path / "moves"), 5e-324)  # the smallest number above 0
    assert_alike(stays, without_publish(tmp_path / "both_move"))


def test_the_same_responses_give_the_same_rows(servers, toy_base, tmp_path):
    """The weights reach the server's machine from each process while the next batch is sampled."""

    def of(run_dir):
        return words(toy_base, run_dir, servers, "--publish.store", "http", steps=5)

    replay(tmp_path, {str(count): (count, of) for count in (1, 2)}, heartbeat_s=60)
    for name in ("1", "2"):
        rows = comparable(tmp_path / name)
        assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1, 1]
        assert all(row["publish/verified_tensors"] > 10 for row in rows)
        assert all(row["mismatch_numerics/logprob_abs_diff_max"] < 1e-4 for row in rows[1:])
    assert_alike(*(without_publish(tmp_path / name) for name in ("1", "2")))


@pytest.mark.parametrize("how", ["wait", "keep"])
def test_stopped_and_killed_each_batch_is_trained_on_once(how, servers, whole, toy_base, tmp_path):
    run_dir = tmp_path / "run"
    training = words(toy_base, run_dir, servers, "--rollout.update", how)
    with Run(training, 2, tmp_path / "stopped", heartbeat_s=30) as run:
        run.wait_for_rows(run_dir, 3)
        run.send(1, signal.SIGTERM)
        assert run.wait() == [128 + signal.SIGTERM] * 2, run.printed()
        assert f"stopped after step {len(comparable(run_dir))}, saved" in run.printed()[0]
    with Run(training, 2, tmp_path / "killed", heartbeat_s=10) as run:
        run.wait_for_rows(run_dir, 6)
        run.send(1)
        assert run.wait(but=[1]) == [START_AGAIN_STATUS], run.printed()
    complete_together(training, 2, tmp_path / "again", heartbeat_s=60)
    assert_sound(run_dir, whole)


def test_after_a_lost_server_the_batch_is_requested_again(servers, whole, toy_base, tmp_path):
    run_dir = tmp_path / "run"
    with Run(words(toy_base, run_dir, servers), 2, tmp_path / "printed", heartbeat_s=60) as run:
        run.wait_for_rows(run_dir, 3)
        lost = servers[-1]
        kill_server(lost)
        log = lost.log_path.with_name("restarted.log")
        servers.append(start(dataclasses.replace(lost.config, port=lost.port, log_path=log)))
        assert run.wait() == [0, 0], run.printed()
    assert_sound(run_dir, whole)
    rows = read_rows(run_dir / "metrics.jsonl")
    assert all(row["mismatch_numerics/logprob_abs_diff_max"] < 1e-4 for row in rows if row["rollout/staleness"] > 0)
    assert sum(row["rollout/server_losses"] for row in rows) == 1
    assert sum(row.get("rollout/servers_brought_back", 0) for row in rows) == 1
