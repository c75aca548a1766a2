"""Runs of several real processes on one machine, with four simulated devices in total; they are ended by their ids."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from toy_runs import ROOT, TIMEOUT, comparable, environment
from waiting import free_port, has_rows, until

DEVICES = 4
FLOAT32 = ("--rollout.dtype", "float32", "--precision.compute-dtype", "float32")
# Rows for four devices, and a reward with which every step has a gradient.
TINY = ("--packing.rows-per-micro-batch", "4", "--data.batch-size", "4", "--data.reward", "parity_reward:reward")


class Group:
    """Processes that share the simulated devices; a context manager that ends them all."""

    def __init__(self, output, commands, **settings):
        """Starts the commands with these environment variables; process i prints to ``output``.i."""
        self.output, self.processes = output, []
        share = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES // len(commands)}"
        pipes = [subprocess.PIPE] + [subprocess.DEVNULL] * (len(commands) - 1)
        for index, (words, given) in enumerate(zip(commands, pipes, strict=True)):
            with open(f"{output}.{index}", "wb") as file:
                own = {"env": environment(XLA_FLAGS=share, **settings), "stdin": given, "stdout": file, "stderr": file}
                self.processes.append(subprocess.Popen([*map(str, words)], cwd=ROOT, text=True, **own))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes:
            process.kill()
            process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.processes[0].stdin.close()

    def printed(self):
        paths = [Path(f"{self.output}.{index}") for index in range(len(self.processes))]
        return [path.read_text(errors="replace") for path in paths]


class Run(Group):
    def __init__(self, words, count, output, heartbeat_s=10, inside=(), own=lambda index: (), **settings):
        """Starts the processes. The output of process i goes to the path ``output``.i.

        ``heartbeat_s`` is the longest time from the last sign of life of a process to the end of the others. ``inside``
        comes before each command, and ``own(i)`` has more words of process i. ``settings`` has environment variables,
        and ``path``, which is added to PYTHONPATH.
        """
        path = f"{ROOT}:{ROOT / 'tests/support'}:{settings.pop('path', '')}"
        program = [*inside, sys.executable, ROOT / "tests/support/timed_train.py", heartbeat_s]
        address, commands = f"127.0.0.1:{free_port()}", []
        for index in range(count):
            place = ["--run.process-id", index, "--run.coordinator", address] if count > 1 else []
            commands.append([*program, *words, *own(index), "--run.processes", count, *place])
        super().__init__(output, commands, PYTHONPATH=path, **settings)

    def wait(self, timeout=TIMEOUT, but=()):
        """Returns the exit statuses of all processes except ``but``, within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        wanted = [process for index, process in enumerate(self.processes) if index not in but]
        return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in wanted]

    def wait_for_rows(self, run_dir, count):
        def all_run():
            return all(process.poll() is None for process in self.processes)

        until(lambda: has_rows(run_dir, count), TIMEOUT, said=self.printed, may_come=all_run)

    def send(self, index, number=signal.SIGKILL):
        self.processes[index].send_signal(number)


def complete_together(words, count, output, **settings):
    """Trains to the end; the test fails unless every process exits with status 0."""
    with Run(words, count, output, **settings) as run:
        statuses = run.wait()
        assert statuses == [0] * count, run.printed()


# In float32 the mismatch is rounding error, so a ratio of two of its parts says nothing.
OF_ROUNDING = ("mismatch_sign/", "mismatch/slope_per_1k", "mismatch/sum_")


def largest_differences(rows, others):
    """Returns the largest difference of each metric between the rows of two float32 runs; {} if they are equal.

    The difference is absolute for the mismatch, also by turn, and relative for perplexities and all other metrics.
    """
    assert len(rows) == len(others)
    found = {}
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys(), row.keys() ^ other.keys()
        for key, value in row.items():
            if value != other[key] and not key.startswith(OF_ROUNDING):
                is_gap = key.startswith(("mismatch", "turns")) and not key.endswith("_ppl")
                size = 1.0 if is_gap else max(abs(value), abs(other[key]))
                found[key] = max(found.get(key, 0.0), abs(value - other[key]) / size)
    return found


def assert_alike(rows, others, bound=1e-5):
    differences = largest_differences(rows, others)
    print(f"largest difference: {max(differences.values(), default=0.0):.1e}")
    assert max(differences.values(), default=0.0) < bound, differences


SITE = """
import sys
if any(word.endswith("timed_train.py") for word in sys.orig_argv):
    import replayed_vllm
    replayed_vllm.install()
"""


def replay(directory, runs, **options):
    """Trains several runs on a real server; all take the answers that the server gave to the first one.

    ``runs`` has the number of processes of each run by its name, and a function of its folder in the empty
    ``directory`` that returns its words. ``options`` are those of ``Run``.
    """
    (directory / "sitecustomize.py").write_text(SITE)
    (directory / "answers").mkdir()
    mode = "RLJAX_RECORD"
    for name, (count, words_of) in runs.items():
        more = {mode: str(directory / "answers"), "path": directory, "heartbeat_s": 30, **options}
        complete_together(words_of(directory / name), count, directory / f"printed_{name}", **more)
        mode = "RLJAX_REPLAY"


def without_publish(run_dir):
    """Returns the rows without publishes and counts of requests: the server's probes are sampled anew in each run."""
    anew = ("publish/", "rollout/re")  # requests, retries
    return [{key: value for key, value in row.items() if not key.startswith(anew)} for row in comparable(run_dir)]
