"""Compares the tokens per second of rollouts: over HTTP, by vLLM's own ``LLM.generate``, and by the embedded engine.

    python experiments/bench_rollouts.py --json benchmarks/rollouts.json

Rows ``served/*``: rljax's client and its vLLM server, against ``LLM.generate`` with the options of that server. Both
sample the same number of tokens, from the same seeds. Rows ``embedded/*``: the embedded engine in three ways,
``generate`` of transformers, and ``LLM.generate``. There the responses have lengths of 16 to 224 tokens. "Places": 16
responses are decoded together, and one that ends gives its place to the next (``rollout.decode_tokens``). "At once":
all are decoded together until the last one ends. "Parts": 16 are decoded together until the last one ends, then the
next 16.

The ways of a row take turns. The servers that have no turn are stopped by a signal. A ratio is taken in each turn, and
the table shows the median. From six turns on it comes with its exact interval of 95%, and before with the lowest and
the highest ratio. Turns are added to those that the JSON file has. The program starts the servers
(launch/install_vllm.sh) and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from scipy.stats import binom
from transformers import Qwen3ForCausalLM

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import load_params, save_params
from rljax.policy.model import init_params
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.servers.model import ServedModel
from rljax.rollout.servers.requests import make_requests
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ServerConfig, start, vllm_python
from rljax.rollout.turns import TurnRequest
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh

OFFLINE = Path(__file__).with_name("offline_vllm.py")
MAX_SEQS, MANY_SEQS, PROMPT, SHORTEST, LONGEST = 64, 256, 64, 16, 224
PLACES = 16  # the number of places in the embedded engine, each for one response at a time
POLICIES = {
    "128x6, 4,096": PolicyConfig(4096, 128, 384, 6, 4, 2, 32, tie_word_embeddings=True, max_position_embeddings=512),
    "512x8, 4,096": PolicyConfig(4096, 512, 1536, 8, 8, 4, 64, tie_word_embeddings=True, max_position_embeddings=512),
    "512x8, 151,936": PolicyConfig(
        151_936, 512, 1536, 8, 8, 4, 64, tie_word_embeddings=True, max_position_embeddings=512
    ),
    "256x4, 4,096": PolicyConfig(4096, 256, 768, 4, 4, 2, 64, tie_word_embeddings=True, max_position_embeddings=512),
}
WARM = 2  # the tokens of each response in the turn that compiles and warms up
Turn = Callable[[int], tuple[int, float]]
"""A function that samples responses of at most this many tokens, and returns the number of tokens and the seconds."""


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    kind: str  # "served" or "embedded"
    policy: str  # a key of ``POLICIES``
    prompts: int
    n: int = 1  # responses to each prompt
    length: int = 0  # the length of each response, or 0 for different lengths
    k: int = 0  # the number of likeliest tokens that are reported at each position

    @property
    def name(self) -> str:
        """The key of the row in the JSON file."""
        return f"{self.kind}/{self.policy}/{self.prompts} x {self.n} x {self.length or 'mixed'}/k = {self.k}"


ROWS = (
    *(Row("served", "128x6, 4,096", 16, 8, 128, k) for k in (0, 20)),
    *(Row("served", "512x8, 4,096", 8, 8, 96, k) for k in (0, 20)),
    *(Row("served", "512x8, 151,936", 4, 8, 64, k) for k in (0, 20)),
    *(Row("embedded", "256x4, 4,096", prompts) for prompts in (8, 64, 256)),
)


class Processes:
    """A process group that can be stopped by a signal, and the processor time of its processes."""

    def __init__(self, group: int) -> None:
        self.group = group

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Lets the group run, and stops it again."""
        os.killpg(self.group, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.group, signal.SIGSTOP)

    def seconds(self) -> dict[str, float]:
        """Returns the processor time (seconds) by the command's name, from /proc."""
        found: dict[str, float] = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                name, _, rest = (directory / "stat").read_text().partition("(")[2].rpartition(")")
                fields = rest.split()
                if int(fields[2]) == self.group:
                    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                    found[name] = found.get(name, 0.0) + spent
        return found


