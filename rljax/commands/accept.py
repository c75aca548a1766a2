"""Checks a model and its vLLM server before a long run, and says PASS or FAIL of each part.

    rljax serve vllm toy-base --max-model-len 512 --port 8000 &
    rljax accept toy-base --server http://127.0.0.1:8000
    rljax accept Qwen/Qwen3-4B --server URL --config dapo.yaml --json accept.json

- server: the settings that a run compares in its handshake
- tokens: the same tokenizer and end-of-sequence tokens in the model and in the server
- round trip: the weights from files to the policy and back, bit for bit
- packed: sequences that share a row, as in training, against the same sequences alone
- prefill: prefill and decode of the embedded engine against the trainer's forward
- log-probabilities: those of the server against the trainer's, on tokens that it sampled, also by position
- publish: three versions of the weights, each with the proof of a run that the server samples from it
- training: the steps of a run, whose mean k3 must be small
- first weights: the model's weights, which the server gets back at the end, with their proof

The server must have been started from MODEL and hold its weights. Requests of other clients, which its metrics count,
end the command at any time. Nothing is published to it before its log-probabilities are right. At the end it gets the
weights of MODEL back, after a failure or an interrupt, too.

Started again with the same OUT, the program makes only the checks that have not passed. It makes all of them if the
model, the server, its process or an option is another one. OUT has accept.json, the tokens and the run. The exit status
is 0 if every check passes, 1 if one fails, 2 if the server or an argument is refused, and 130 after an interrupt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

import rljax
from rljax import train
from rljax.commands.check import line
from rljax.commands.check_server import ServerChecks, ServerUnderTest
from rljax.distributed.files import write_whole
from rljax.errors import caller_errors, parse_json, printable
from rljax.policy.hub import model_directory
from rljax.record.rows import finite_json
from rljax.rollout.types import RolloutConfig
from rljax.run.config import Config
from rljax.run.config_file import resolve
from rljax.run.options import Positional, parse_arguments
from rljax.weights.format import weights_hash


class AcceptCheck(NamedTuple):
    """A check: what makes it, what to do after a failure, and what it needs."""

    method: str  # the method of ``ServerChecks`` that makes it
    remedy: str  # the advice after a failure
    needs: tuple[str, ...] = ()  # the checks that must pass before this one, if it changes the server's weights


CHECKS = {
    "server": AcceptCheck("handshake", "start it with rljax serve vllm MODEL"),
    "tokens": AcceptCheck("same_tokens", "start the server from the directory of MODEL"),
    "round trip": AcceptCheck("round_trip", "do not train from these files"),
    "packed": AcceptCheck("packed", "train with policy.attention xla, and run rljax check"),
    "prefill": AcceptCheck("prefill", "run rljax check"),
    "log-probabilities": AcceptCheck("logprobs", "rljax compare --layers; or restart a server that was published to"),
    "publish": AcceptCheck("publish", "restart it with the same rljax beside it", ("server", "log-probabilities")),
    "training": AcceptCheck("training", "rljax diagnose OUT/run", ("publish",)),
}
PUT_BACK = "first weights"
_PARTS = CHECKS | {PUT_BACK: AcceptCheck("put_back", "restart the server: it may hold other weights")}
# The run without a configuration: the toy task, with a reward that differs within a group whatever the model can.
_TASK = {"data.reward": "rljax.commands.check_server:parity", "data.batch_size": 8, "data.max_prompt_tokens": 16}
_TASK |= {"optimizer.learning_rate": 1e-6, "schedule.kind": "constant"}


@dataclass(frozen=True)
class AcceptArguments:
    """The arguments of ``rljax accept``."""

    model: Positional[str]
    """The Hugging Face directory of the model, or OWNER/NAME."""
    server: str
    """The URL of the vLLM server."""
    config: str | None = None
    """The configuration of the run that will follow, whose model and servers are replaced. None: the toy task, in the
    dtype of the server."""
    steps: int = 20
    """The number of training steps."""
    length: int = 128
    """The length of the responses whose log-probabilities are compared (tokens)."""
    bar: float | None = None
    """The largest mean k3 between server and trainer (nats). None: 0.005 in bfloat16, 2.5e-4 in float16, 1e-6 in
    float32; for a mixture of experts 3 times as much."""
    json: Path | None = None
    """The JSON file, which is written again after each check. None: accept.json in OUT."""
    out: Path = Path("acceptance")
    """The directory to write."""


class Acceptance:
    """The checks that one command makes, and the JSON document with their findings."""

    def __init__(self, options: AcceptArguments, server: ServerUnderTest, command: str) -> None:
        """Continues the JSON document of an earlier command if it has the same model, server and options.

        Raises OSError or ValueError if an input cannot be used.
        """
        model, dtype = model_directory(options.model), server.info.dtype
        self._out, self._server = options.out, server
        task = {} if options.config else _TASK | {"rollout.dtype": dtype, "precision.compute_dtype": dtype}
        task |= {"model.path": model, "rollout.engine": "vllm", "rollout.urls": options.server, "eval.every": 0}
        task |= {"run.dir": options.out / "run", "run.steps": options.steps, "rollout.server_wait_s": 60}
        # The steps and the server are of this run alone, and its copies must not replace those of another.
        task |= {"run.fork": "", "run.resume": "auto", "checkpoint.after_save": "", "checkpoint.keep_best": False}
        task |= {"eval.at_start": False, "rollout.discovery": None, "rollout.trajectories": None}
        words = [f"--{name}={value}" for name, value in task.items()]
        inputs = train.read_inputs(resolve(Config, options.config or "quickstart", words))
        self._checks = ServerChecks(inputs, server, options.out, options.length, options.bar)
        subject = [rljax.__version__, weights_hash(model), server.described, server.started, options.length]
        subject = json.loads(finite_json([*subject, self._checks.bar, dataclasses.asdict(inputs.config)]))
        self._path = options.json or options.out / "accept.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        old = earlier_report(self._path, options.out) or {"subject": [None] * len(subject)}
        is_same = old["subject"] == subject
        self.found: dict[str, Any] = old["checks"] if is_same else {}
        away = old["subject"][1:4] == subject[1:4] and old["away"]
        self.document = {"command": command, "passed": False, "away": away, "checks": self.found, "subject": subject}
        # What failed begins anew. An interrupted run has no entry, and goes on.
        failed = {name for name in self.found if self._lacks(name)}
        if not is_same or "training" in failed:
            shutil.rmtree(options.out / "run", ignore_errors=True)
        if not is_same or "log-probabilities" in failed:
            self.found.pop("tokens", None)  # this check samples them
            (options.out / "tokens.parquet").unlink(missing_ok=True)

    def _lacks(self, name: str) -> bool:
        return self.found.get(name, {}).get("status") != "PASS"

    def run(self) -> None:
        """Makes the checks that have not passed. At the end it puts the model's weights back, after an error, too."""
        todo = [name for name in CHECKS if self._lacks(name)]
        with caller_errors():
            try:
                with self._server.watched():
                    self._put_back()  # for a command before that was killed
                    for name in (bar := tqdm(todo, unit="check", file=sys.stderr)):
                        bar.set_postfix_str(name)
                        self._make(name)
            finally:
                self._put_back()
                self.document["passed"] = not any(map(self._lacks, CHECKS)) and not self.document["away"]
                self._write()

    def _put_back(self) -> None:
        """Puts the first weights back, if the server may hold others. SIGINT and SIGTERM do nothing meanwhile."""
        if self.document["away"]:
            before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
            try:
                self._make(PUT_BACK)
                self.document["away"] = self._lacks(PUT_BACK)
            finally:
                for each, handler in before.items():
                    signal.signal(each, handler)

    def _make(self, name: str) -> None:
        """Makes a check, unless one that it needs has failed, and records what it found."""
        began, part, found = time.monotonic(), _PARTS[name], dict[str, Any]()
        if failed := [need for need in part.needs if self._lacks(need)]:
            found = {"status": "SKIPPED", "skipped": f"not tried, because {' and '.join(failed)} did not pass"}
        else:
            if part.needs:
                self.document["away"] = True
                self._write()
            try:
                found = getattr(self._checks, part.method)()
            except Exception as error:  # of any kind: the other checks go on
                is_known = isinstance(error, (ValueError, RuntimeError, OSError)) and str(error)
                found = {"problems": list(map(printable, str(error).splitlines())) if is_known else [repr(error)]}
            found |= {"status": "FAIL" if found["problems"] else "PASS", "seconds": round(time.monotonic() - began, 1)}
        remedy = part.remedy.replace("OUT", str(self._out)) if found.get("problems") else ""
        self.found[name] = found | {"remedy": remedy}
        self._write()

    def _write(self) -> None:
        write_whole(self._path, finite_json(self.document))

    def page(self) -> str:
        """Returns the text to print: a line for each check, and the verdict."""
        width = max(map(len, _PARTS))
        lines = [f"{name:<{width}}  {line(self.found[name])}" for name in _PARTS if name in self.found]
        return "\n".join([*lines, f"{'PASS' if self.document['passed'] else 'FAIL'}; written to {self._path}"])


