"""Runs of several real processes on one machine, four simulated devices in all, that are ended by their ids."""

import os
import signal
import subprocess
import sys
import time

from ports import free_port
from toy_runs import ROOT, TIMEOUT, comparable, environment

DEVICES = 4
FLOAT32 = ("--rollout.dtype", "float32", "--precision.compute-dtype", "float32")
# Rows for four devices, and a reward that gives every step a gradient.
TINY = ("--packing.rows-per-micro-batch", "4", "--data.batch-size", "4", "--data.reward", "parity_reward:reward")


class Run:
    """``python -m rljax.train`` as ``count`` processes; a context manager that leaves none of them."""

    def __init__(self, words, count, output, heartbeat_s=10, inside=(), own=lambda index: (), **settings):
        """What process i prints goes to ``output``.i, a path.

        ``inside``: words before each command; ``own``: those of process i after it; ``path``: more of PYTHONPATH; other
        settings: environment variables.
        """
        self.count, self.output = count, output
        share = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES // count}"
        path = f"{ROOT}:{ROOT / 'tests/support'}:{settings.pop('path', '')}"
        common = ["--run.heartbeat-s", str(heartbeat_s), "--run.processes", str(count)]
        address = f"127.0.0.1:{free_port()}"
        self.processes = []
        for index in range(count):
            place = ["--run.process-id", str(index), "--run.coordinator", address] if count > 1 else []
            each = [*words, *own(index)]
            with open(f"{output}.{index}", "wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        [
                            *inside,
                            sys.executable,
                            "-m",
                            "rljax.train",
                            *map(str, each),
                            *common,
                            *place,
                        ],
                        env=environment(XLA_FLAGS=share, PYTHONPATH=path, **settings),
                        cwd=ROOT,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes:
            process.kill()
            process.wait()

    def wait(self, timeout=TIMEOUT, but=()):
        """Exit statuses of the processes ``but`` for some, within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        wanted = [process for index, process in enumerate(self.processes) if index not in but]
        return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in wanted]

    def wait_for_rows(self, run_dir, count):
        """Returns when so many steps are recorded."""
        deadline, path = time.monotonic() + TIMEOUT, run_dir / "metrics.jsonl"
        while not path.exists() or len(path.read_text().splitlines()) < count:
            ended = [process.poll() for process in self.processes]
            assert ended == [None] * self.count, f"statuses {ended}: {self.printed()}"
            assert time.monotonic() < deadline, f"no {count} rows within {TIMEOUT} s: {self.printed()}"
            time.sleep(0.05)

    def send(self, index, number=signal.SIGKILL):
        """Sends a signal to one process."""
        self.processes[index].send_signal(number)

    def printed(self):
        """What each process printed."""
        outputs = []
        for index in range(self.count):
            with open(f"{self.output}.{index}", errors="replace") as file:
                outputs.append(file.read())
        return outputs


def complete_together(words, count, output, **settings):
    """Trains to the end; the test fails unless every process ends with status 0."""
    with Run(words, count, output, **settings) as run:
        statuses = run.wait()
        assert statuses == [0] * count, run.printed()


# In float32 the mismatch is rounding, so that what divides one part of it by another says nothing.
OF_ROUNDING = ("mismatch_sign/", "mismatch/slope_per_1k", "mismatch/sum_")


def largest_differences(rows, others):
    """Metric -> largest difference between two lists of rows of float32 runs; {} when they are equal.

    Relative, but for the mismatch, also by turn, where it is absolute.
    """
    assert len(rows) == len(others)
    found = {}
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys(), row.keys() ^ other.keys()
        for key, value in row.items():
            if value != other[key] and not key.startswith(OF_ROUNDING):
                size = 1.0 if key.startswith(("mismatch", "turns")) else max(abs(value), abs(other[key]))
                found[key] = max(found.get(key, 0.0), abs(value - other[key]) / size)
    return found


SITE = "import sys\nif 'rljax.train' in sys.orig_argv:\n    import replayed_vllm\n    replayed_vllm.install()\n"


def assert_two_processes_do_as_one(words_of, directory):
    """Trains on one process and on two: equal counts of what was sampled, and all else within rounding.

    Args:
      words_of: A function of a run directory that returns the words of the run, in float32.
      directory: The directory of both runs, ``run_1`` and ``run_2``.
    """
    for count in (1, 2):
        complete_together(words_of(directory / f"run_{count}"), count, directory / f"printed_{count}")
    rows = [comparable(directory / f"run_{count}") for count in (1, 2)]
    sampled = ("rollout/", "reward/", "response_length/", "mismatch/token_count")
    counts = [[{k: v for k, v in row.items() if k.startswith(sampled)} for row in each] for each in rows]
    assert counts[0] == counts[1]
    differences = largest_differences(*rows)
    assert max(differences.values(), default=0.0) < 1e-4, differences


def without_publish(run_dir):
    """The server's probes are sampled anew in each run, and what is not sampled is not counted."""
    anew = ("publish/", "rollout/re")  # requests, retries, responses_without_version
    return [{key: value for key, value in row.items() if not key.startswith(anew)} for row in comparable(run_dir)]
