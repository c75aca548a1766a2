"""Kills vLLM servers of a small training run at random moments, restarts them, and checks that no rollout is lost.

    python tests/harness/kill_servers.py --kills 20 --json benchmarks/kill_servers.json
    python tests/harness/kill_servers.py --kills 6 --lists 12 --json benchmarks/kill_listed_servers.json

A run of configs/toy-base trains in float32 on two vLLM servers that this program starts. A server is killed with
SIGKILL at a random moment of a step. Every other kill is in the rollout, and one in four kills both servers. A killed
server is restarted on the same port. Meanwhile the run trains the next step, with the other server or as soon as one is
back, and brings the restarted server back in an extra step, so that each kill hits a server in use.

With ``--lists`` there are three servers, and the run finds them in a file (``rollout.discovery``). From a random moment
on, the file lists other servers, so servers leave while they sample, and join. Kills and lists take turns at random. A
list counts when the run has seen it twice; the run looks every second.

At the end the run must be complete, and each step's dump must have all rollouts. The engine must have returned each
rollout exactly once, under the newest version and with the trainer's log-probabilities. Otherwise the exit status is 1.
The printed phases are those of the random moment, because a server is gone within a quarter of a second after it.
"""

import contextlib
import functools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro
from kill_run import FLOAT32, LONGEST_S, PHASES, ROOT, Runs, report

from rljax.errors import run_cli
from rljax.record.rows import read_rows
from rljax.record.token_dumps import read_dump
from rljax.rollout.engine import Samples
from rljax.rollout.servers.process import ServerProcess, environment_python
from rljax.rollout.servers.vllm.server import VllmConfig
from rljax.run.sampling import step_seed

FIRST_STEPS = 3  # the steps before the first kill; they compile, and they show how long a step takes
LAST_STEPS = 2  # the steps after the last kill
STEPS_A_KILL = 3  # the step of the kill, a step with one server less, and a step that brings the server back
BOTH = 0.25  # the share of kills that hit two servers at once
LARGEST_GAP = 1e-4  # the limit of |engine - trainer| (nats) for two float32 engines with equal weights
PROMPTS, GROUP = 8, 32
SETTINGS = (
    *("--data.batch-size", str(PROMPTS), "--rollout.group-size", str(GROUP), "--rollout.max-response-tokens", "36"),
    *("--rollout.dump-every", "1", "--eval.every", "0", "--checkpoint.every", "10"),
)
COUNTED = ("requests", "retries", "server_losses", "servers_brought_back", "servers_joined", "servers_left")


@dataclass(frozen=True)
class Arguments:
    kills: int = 20  # The number of kills in total. Each takes as long as the start of a server.
    lists: int = 0  # The number of changes of the list in total. With 0 the run gets two servers at its start.
    seed: int = 0  # The seed of the run and of the moments.
    json: Path | None = None  # The file for the result.


def served_by(*found_by):
    """Returns the options of a run that samples from servers of :func:`server_config`, which ``found_by`` names."""
    return "--rollout.engine", "vllm", *found_by, *FLOAT32


def server_config(log_path, port=0):
    """Returns the configuration of a vLLM server of configs/toy-base in float32: rounding hardly ever decides."""
    model, python = str(ROOT / "configs/toy-base"), str(environment_python("vllm"))
    return VllmConfig(model, python, "float32", port=port, max_model_len=512, max_num_seqs=64, log_path=log_path)


class Servers:
    """A group of servers by port, each restarted on its own, and the file that lists the ones that the run may use."""

    def __init__(self, directory):
        self._directory, self._started, self.by_port, self.list_file = directory, 0, {}, directory / "servers"

    def launch(self, port=0):
        self._started += 1
        server = ServerProcess(server_config(self._directory / f"server{self._started}.log", port))
        self.by_port[server.port] = server

    def list(self, ports):
        new = self.list_file.with_suffix(".new")
        new.write_text("".join(f"{self.by_port[port].url}\n" for port in ports))
        new.replace(self.list_file)

    def kill(self, ports):
        """Kills the servers of these ports and starts them again; returns before they are healthy."""
        for port in ports:
            os.kill(self.by_port[port].pid, signal.SIGTERM)  # the server is not asked, as in a crash
            self.by_port[port].stop()
        for port in ports:
            self.launch(port)

    def wait(self):
        """Returns when all servers are healthy. Raises ServerFailedError if one is not healthy in time."""
        for server in self.by_port.values():
            server.wait_healthy(LONGEST_S)

    def stop(self):
        for server in self.by_port.values():
            server.stop()


def pace(gate, handed_on):
    """Prepares the process of the run: ``gate``, a semaphore, permits each step, and responses are noted.

    A line of ``handed_on`` has the seed of a step and the place of a response in it.
    """
    from rljax.rollout.servers.engine import ServedEngine
    from rljax.run.stop import Timers

    timed, generate = Timers.phase, ServedEngine.generate

    def phase(self, name):
        if name == "rollout" and not gate.acquire(timeout=2 * LONGEST_S):
            raise RuntimeError(f"no leave to begin the step within {2 * LONGEST_S:g} s")
        return timed(self, name)

    def noted(self, prompts, n, sampling, *, seed):
        samples = generate(self, prompts, n, sampling, seed=seed)

        def responses():
            with handed_on.open("a") as file:
                for response in samples:
                    print(seed, response.prompt_index, response.sample_index, file=file)
                    yield response

        return Samples(responses(), samples.metrics)

    Timers.phase, ServedEngine.generate = phase, noted