def earlier_report(path: Path, out: Path) -> dict[str, Any] | None:
    """Reads the report of an earlier command; None if there is none.

    Raises ValueError if the file is no such report, or if there is no file, but ``out`` has a run or tokens, which the
    checks would remove.
    """
    if path.exists():
        document: Any = parse_json(path.read_bytes())
        if not isinstance(document, dict) or not {"subject", "checks", "away"} <= set(document):
            raise ValueError(f"{path} is no report of rljax accept: give another --json")
        return document
    if others := [name for name in ("run", "tokens.parquet") if (out / name).exists()]:
        raise ValueError(f"{out / others[0]} is there, but not {path}: give another --out")
    return None


def main(argv: Sequence[str]) -> int:
    """Makes the checks, prints the page, and returns the exit status."""
    options = parse_arguments(AcceptArguments, argv, prog="rljax accept", description=__doc__ or "")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the server may share the memory of a card
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        with caller_errors():
            server = stack.enter_context(contextlib.closing(ServerUnderTest(RolloutConfig(urls=(options.server,)))))
            options.out.mkdir(parents=True, exist_ok=True)
            acceptance = Acceptance(options, server, shlex.join(["rljax", "accept", *argv]))
        try:
            acceptance.run()
        finally:
            print(acceptance.page())
    return 0 if acceptance.document["passed"] else 1
