"""A real Slurm on this machine (tools/start_slurm.sh), and jobs of launch/slurm.sbatch that run on it."""

import os
import re
import signal
import subprocess
import sys

import psutil
from toy_runs import ROOT, environment
from waiting import has_rows, until

DEVICES_A_NODE = 2
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


class Cluster:
    """A cluster with three nodes of two simulated devices; a context manager that ends all of its processes."""

    def __init__(self, directory):
        """Keeps the directory for configuration, logs and sockets, which must not exist yet."""
        self.directory = directory
        os.environ["SLURM_CONF"] = str(directory / "slurm.conf")

    def __enter__(self):
        subprocess.run(["bash", ROOT / "tools/start_slurm.sh", self.directory, "3"], check=True, timeout=120)
        return self

    def __exit__(self, *exception):
        subprocess.run(["bash", ROOT / "tools/stop_slurm.sh", self.directory], check=True, timeout=180)
        del os.environ["SLURM_CONF"]

    def submit(self, log, config, *options, sbatch=(), words=(), **settings):
        """Submits launch/slurm.sbatch on two nodes.

        Args:
          log: The file for the output of the job.
          config: The path of the configuration.
          options: The options of launch/slurm.sbatch.
          sbatch: The options of sbatch.
          words: The options of rljax.train.
          settings: The environment variables of the job.
        """
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES_A_NODE}"
        env = environment(
            PYTHONPATH=f"{ROOT}:{ROOT / 'tests/support'}", XLA_FLAGS=flags, RLJAX_VENV=sys.prefix, **settings
        )
        small = ["--nodes=2", "--gpus-per-node=2", "--mem=4000", "--time=15", "--signal=B:TERM@60"]
        job = ["launch/slurm.sbatch", config, *options, "--", *words]
        line = ["sbatch", "--parsable", *small, f"--output={log}", *sbatch, *map(str, job)]
        done = subprocess.run(line, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return Job(done.stdout.strip(), log)


def slurm(*words):
    """Runs a command of Slurm and returns its output."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Job:
    """A job and its output."""

    def __init__(self, number, log):
        """Keeps the job's number and the path of its output."""
        self.number, self._log = number, log

    def printed(self):
        """Returns the output of all starts of the job so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else "nothing"

    def _of(self, key):
        return re.search(rf"\b{key}=(\S+)", slurm("scontrol", "--oneliner", "show", "job", self.number))[1]

    @property
    def state(self):
        """The job's state, by Slurm's name."""
        return self._of("JobState")

    @property
    def restarts(self):
        """The number of times that Slurm queued the job again."""
        return int(self._of("Restarts"))

    @property
    def status(self):
        """The exit status of the batch script at its last start."""
        return int(self._of("ExitCode").partition(":")[0])

    def wait_until(self, done, timeout=300):
        """Returns when ``done()`` holds; the test fails after ``timeout`` seconds, or once the job has ended."""

        def said():
            return f"{self.state}: {self.printed()}"

        until(done, timeout, said=said, may_come=lambda: self.state not in _ENDED, every_s=0.2)

    def wait(self, timeout=300):
        """Waits for the end of the job and returns its last state."""
        self.wait_until(lambda: self.state in _ENDED, timeout)
        return self.state

    def wait_for_rows(self, run_dir, count, timeout=300):
        """Returns when the run has recorded ``count`` steps."""
        self.wait_until(lambda: has_rows(run_dir, count), timeout)

    def processes(self, program):
        """Returns the process id by SLURM_PROCID for each Python process of this job that runs ``program``."""
        found = {}
        for one in of_jobs():
            command, settings = one.info["cmdline"] or [""], one.info["environ"]
            of_job = settings["SLURM_JOB_ID"] == self.number and "SLURM_PROCID" in settings
            if of_job and program in command and "python" in command[0]:
                found[int(settings["SLURM_PROCID"])] = one.pid
        return found

    def kill(self, process):
        """Ends one of the trainers with SIGKILL, as the kernel does when memory is short."""
        os.kill(self.processes("rljax.train")[process], signal.SIGKILL)


def of_jobs():
    """Returns all processes that run in a job's step or script."""
    processes = psutil.process_iter(["cmdline", "environ"])
    return [one for one in processes if "SLURM_JOB_ID" in (one.info["environ"] or ())]
