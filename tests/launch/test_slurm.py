"""Whole runs as jobs of a real Slurm must have the rows of one process, whatever ends the job on the way."""

import os
import time
from pathlib import Path

import pytest
from process_runs import FLOAT32, TINY, assert_alike, complete_together
from slurm_jobs import Cluster, of_jobs, slurm
from toy_runs import comparable, tiny
from vllm_processes import members

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
STEPS = 10
SLOWLY = {"TEST_REWARD_S": "0.06"}  # seconds for each of 16 responses: one second a step


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm") / "s") as started:
        yield started


@pytest.fixture(autouse=True)
def no_job_is_left(cluster):
    yield
    slurm("scancel", f"--user={os.environ.get('USER') or os.getuid()}")
    deadline = time.monotonic() + 60
    while slurm("squeue", "--noheader") or of_jobs():
        assert time.monotonic() < deadline, f"{slurm('squeue')} {of_jobs()}"
        time.sleep(0.2)


def words(base, run_dir, *options):
    reward = ("--data.reward", "slow_reward:reward")
    return tiny(base, run_dir, STEPS, *FLOAT32, *TINY, *reward, *options)


@pytest.fixture(scope="module")
def alone(toy_base, tmp_path_factory):
    """Returns the rows of one process on four devices."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    complete_together(words(toy_base, run_dir), 1, run_dir.with_name("printed"))
    rows = comparable(run_dir)
    assert sum(row["optimizer/grad_norm"] > 0 for row in rows) > STEPS / 2
    return rows


@pytest.fixture
def submit(cluster, toy_base, tmp_path):
    """Returns a function that submits a run of ``STEPS`` steps in ``tmp_path / "run"`` on two nodes."""

    def job(*options, sbatch=(), **settings):
        config, *others = words(toy_base, tmp_path / "run", *options)
        return cluster.submit(tmp_path / "log", config, sbatch=sbatch, words=others, **settings)

    return job


def assert_done(job, run_dir, alone, *, restarts):
    assert job.wait() == "COMPLETED", job.printed()
    assert job.restarts == restarts, job.printed()
    assert_alike(comparable(run_dir), alone)


def test_two_nodes_give_the_rows_of_one_process(submit, alone, tmp_path):
    job = submit()
    assert_done(job, tmp_path / "run", alone, restarts=0)
    assert "2 nodes train, 0 serve" in job.printed()
    assert f"0: step {STEPS}/{STEPS}" in job.printed()
    assert "\n1: step" not in job.printed()
    assert (tmp_path / "run/logs/process_1.log").exists()


@pytest.mark.parametrize("to", ["steps", "script"])
def test_sigterm_ends_the_job_saved_and_queued_again(to, submit, alone, tmp_path):
    job = submit("--checkpoint.every", "0", **SLOWLY)
    job.wait_for_rows(tmp_path / "run", 3)
    whom = {"steps": [], "script": ["--batch"]}[to]
    slurm("scancel", "--signal=TERM", *whom, job.number)
    job.wait_until(lambda: job.restarts == 1, timeout=180)
    done = len(comparable(tmp_path / "run"))
    assert f"stopped after step {done}, saved" in job.printed()
    assert "status 143, queued again" in job.printed()
    assert_done(job, tmp_path / "run", alone, restarts=1)


def test_the_time_limit_ends_no_run(submit, alone, tmp_path):
    """Slurm looks at time limits every 30 s, so the signal comes 50 to 80 s after the start."""
    long = {"TEST_REWARD_S": "0.45"}  # 7 s a step
    job = submit("--checkpoint.every", "0", sbatch=["--time=3", "--signal=B:TERM@100"], **long)
    assert job.wait(timeout=900) == "COMPLETED", job.printed()
    assert "the trainers are sent SIGTERM" in job.printed()
    assert_done(job, tmp_path / "run", alone, restarts=job.restarts)
    assert job.restarts >= 1


def test_a_job_that_another_takes_the_nodes_of_goes_on_after_it(submit, alone, tmp_path):
    job = submit("--checkpoint.every", "0", **SLOWLY)
    job.wait_for_rows(tmp_path / "run", 3)
    options = ["--partition=urgent", "--nodes=3", "--exclusive", f"--output={tmp_path / 'urgent'}", "--wrap=sleep 5"]
    slurm("sbatch", *options)
    job.wait_until(lambda: job.restarts == 1, timeout=180)
    assert f"stopped after step {len(comparable(tmp_path / 'run'))}, saved" in job.printed()
    assert_done(job, tmp_path / "run", alone, restarts=1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_trainer_ends_the_others_and_the_job_requeues(victim, submit, alone, tmp_path):
    job = submit(**SLOWLY)
    job.wait_for_rows(tmp_path / "run", 5)
    job.kill(victim)
    job.wait_until(lambda: job.restarts == 1, timeout=180)
    assert "queued again" in job.printed()
    assert_done(job, tmp_path / "run", alone, restarts=1)


def test_a_job_that_is_cancelled_is_saved_and_not_queued_again(submit, tmp_path):
    job = submit("--checkpoint.every", "0", **SLOWLY)
    job.wait_for_rows(tmp_path / "run", 3)
    slurm("scancel", job.number)
    assert job.wait(timeout=180) == "CANCELLED"
    job.wait_until(lambda: "the trainers ended with status 143" in job.printed(), timeout=120)
    assert f"stopped after step {len(comparable(tmp_path / 'run'))}, saved" in job.printed()
    assert "queued again" not in job.printed()
    assert job.restarts == 0


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--optimizer.learning-rate", "fast"), 2, "error: "),  # found before a step of the job starts
        (("--mesh.fsdp", "2"), 2, "0: error: a mesh of replica=1, fsdp=2, tp=1 leaves processes without a part"),
        (("--guard.stop", "response_length/mean > 0"), 3, "0: guard: "),
    ],
)
def test_what_would_come_again_is_not_queued_again(options, status, message, submit):
    job = submit(*options)
    assert job.wait() == "FAILED", job.printed()
    assert (job.status, job.restarts) == (status, 0), job.printed()
    assert message in job.printed()


def test_a_job_that_ends_three_times_without_a_step_is_given_up(submit, tmp_path):
    job = submit("--checkpoint.every", "0", TEST_REWARD_S="5")
    for restart in range(3):
        job.wait_until(lambda restart=restart: job.printed().count("training ") == restart + 1)
        slurm("scancel", "--signal=TERM", job.number)
        job.wait_until(lambda restart=restart: job.printed().count("ended with status 143") == restart + 1, timeout=180)
    assert job.wait() == "FAILED", job.printed()
    assert (job.status, job.restarts) == (143, 2), job.printed()
    assert "ended three times after 0 steps; not queued again" in job.printed()


def test_two_nodes_train_from_two_vllm_servers_on_a_third(cluster, vllm_interpreter, toy_base, tmp_path):
    run_dir, servers = tmp_path / "run", tmp_path / "run-servers"
    rate = ("--optimizer.learning-rate", "2e-4", "--rollout.engine", "vllm", "--checkpoint.every", "0")
    config, *others = words(toy_base, run_dir, *rate)
    settings = {"RLJAX_VLLM_VENV": str(Path(vllm_interpreter).parents[1]), **SLOWLY}
    job = cluster.submit(tmp_path / "log", config, sbatch=["--nodes=3"], words=others, **settings)
    job.wait_for_rows(run_dir, 3, timeout=600)
    guards = job.processes("rljax.rollout.servers.process")
    assert sorted(guards) == [0, 1]
    urls = [(servers / f"{task}.url").read_text().strip() for task in guards]
    assert all(url.startswith("http://127.0.0.3:") for url in urls)
    assert len(set(urls)) == 2
    slurm("scancel", "--signal=TERM", job.number)
    job.wait_until(lambda: job.restarts == 1, timeout=180)
    done = len(comparable(run_dir))
    assert f"stopped after step {done}, saved" in job.printed()
    assert 0 < done < STEPS
    assert job.wait(timeout=600) == "COMPLETED", job.printed()
    assert "2 nodes train, 1 serve" in job.printed()
    rows = comparable(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert 0 < row["mismatch/logprob_abs_diff_max"] < 1e-4
        assert row["rollout/policy_version"] == row["step"] - 1
        assert row["publish/verify_abs_diff_mean"] < row["publish/verify_band"]
    assert (servers / "api_key").stat().st_mode & 0o077 == 0
    assert list((servers / "weights").iterdir()) == []
    assert [members(group) for group in guards.values()] == [{}, {}]
