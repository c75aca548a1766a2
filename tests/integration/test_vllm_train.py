"""``python -m rljax.train`` samples from a real vLLM server. Both sides have equal weights after every update."""

import pytest
from process_runs import FLOAT32
from toy_runs import command, comparable, complete_beside
from vllm_processes import LaunchedServer

pytestmark = pytest.mark.vllm
QUICK = [*FLOAT32, "--optimizer.learning-rate", "2e-4", "--eval.every", "0", "--packing.share-prefixes", "false"]


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


TURNS = ["--rollout.environment", "counting_environments:Doubling", "--rollout.episode.max-turns", "3"]


def test_turns_of_a_trajectory_have_the_servers_logprobs(server, toy_base, tmp_path):
    (row,) = rows_of(server, toy_base, tmp_path, *TURNS, "--run.steps", "1")
    assert row["turns/max"] == 3
    later = sum(row[f"turns/turn_{name}/token_count"] for name in ("2", "3_to_4"))
    distances = ("1", "2_to_4", "5_to_16", "ge_17")
    assert later == sum(row.get(f"turns/after_{name}/token_count", 0) for name in distances)
    assert row["reward/errors"] == 0
    assert 0 < row["mismatch/logprob_abs_diff_max"] < 1e-4
    assert row["rollout/staleness"] == 0
