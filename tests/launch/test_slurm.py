"""Whole runs as jobs of a real Slurm (tools/start_slurm.sh) have the rows of one process, whatever ends the job."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from process_runs import FLOAT32, TINY, assert_alike, complete_together
from toy_runs import ROOT, comparable, environment, tiny
from vllm_processes import members
from waiting import has_rows, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
STEPS = 10
DEVICES_A_NODE = 2
NO_CHECKPOINT = ("--checkpoint.every", "0")
SLOWLY = {"TEST_REWARD_S": "0.06"}  # seconds for each of 16 responses: one second a step
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


def slurm(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_jobs():
    processes = psutil.process_iter(["cmdline", "environ"])
    return [one for one in processes if "SLURM_JOB_ID" in (one.info["environ"] or ())]


class Job:
    """A job of launch/slurm.sbatch on two nodes: its number, the path of its output, and its run's directory."""

    def __init__(self, place, words, sbatch=(), **settings):
        """Submits the job with these options of sbatch and environment variables; it starts in ``place``."""
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES_A_NODE}"
        path = f"{ROOT}:{ROOT / 'tests/support'}"
        env = environment(PYTHONPATH=path, XLA_FLAGS=flags, RLJAX_VENV=sys.prefix, **settings)
        small = ["--nodes=2", "--gpus-per-node=2", "--mem=4000", "--time=15", "--signal=B:TERM@60"]
        self.log, self.run_dir, (config, *words) = place / "log", place / "run", words
        line = ["sbatch", "--parsable", *small, f"--output={self.log}", *sbatch, "launch/slurm.sbatch", config, "--"]
        done = subprocess.run([*line, *words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    def printed(self):
        return self.log.read_text(errors="replace") if self.log.exists() else "nothing"

    def fact(self, key):
        return re.search(rf"\b{key}=(\S+)", slurm("scontrol", "--oneliner", "show", "job", self.number))[1]

    @property
    def ends(self):
        """The state, the exit status of the batch script at its last start, and how often the job was queued again."""
        return self.fact("JobState"), int(self.fact("ExitCode").partition(":")[0]), int(self.fact("Restarts"))

    def wait_until(self, done, timeout=300):
        """Returns when ``done()`` holds; the test fails after ``timeout`` seconds, or once the job has ended."""

        def goes_on():
            return self.fact("JobState") not in ENDED

        until(done, timeout, said=lambda: f"{self.ends}: {self.printed()}", may_come=goes_on, every_s=0.2)

    def wait(self, timeout=300):
        self.wait_until(lambda: self.fact("JobState") in ENDED, timeout)
        return self.ends

    def wait_for_rows(self, count, timeout=300):
        self.wait_until(lambda: has_rows(self.run_dir, count), timeout)

    def wait_for_restart(self):
        self.wait_until(lambda: int(self.fact("Restarts")) == 1, timeout=180)

    def check_saved(self):
        """Checks that the run stopped after the steps that it has recorded; returns their number."""
        done = len(comparable(self.run_dir))
        assert f"stopped after step {done}, saved" in self.printed()
        return done

    def processes(self, program):
        """Returns the process id by SLURM_PROCID for each Python process of this job that runs ``program``."""
        found = {}
        for one in of_jobs():
            command, settings = one.info["cmdline"] or [""], one.info["environ"]
            of_job = settings["SLURM_JOB_ID"] == self.number and "SLURM_PROCID" in settings
            if of_job and program in command and "python" in command[0]:
                found[int(settings["SLURM_PROCID"])] = one.pid
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Starts three nodes of two simulated devices, and ends all of their processes."""
    directory = tmp_path_factory.mktemp("slurm") / "s"  # for configuration, logs and sockets
    os.environ["SLURM_CONF"] = str(directory / "slurm.conf")
    subprocess.run(["bash", ROOT / "tools/start_slurm.sh", directory, "3"], check=True, timeout=120)
    yield
    subprocess.run(["bash", ROOT / "tools/stop_slurm.sh", directory], check=True, timeout=180)
    del os.environ["SLURM_CONF"]


@pytest.fixture(autouse=True)
def no_job_is_left(cluster):
    yield
    slurm("scancel", f"--user={os.environ.get('USER') or os.getuid()}")
    until(lambda: not slurm("squeue", "--noheader") and not of_jobs(), 60, said=lambda: slurm("squeue"), every_s=0.2)


def words(base, run_dir, *options):
    return tiny(base, run_dir, STEPS, *FLOAT32, *TINY, *options)


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
    def job(*options, sbatch=(), **settings):
        return Job(tmp_path, words(toy_base, tmp_path / "run", *options), sbatch, **settings)

    return job


def assert_done(job, alone, *, restarts):
    assert job.wait() == ("COMPLETED", 0, restarts), job.printed()
    assert_alike(comparable(job.run_dir), alone)


def test_two_nodes_give_the_rows_of_one_process(submit, alone):
    job = submit()
    assert_done(job, alone, restarts=0)
    assert "2 nodes train, 0 serve" in job.printed()
    assert f"0: step {STEPS}/{STEPS}" in job.printed()
    assert "\n1: step" not in job.printed()
    assert (job.run_dir / "logs/process_1.log").exists()


@pytest.mark.parametrize("to", ["steps", "script"])
def test_sigterm_ends_the_job_saved_and_queued_again(to, submit, alone):
    job = submit(*NO_CHECKPOINT, **SLOWLY)
    job.wait_for_rows(3)
    slurm("scancel", "--signal=TERM", *{"steps": [], "script": ["--batch"]}[to], job.number)
    job.wait_for_restart()
    job.check_saved()
    assert "status 143, queued again" in job.printed()
    assert_done(job, alone, restarts=1)


def test_the_time_limit_ends_no_run(submit, alone):
    """Slurm looks at time limits every 30 s, so the signal comes 50 to 80 s after the start. A step takes 7 s."""
    job = submit(*NO_CHECKPOINT, sbatch=["--time=3", "--signal=B:TERM@100"], TEST_REWARD_S="0.45")
    *_, restarts = job.wait(timeout=900)
    assert "the trainers are sent SIGTERM" in job.printed()
    assert restarts >= 1
    assert_done(job, alone, restarts=restarts)


def test_a_job_that_another_takes_the_nodes_of_goes_on_after_it(submit, alone, tmp_path):
    job = submit(*NO_CHECKPOINT, **SLOWLY)
    job.wait_for_rows(3)
    options = ["--partition=urgent", "--nodes=3", "--exclusive", f"--output={tmp_path / 'urgent'}", "--wrap=sleep 5"]
    slurm("sbatch", *options)
    job.wait_for_restart()
    job.check_saved()
    assert_done(job, alone, restarts=1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_trainer_ends_the_others_and_the_job_requeues(victim, submit, alone):
    job = submit(**SLOWLY)
    job.wait_for_rows(5)
    os.kill(job.processes("rljax.train")[victim], signal.SIGKILL)
    job.wait_for_restart()
    assert "queued again" in job.printed()
    assert_done(job, alone, restarts=1)


def test_a_job_that_is_cancelled_is_saved_and_not_queued_again(submit):
    job = submit(*NO_CHECKPOINT, **SLOWLY)
    job.wait_for_rows(3)
    slurm("scancel", job.number)
    state, _, restarts = job.wait(timeout=180)
    job.wait_until(lambda: "the trainers ended with status 143" in job.printed(), timeout=120)
    job.check_saved()
    assert "queued again" not in job.printed()
    assert (state, restarts) == ("CANCELLED", 0)


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
    assert job.wait() == ("FAILED", status, 0), job.printed()
    assert message in job.printed()


def test_a_job_that_ends_three_times_without_a_step_is_given_up(submit):
    job = submit(*NO_CHECKPOINT, TEST_REWARD_S="5")
    for restart in range(3):
        job.wait_until(lambda restart=restart: job.printed().count("training ") == restart + 1)
        slurm("scancel", "--signal=TERM", job.number)
        job.wait_until(lambda restart=restart: job.printed().count("ended with status 143") == restart + 1, timeout=180)
    assert job.wait() == ("FAILED", 143, 2), job.printed()
    assert "ended three times after 0 steps; not queued again" in job.printed()


def test_two_nodes_train_from_two_vllm_servers_on_a_third(submit, vllm_interpreter, tmp_path):
    servers, venv = tmp_path / "run-servers", str(Path(vllm_interpreter).parents[1])
    rate = ("--optimizer.learning-rate", "2e-4", "--rollout.engine", "vllm")
    job = submit(*rate, *NO_CHECKPOINT, sbatch=["--nodes=3"], RLJAX_VLLM_VENV=venv, **SLOWLY)
    job.wait_for_rows(3, timeout=600)
    guards = job.processes("rljax.rollout.servers.process")
    assert sorted(guards) == [0, 1]
    urls = {(servers / f"{task}.url").read_text().strip() for task in guards}
    assert len(urls) == 2
    assert all(url.startswith("http://127.0.0.3:") for url in urls)
    slurm("scancel", "--signal=TERM", job.number)
    job.wait_for_restart()
    assert 0 < job.check_saved() < STEPS
    assert job.wait(timeout=600)[0] == "COMPLETED", job.printed()
    assert "2 nodes train, 1 serve" in job.printed()
    rows = comparable(job.run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert 0 < row["mismatch/logprob_abs_diff_max"] < 1e-4
        assert row["rollout/policy_version"] == row["step"] - 1
        assert row["publish/verify_abs_diff_mean"] < row["publish/verify_band"]
    assert (servers / "api_key").stat().st_mode & 0o077 == 0
    assert list((servers / "weights").iterdir()) == []
    assert [members(group) for group in guards.values()] == [{}, {}]