class Offline:
    """``LLM.generate`` in a process of vLLM's environment."""

    def __init__(self, config: ServerConfig) -> None:
        """Starts the process, which is ready after ``wait``."""
        command = config.command(1, gpu=False)
        options = ["--model", *command[command.index("serve") + 1 :]]
        self._process = subprocess.Popen(
            [config.python, str(OFFLINE), *options],
            env=config.environment(gpu=False),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.processes = Processes(self._process.pid)

    def ask(self, job: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the next answer, after sending ``job`` if it is given. Raises RuntimeError if the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if job is not None:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"experiments/offline_vllm.py ended with status {self._process.wait()}")
        return dict(json.loads(line))

    def stop(self) -> None:
        """Ends the process and its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def turn(
        self,
        prompts: Sequence[np.ndarray],
        limits: Sequence[int],
        seeds: Sequence[int | None],
        k: int,
        *,
        flat: bool = False,
    ) -> Turn:
        """Returns a turn of ``LLM.generate``, which reports the ``k`` likeliest tokens; ``flat`` is vLLM's own."""
        job = {"prompts": [prompt.tolist() for prompt in prompts], "seeds": list(seeds), "logprobs": k, "flat": flat}

        def sample(most: int) -> tuple[int, float]:
            with self.processes.running():
                answer = self.ask(job | {"limits": [min(limit, most) for limit in limits]})
            return answer["tokens"], answer["seconds"]

        return sample


def server_config(directory: str, dtype: Any, max_num_seqs: int) -> ServerConfig:
    """Returns the configuration of the server and of ``LLM.generate``."""
    return ServerConfig(
        directory,
        python=str(vllm_python()),
        dtype=dtype,
        max_model_len=330,
        max_num_seqs=max_num_seqs,
        max_logprobs=21,
        extra_args=("--max-num-batched-tokens", "8192"),
    )


def random_prompts(count: int, vocabulary: int) -> list[np.ndarray]:
    """Returns prompts of ``PROMPT`` random tokens."""
    rng = np.random.default_rng(count)
    return [rng.integers(2, vocabulary, PROMPT).astype(np.int32) for _ in range(count)]


def served_turns(row: Row, engines: dict[str, ServedModel], server: Processes, offline: Offline) -> dict[str, Turn]:
    """Returns the ways of a row ``served``, of which ``LLM.generate`` is the last but for its flat form."""
    prompts = random_prompts(row.prompts, POLICIES[row.policy].vocab_size)
    sampling = SamplingParams(row.length, reported=row.k)

    def over_http(engine: ServedModel) -> Turn:
        def sample(most: int) -> tuple[int, float]:
            sampling = SamplingParams(min(most, row.length), reported=row.k)
            with server.running():
                begun = time.perf_counter()
                tokens = sum(len(response.token_ids) for response in engine.generate(prompts, row.n, sampling, seed=0))
                return tokens, time.perf_counter() - begun

        return sample

    requests = make_requests(prompts, row.n, sampling, 0)
    given = [each.prompt for each in requests], [row.length] * len(requests), [each.seed for each in requests]
    asked = row.k + 1 if row.k else 0  # the same number that ``_asked`` of rljax.rollout.servers.vllm.client requests
    ways = {name: over_http(engine) for name, engine in engines.items()}
    ways["LLM.generate"] = offline.turn(*given, asked)
    if row.k:
        ways["LLM.generate, flat"] = offline.turn(*given, asked, flat=True)
    return ways


def embedded_turns(row: Row, directory: str, offline: Offline) -> dict[str, Turn]:
    """Returns the ways of a row ``embedded``."""
    policy = POLICIES[row.policy]
    prompts = random_prompts(row.prompts, policy.vocab_size)
    limits = np.random.default_rng(row.prompts).integers(SHORTEST, LONGEST + 1, row.prompts).tolist()
    params, mesh = load_params(directory, policy), make_mesh(MeshConfig(1, 1))

    def embedded(places: int, at_a_time: int) -> Turn:
        engine = JaxEngine(policy, jnp.float32, PROMPT, mesh=mesh, decode_tokens=places * (PROMPT + LONGEST))
        engine.publish(params, 0)

        def sample(most: int) -> tuple[int, float]:
            each = enumerate(zip(prompts, limits, strict=True))
            requests = [TurnRequest(i, 1, prompt, min(limit, most)) for i, (prompt, limit) in each]
            begun, tokens = time.perf_counter(), 0
            for first in range(0, len(requests), at_a_time):
                responses = engine.answer_round(requests[first : first + at_a_time], SamplingParams(LONGEST), seed=0)
                tokens += sum(len(response.token_ids) for response in responses)
            return tokens, time.perf_counter() - begun

        return sample

    ways = {"at once": embedded(row.prompts, row.prompts)}
    if row.prompts > PLACES:
        ways = {"places": embedded(PLACES, row.prompts), **ways, "parts": embedded(PLACES, PLACES)}
    ways["transformers"] = by_transformers(directory, prompts, limits)
    ways["LLM.generate"] = offline.turn(prompts, limits, list(range(row.prompts)), 0)
    return ways


def by_transformers(directory: str, prompts: Sequence[np.ndarray], limits: Sequence[int]) -> Turn:
    """Returns a turn of ``generate`` with log-probabilities. It samples all responses until the longest one ends."""
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64))

    def sample(most: int) -> tuple[int, float]:
        longest, begun = min(most, max(limits)), time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                return_dict_in_generate=True,
                output_logits=True,
                pad_token_id=0,
            )
        for logits, chosen in zip(out.logits, out.sequences[:, PROMPT:].T, strict=True):
            torch.log_softmax(logits.float(), dim=-1).gather(1, chosen[:, None])
        return sum(min(limit, most) for limit in limits), time.perf_counter() - begun

    return sample


