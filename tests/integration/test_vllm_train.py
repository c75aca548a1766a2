"""``python -m rljax.train`` samples from a real vLLM server. Both sides have equal weights after every update."""

import contextlib
import signal

import pytest
from toy_runs import command, comparable, complete_beside, wait_for_rows
from toy_runs import start as start_run
from vllm_processes import LaunchedServer

from rljax.run.checkpoint import Checkpointer

pytestmark = pytest.mark.vllm
FLOAT32 = ["--rollout.dtype", "float32", "--precision.compute-dtype", "float32"]
QUICK = [*FLOAT32, "--optimizer.learning-rate", "2e-4", "--eval.every", "0"]


@pytest.fixture(scope="module")
def server(toy_base, vllm_interpreter, tmp_path_factory):
    """Starts the server as a launcher does. At the end nothing of it is left after the launcher's death."""
    directory = tmp_path_factory.mktemp("vllm-train")
    started = LaunchedServer(vllm_interpreter, directory, toy_base, "--dtype", "float32", "--max-model-len", "512")
    yield started
    started.kill_caller()
    assert started.wait_gone() == []
    assert len(started.processes) > 2


def over_http(server, toy_base, run_dir, *options):
    engine = ["--rollout.engine", "vllm", "--rollout.urls", server.url, "--data.batch-size", "8", *options]
    return command(toy_base, run_dir, *engine)


def rows_of(server, toy_base, run_dir, *options):
    """Returns the rows of a run that must end well."""
    code, output = complete_beside(server, over_http(server, toy_base, run_dir, *QUICK, *options))
    assert code == 0, output
    return comparable(run_dir)


def test_float32_engines_agree_after_updates_and_a_resume(server, toy_base, tmp_path):
    """Before, the run asks for another dtype, which is one line and exit code 2."""
    code, output = complete_beside(server, over_http(server, toy_base, tmp_path, "--rollout.dtype", "bfloat16"))
    line = f"error: {server.url}: the dtype is float32, expected bfloat16 (rollout.dtype)"
    assert (code, output.strip().splitlines()) == (2, [line])
    assert not (tmp_path / "metrics.jsonl").exists()
    for steps in ("2", "3"):
        rows = rows_of(server, toy_base, tmp_path, "--run.steps", steps)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 < row["mismatch/logprob_abs_diff_max"] < 1e-4
        assert row["rollout/policy_version"] == row["step"] - 1
        assert row["rollout/staleness"] == 0.0
        assert row["publish/verify_abs_diff_mean"] < row["publish/verify_band"]
        assert row["optimizer/grad_norm"] > 0
        # Each publish moved weights: in float32 a step at this rate changes nearly every element.
        assert row["publish/changed_fraction"] > 0.5


# Few responses run at a time, and a step is one micro-batch. It is compiled once, and may end while responses are under
# way.
KEPT = [
    *("--run.steps", "6", "--rollout.max-staleness", "1", "--rollout.update", "keep"),
    *("--diagnosis.behaviour-responses", "64", "--rollout.limits.max-outstanding", "8"),
    *("--packing.rows-per-micro-batch", "32"),
]
TURNS = ["--rollout.environment", "counting_environments:Doubling", "--rollout.episode.max-turns", "3"]


def check_turns(row):
    assert row["turns/max"] == 3
    later = sum(row[f"turns/turn_{name}/token_count"] for name in ("2", "3_to_4"))
    distances = ("1", "2_to_4", "5_to_16", "ge_17")
    assert later == sum(row.get(f"turns/after_{name}/token_count", 0) for name in distances)
    assert row["reward/errors"] == 0


def test_turns_of_a_trajectory_have_the_servers_logprobs(server, toy_base, tmp_path):
    (row,) = rows_of(server, toy_base, tmp_path, *TURNS, "--run.steps", "1")
    check_turns(row)
    assert 0 < row["mismatch/logprob_abs_diff_max"] < 1e-4
    assert row["rollout/staleness"] == 0


@pytest.mark.harness
def test_turns_go_on_while_new_weights_come(server, toy_base, tmp_path):
    rows = rows_of(server, toy_base, tmp_path, *TURNS, *KEPT)
    for row in rows:
        check_turns(row)
    for row in rows[1:]:
        assert row["mismatch_numerics/logprob_abs_diff_max"] < 1e-4 < row["mismatch_drift/logprob_abs_diff_max"]


@pytest.mark.harness
def test_groups_are_refilled_ahead_of_training(server, toy_base, tmp_path):
    options = ["--rollout.refill", "true", "--rollout.max-staleness", "1", "--rollout.update", "abort"]
    options += ["--rollout.group-size", "2", "--data.reward", "parity_reward:reward", "--checkpoint.every", "1"]
    for steps in ("3", "5"):
        rows = rows_of(server, toy_base, tmp_path, *options, "--run.steps", steps)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert sum(row["rollout/refilled_groups"] for row in rows) > 5
    for row in rows:
        sampled = 8 + row["rollout/refilled_groups"]
        tokens = row["mismatch/token_count"] + row["rollout/refilled_tokens"]
        assert row["response_length/mean"] == pytest.approx(tokens / (2 * sampled))
        assert 0 <= row["rollout/staleness"] <= 1
        numerics = "mismatch_numerics" if row["rollout/staleness"] else "mismatch"
        assert row[f"{numerics}/logprob_abs_diff_max"] < 1e-4


@pytest.mark.harness
def test_asked_to_stop_without_a_server_it_saves_the_last_step(server, toy_base, tmp_path):
    """SIGTERM may go to a whole process group. Then the server ends first, with all processes of its launcher.

    The test is the last one here, because it ends the server.
    """
    run_dir = tmp_path / "run"
    options = [*FLOAT32, "--run.steps", "400", "--eval.every", "0", "--checkpoint.every", "0"]
    process = start_run(over_http(server, toy_base, run_dir, *options))
    try:
        wait_for_rows(process, run_dir, 2)
        server.kill_caller()
        assert server.wait_gone() == []
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    done = len(comparable(run_dir))
    assert process.returncode == 128 + signal.SIGTERM, output
    assert f"stopped after step {done}, saved" in output
    with contextlib.closing(Checkpointer(run_dir / "checkpoints", read_only=True)) as checkpointer:
        assert checkpointer.all_steps() == [done]
        assert checkpointer.read_host(done)[0]["data"] == {"problems_drawn": 8 * done}