def plan(kills, lists, chance):
    """Returns the number of servers that each blow kills, together ``kills``; 0 stands for one of ``lists`` lists."""
    counts = []
    while (left := kills - sum(counts)) > 0:
        counts.append(2 if left > 1 and chance.random() < BOTH else 1)
    for _ in range(lists):
        counts.insert(chance.randint(0, len(counts)), 0)
    return counts


def wait_for_row(rows, step, process):
    """Waits for the row of a step; returns False if the process ends before. Raises RuntimeError after a time limit."""
    deadline = time.monotonic() + 2 * LONGEST_S
    while not rows.exists() or len(read_rows(rows)) < step:
        if process.exitcode is not None:
            return False
        if time.monotonic() > deadline:
            raise RuntimeError(f"no row of step {step} within {2 * LONGEST_S:g} s")
        time.sleep(0.1)
    return True


def harass(counts, seed, steps, directory, chance):
    """Trains in ``directory`` / "run", and kills ``counts`` servers in turn; for 0 it lists other servers.

    Returns the kills and the lists by phase, and the run's failure if it failed.
    """
    run_dir, kills, lists, by_list = directory / "run", Counter(), Counter(), 0 in counts
    rows, log = run_dir / "metrics.jsonl", run_dir.with_suffix(".log")
    with contextlib.ExitStack() as stack:
        servers = Servers(directory)
        stack.callback(servers.stop)
        for _ in range(3 if by_list else 2):
            servers.launch()
        servers.wait()
        servers.list(servers.by_port)
        urls = [server.url for server in servers.by_port.values()]
        found_by = ("--rollout.discovery", str(servers.list_file)) if by_list else ("--rollout.urls", *urls)
        runs = Runs((*SETTINGS, *served_by(*found_by)))
        gate, begun = runs.context.Semaphore(FIRST_STEPS), FIRST_STEPS
        prepare = functools.partial(pace, gate, directory / "handed_on")
        process, phase = stack.enter_context(runs.start(run_dir, seed, steps, prepare))
        for number, count in enumerate(counts):
            if not wait_for_row(rows, begun, process):
                break
            key = "time/step_s" if number % 2 else "time/rollout_s"
            span_s = statistics.median(row[key] for row in read_rows(rows)[1:])
            gate.release()
            gate.release()
            time.sleep(chance.uniform(0.0, span_s))
            if count:
                kills[PHASES[phase.value]] += count
                servers.kill(chance.sample([*servers.by_port], count))
            else:
                lists[PHASES[phase.value]] += 1
                servers.list(chance.sample([*servers.by_port], chance.randint(1, len(servers.by_port))))
            print(f"{number + 1} of {len(counts)} blows", file=sys.stderr)
            servers.wait()
            gate.release()
            begun += STEPS_A_KILL
        for _ in range(LAST_STEPS):
            gate.release()
        process.join(2 * LONGEST_S)
        failed = process.exitcode != 0 and f"{process.exitcode} (None: not in time):\n{log.read_text()[-2000:]}"
    return kills, lists, failed and f"the run ended with {failed}"


def problems_of(rows, directory, seed, steps):
    """Returns the errors in the record of a run of ``steps`` steps; [] if there are none."""
    found = []
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        found.append(f"rows of the steps {[row['step'] for row in rows]}, expected 1 to {steps}")
    for row in rows:
        if (row["rollout/policy_version"], row["rollout/staleness"]) != (row["step"] - 1, 0.0):
            found.append(f"step {row['step']} has responses of version {row['rollout/policy_version']}")
        if not row["mismatch/logprob_abs_diff_max"] < LARGEST_GAP:
            found.append(f"step {row['step']}: |engine - trainer| is {row['mismatch/logprob_abs_diff_max']}")
    places = [(i, j) for i in range(PROMPTS) for j in range(GROUP)]
    wanted = Counter((step_seed(seed, step), *place) for step in range(1, steps + 1) for place in places)
    handed_on = Counter(tuple(map(int, line.split())) for line in (directory / "handed_on").read_text().splitlines())
    for what, responses in (("lost", wanted - handed_on), ("handed on too often", handed_on - wanted)):
        if responses:
            found.append(f"{responses.total()} responses {what}")
    for step in range(1, steps + 1):
        dump = directory / "run" / "rollouts" / f"step_{step:06d}.parquet"
        count = len(read_dump(dump).token_ids) if dump.exists() else 0
        if count != len(places):
            found.append(f"the dump of step {step} has {count} rollouts, expected {len(places)}")
    return found


def main(argv):
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    began, chance = time.monotonic(), random.Random(arguments.seed)
    counts = plan(arguments.kills, arguments.lists, chance)
    steps = FIRST_STEPS + STEPS_A_KILL * len(counts) + LAST_STEPS
    with tempfile.TemporaryDirectory() as name:
        kills, listed, failure = harass(counts, arguments.seed, steps, Path(name), chance)
        log = Path(name, "run", "metrics.jsonl")
        if not log.exists():
            print(failure, file=sys.stderr)
            return 1
        rows = read_rows(log)
        problems = [*problems_of(rows, Path(name), arguments.seed, steps), *filter(None, [failure])]
    facts = {"kills": kills.total(), "both_at_once": counts.count(2), "by_phase": kills, "lists_by_phase": listed}
    facts |= {"steps": len(rows), "rollouts_each_step": PROMPTS * GROUP}
    facts |= {key: sum(int(row.get(f"rollout/{key}", 0.0)) for row in rows) for key in COUNTED}
    facts["logprob_abs_diff_max"] = max(row["mismatch/logprob_abs_diff_max"] for row in rows)
    report(argv, facts | {"seconds": round(time.monotonic() - began, 1), "problems": problems}, arguments.json)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(run_cli(main))