def measure(turns: dict[str, Turn], groups: dict[str, Processes], found: dict[str, Any]) -> dict[str, Any]:
    """Returns the row that was ``found`` before, or {}, with one more turn of each way."""
    taken, counts = {}, {found["tokens"]} if found else set()
    for name, turn in turns.items():
        before, own = groups[name].seconds() if name in groups else {}, time.process_time()
        tokens, seconds = turn(sys.maxsize)
        after = {"client": time.process_time() - own} | (groups[name].seconds() if name in groups else {})
        spent = {process: round(value - before.get(process, 0.0), 2) for process, value in after.items()}
        taken[name] = {"seconds": seconds, "processor_seconds": spent}
        counts.add(tokens)
    if len(counts) != 1:
        raise RuntimeError(f"the ways sampled different numbers of tokens: {sorted(counts)}")
    return {"tokens": counts.pop(), "turns": [*found.get("turns", []), taken]}


def has_turns(found: dict[str, Any], rounds: int) -> bool:
    """Returns whether a row has at least so many turns."""
    return len(found.get("turns", [])) >= rounds


def as_text(values: Sequence[float]) -> str:
    """Returns the median and, in parentheses, its exact interval of 95%, or the extremes of less than six values.

    Each value lies below the true median with a probability of a half, so the number of values below it is binomial. At
    each end the interval leaves out the largest number of values that still covers 95%.
    """
    ordered = sorted(values)
    left_out = max(0, int(binom.ppf(0.025, len(ordered), 0.5)) - 1)
    return f"{statistics.median(ordered):.2f} ({ordered[left_out]:.2f} - {ordered[-1 - left_out]:.2f})"


def run_policy(
    rows: Sequence[Row], before: dict[str, Any], rounds: int, keep: Callable[[Row, dict[str, Any]], None]
) -> None:
    """Adds turns to rows of one kind and one policy, and calls ``keep`` for each; ``before`` has the rows so far."""
    policy, is_served = POLICIES[rows[0].policy], rows[0].kind == "served"
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        save_params(directory, init_params(policy, 0), policy)
        config = server_config(directory, *(("bfloat16", MAX_SEQS) if is_served else ("float32", MANY_SEQS)))
        offline = Offline(config)
        stack.callback(offline.stop)
        groups, engines = {"LLM.generate": offline.processes, "LLM.generate, flat": offline.processes}, {}
        if is_served:
            server = start(config)
            stack.callback(server.stop)
            processes = Processes(server.pid)
            stack.callback(os.killpg, server.pid, signal.SIGCONT)
            plain = VllmBackend()
            plain.own_route = ""
            for name, backend in {"HTTP": VllmBackend(), "HTTP, vLLM's endpoint": plain}.items():
                engines[name] = stack.enter_context(contextlib.closing(ServedModel([server.url], backend)))
                groups[name] = processes
        offline.ask()  # it answers when it is ready
        if is_served:
            os.killpg(server.pid, signal.SIGSTOP)
        os.killpg(offline.processes.group, signal.SIGSTOP)
        for row in rows:
            if is_served:
                turns = served_turns(row, engines, processes, offline)
            else:
                turns = embedded_turns(row, directory, offline)
            for turn in turns.values():
                turn(WARM)
            found = before.get(row.name, {})
            while not has_turns(found, rounds):
                found = measure(turns, groups, found)
                keep(row, found)


def print_row(name: str, found: dict[str, Any]) -> None:
    """Prints a row: tokens per second, the ratios to ``LLM.generate``, and the processor seconds of a turn."""
    turns = found["turns"]
    for way, first in turns[0].items():
        rate = found["tokens"] / statistics.median(turn[way]["seconds"] for turn in turns)
        ratio = as_text([turn["LLM.generate"]["seconds"] / turn[way]["seconds"] for turn in turns])
        processor = ", ".join(
            f"{key} {statistics.median(turn[way]['processor_seconds'][key] for turn in turns):.2f}"
            for key in first["processor_seconds"]
        )
        print(f"| {name} | {way} | {rate:.0f} | {ratio} | {processor} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each way (4)")
    parser.add_argument("--rows", default="", help="measure only rows whose name has these words in it")
    parser.add_argument("--json", type=Path, help="JSON file for the result, which may have some of the rows")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # this ends the servers, too
    torch.set_num_threads(os.cpu_count() or 1)
    report: dict[str, Any] = {"rows": {}}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())

    def keep(row: Row, found: dict[str, Any]) -> None:
        report["rows"][row.name] = found
        if options.json:
            report["command"] = shlex.join(["python", *sys.argv])
            report["machine"] = f"{platform.machine()}, {os.cpu_count()} cores; jax {jax.__version__}"
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    for kind, policy in dict.fromkeys((row.kind, row.policy) for row in ROWS):
        rows = [row for row in ROWS if (row.kind, row.policy) == (kind, policy) and options.rows in row.name]
        rows = [row for row in rows if not has_turns(report["rows"].get(row.name, {}), options.rounds)]
        if rows:
            run_policy(rows, report["rows"], options.rounds, keep)
    print("| row | way | tokens/s | rate / LLM.generate | processor s |\n|---|---|---|---|---|")
    for name, found in report["rows"].items():
        print_row(name, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
