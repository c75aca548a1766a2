"""The checks of a model beside the vLLM server that will sample from it, for ``rljax accept``."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import signal
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax import train
from rljax.commands.check_device import CheckFacts
from rljax.compare.report import GAP, compare_columns
from rljax.compare.sampling import SampleConfig, sample_responses
from rljax.compare.scorers import local_source, name_columns, score_column
from rljax.compare.verdict import GAP_RANGES
from rljax.distributed.files import write_whole
from rljax.errors import ConfigError, ServerError
from rljax.policy.head import matmul_precision
from rljax.policy.hf import hf_tensors, load_params, open_tensors
from rljax.policy.kernels import choose_kernels
from rljax.policy.model import Params, cast_params, param_shardings
from rljax.policy.score import packed_logprobs
from rljax.record.rows import Row
from rljax.record.token_dumps import TokenDump, make_dump, read_dump, write_dump
from rljax.rollout.servers.fleet import Admission, Fleet
from rljax.rollout.servers.server import SENT
from rljax.rollout.servers.verify import MIXTURE_FACTOR
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.run.build import Inputs, load_problems, make_run_engine
from rljax.run.config_file import config_to_yaml
from rljax.run.directory import recorded_rows
from rljax.run.stop import StopRequest
from rljax.trainer.packing import PackingConfig

BARS = {"bfloat16": 5e-3, "float16": 2.5e-4, "float32": 1e-6}
"""The largest mean k3 between server and trainer, by dtype (nats). A mixture of experts has 3 times as much."""
RESPONSES = 16  # the responses whose tokens are scored
BIAS = 8.0  # the largest mean difference beyond the KL divergence, in standard errors; 1024 tokens have 0.01 to 1
GROWTH = 8.0  # the largest factor by which a gap may grow with the position
CHANGE = 0.05  # the size of the change of each weight in the second version that is published
# The wait in which no other client may ask the server, the time for earlier requests to end, the time between counts.
QUIET_S, _SETTLE_S, _EVERY_S = 2.0, 15.0, 0.5
_FINISHED, _RUNNING = "vllm:request_success_total", "vllm:num_requests_(?:running|waiting)"
_UNUSED = ("lm_head.weight", "rotary_emb.inv_freq")  # tensors of files that a policy may leave out


def parity(problem: Any, response: str, truncated: bool) -> float:
    """Returns a reward of 0 or 1 from a hash of the response's text, so that responses of any model get both."""
    return float(zlib.crc32(response.encode()) & 1)


class ServerUnderTest(Fleet):
    """The connection to the vLLM server that the checks ask."""

    def __init__(self, config: Any) -> None:
        """Connects to the only server of a ``RolloutConfig`` and reads its description.

        Raises ServerError if it does not answer, and ValueError if it has no plugin or does not count its requests.
        """
        super().__init__(config, VllmBackend(), Admission())
        try:
            self.info = self.wait(self.kind.describe(self.servers[0]))
            if not self.info.dtype:
                raise ValueError(f"{self.urls[0]}: {self.kind.without_plugin}")
            if not self._numbers(_FINISHED):
                raise ValueError(f"{self.urls[0]}/metrics counts no requests: start it without --disable-log-stats")
            self.described, self.started = self.ask("rljax_describe"), self._numbers("process_start_time_seconds")
        except BaseException:
            self.close()
            raise

    def ask(self, method: str) -> dict[str, Any]:
        """Calls a method of rljax's plugin on the server, and returns the first worker's answer."""
        return dict(self.wait(self.kind.ask_plugin(self.servers[0], method))[0])

    def _numbers(self, name: str) -> list[float]:
        """Returns the numbers of vLLM's metrics with this name, a regular expression."""
        text = self.wait(self.servers[0].text("/metrics"))
        return [float(number) for number in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watches the server during a ``with`` block. If another client asks it, this process gets SIGTERM.

        Raises ConfigError for such requests before or after the block, or in the place of a KeyboardInterrupt in it.
        """
        deadline = time.monotonic() + _SETTLE_S
        while sum(self._numbers(_RUNNING)) and time.monotonic() < deadline:
            time.sleep(0.2)
        before, ended = sum(self._numbers(_FINISHED)) - SENT[self.urls[0]], threading.Event()
        time.sleep(QUIET_S)
        self._check_alone(before)

        def watch() -> None:
            while not ended.wait(_EVERY_S):
                with contextlib.suppress(ServerError):
                    try:
                        self._check_alone(before)
                    except ConfigError:
                        os.kill(os.getpid(), signal.SIGTERM)
                        return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        except KeyboardInterrupt:
            self._check_alone(before)
            raise
        finally:
            ended.set()
            watcher.join()
        self._check_alone(before)

    def _check_alone(self, before: float) -> None:
        """Raises ConfigError if the server has had more than ``before`` and the requests of this process."""
        for _ in range(2):  # vLLM may set its numbers one by one
            count = sum(self._numbers(f"(?:{_RUNNING}|{_FINISHED})")) - before - SENT[self.urls[0]]
            if count <= 0:
                return
            time.sleep(_EVERY_S)
        raise ConfigError(f"{self.urls[0]} answers requests of others ({count:.0f} now): stop its other clients")


class ServerChecks:
    """The checks of one model and one server. Each returns a dict for JSON with its findings and its ``problems``."""

    def __init__(self, inputs: Inputs, server: ServerUnderTest, out: Path, length: int, bar: float | None) -> None:
        """Reads the prompts of the run that ``inputs`` would make. Weights are read by the checks that need them.

        Args:
          inputs: The inputs of the run, whose model has a directory here.
          server: The server that the checks ask.
          out: The directory of the sampled tokens.
          length: The length of the sampled responses (tokens).
          bar: The largest mean k3 between server and trainer (nats). None: the value for the dtype.
        """
        self._inputs, self._server, self._path, self._length = inputs, server, out / "tokens.parquet", length
        self._model, self._dtype = Path(inputs.config.model.path), inputs.config.rollout.dtype
        self._dtypes = tuple(dict.fromkeys(("float32", self._dtype)))
        self._prompts = load_problems(inputs.config, inputs.tokenizer).prompts
        factor = MIXTURE_FACTOR if inputs.policy.num_experts else 1.0
        self._highest = GAP_RANGES[self._dtype][1] * factor
        self.bar = BARS[self._dtype] * factor if bar is None else bar

    def handshake(self) -> CheckFacts:
        """Makes the engine of a run, which compares the server's settings with those of the run."""
        with self._engine():
            info = self._server.info
        return {"says": f"vLLM {info.version}, {info.dtype}, head {info.head_dtype}, {info.form}", "problems": []}

    def same_tokens(self) -> CheckFacts:
        """Compares tokenizer and end-of-sequence tokens of server and model. Samples tokens for other checks."""
        self.tokens()
        stops = sorted(self._inputs.policy.stop_token_ids)
        ours = {"tokenizer": self._inputs.tokenizer.digest(), "stop_token_ids": stops}
        return token_facts(ours, self._server.ask("rljax_describe_tokens"))

    def round_trip(self) -> CheckFacts:
        """Compares each tensor of the files with itself after it was a parameter of the policy, bit for bit."""
        files = [open_tensors(file) for file in sorted(self._model.glob("*.safetensors"))]
        stored = {name: tensor for file in files for name, tensor in file.items()}
        same = {}
        for name, array in hf_tensors(self._params("float32"), self._inputs.policy, np.float32):
            kept = np.asarray(stored[name][:])
            same[name] = array.astype(kept.dtype).tobytes() == kept.tobytes()
        return round_trip_facts(same, list(stored))

    def packed(self) -> CheckFacts:
        """Compares log-probabilities of sequences that share a row, as in training, with those of each alone."""
        return self._compare("jax-packed")

    def prefill(self) -> CheckFacts:
        """Compares the log-probabilities of the embedded engine's prefill and decode with the trainer's."""
        return self._compare("jax-prefill", "jax-decode")

    def logprobs(self) -> CheckFacts:
        """Compares the server's log-probabilities, of sampling, prefill and decode, with the trainer's."""
        own, forward = (self._score(f"{kind}:{self._dtype}") for kind in ("jax-packed", "jax"))
        columns = [self._score(f"{kind}:{self._server.urls[0]}") for kind in ("vllm", "vllm-decode")]
        columns.insert(0, str(self.tokens().sampling["column"]))
        found = pair_facts(self.tokens(), [(forward, column) for column in columns], bar=self.bar)
        server, floor = (compare_columns(self.tokens(), [forward, each]).pairs[0].growth for each in (columns[0], own))
        growth = {at: (metrics[GAP], floor[at][GAP]) for at, metrics in server.items()}
        return found | {"growth": growth, "problems": found["problems"] + growth_problems(growth, self._highest)}

    def publish(self) -> CheckFacts:
        """Publishes the weights, changed ones and the first again. A run's engine proves each, as in training."""
        params = self._params(self._dtype)
        return self._publish(params, changed(params), params)

    def training(self) -> CheckFacts:
        """Trains, or goes on with an interrupted run, and judges its rows. Raises KeyboardInterrupt after a signal."""
        config = self._inputs.config
        write_whole(self._path.with_name("run.yaml"), config_to_yaml(config))
        with contextlib.redirect_stdout(sys.stderr):
            status = train.main([str(self._path.with_name("run.yaml"))])
        if status > 128:  # the loop took the signal, and saved
            raise KeyboardInterrupt
        found = training_facts(recorded_rows(Path(config.run.dir)), config.run.steps, self.bar)
        return found | {"problems": found["problems"] + ([f"rljax train ended with status {status}"] if status else [])}

    def put_back(self) -> CheckFacts:
        """Publishes the model's own weights with the same proof as ``publish``."""
        return self._publish(self._params(self._dtype))

    def tokens(self) -> TokenDump:
        """Returns a dump of responses that the server sampled to prompts of the run, with all columns so far."""
        if not self._path.exists():
            prompts = self._prompts[:RESPONSES]
            masks = [np.zeros(len(ids), bool) for ids in prompts]
            dump = make_dump([f"prompt {i}" for i in range(len(prompts))], prompts, masks, {})
            how, spec = SampleConfig(max_response_tokens=self._length), f"vllm-decode:{self._server.urls[0]}"
            write_dump(self._path, sample_responses(dump, self._model, spec, how, full_length=True))
        return read_dump(self._path)

    def _compare(self, *kinds: str) -> CheckFacts:
        """Compares columns of these kinds with the trainer's forward, in float32 and in the dtype of the run."""
        pairs = [(f"jax:{dtype}", f"{kind}:{dtype}") for dtype in self._dtypes for kind in kinds]
        for name in itertools.chain.from_iterable(pairs):
            self._score(name)
        return pair_facts(self.tokens(), pairs)

    def _score(self, spec: str) -> str:
        """Returns the column of a scorer, and scores the tokens unless they have it."""
        dump, (kind, _, dtype) = self.tokens(), spec.partition(":")
        name = spec if spec in dump.logprobs or kind == "jax-packed" else name_columns([spec])[spec]
        if name not in dump.logprobs:
            if kind == "jax-packed":
                column = self._packed_logprobs(dump.token_ids, dtype), local_source("jax", dtype, 1.0, self._model)
            else:
                column = score_column(spec, dump, self._model)
            write_dump(self._path, dump.with_column(name, *column))
        return name

    def _packed_logprobs(self, sequences: Sequence[np.ndarray], dtype: str) -> list[np.ndarray]:
        """Returns the log-probabilities of sequences that stand in one row, float32 [t] each."""
        config, policy, _, mesh = self._inputs
        lengths = np.array([len(ids) for ids in sequences])
        row, ends = np.zeros((3, 1, PackingConfig().resolve_row_tokens(int(lengths.sum()))), np.int32), lengths.cumsum()
        for index, (end, ids) in enumerate(zip(ends, sequences, strict=True), 1):
            row[:, 0, end - len(ids) : end] = ids, np.full(len(ids), index), np.arange(len(ids))
        kernels = choose_kernels(config.policy, policy, dtype, mesh)

        @jax.jit
        def run(params: Params) -> jax.Array:
            with jax.default_matmul_precision(matmul_precision(dtype)):
                return packed_logprobs(cast_params(params, dtype), policy, *row, kernels=kernels).logprobs

        with jax.set_mesh(mesh):
            whole = np.array(run(self._params("float32")))[0, : ends[-1]]
        whole[ends - lengths] = np.nan  # the first token of a sequence has no log-probability
        return np.split(whole, ends[:-1])

    def _params(self, dtype: str) -> Params:
        policy = self._inputs.policy
        return load_params(self._model, policy, param_shardings(policy, self._inputs.mesh), dtype)

    def _engine(self) -> contextlib.closing[Any]:
        return contextlib.closing(make_run_engine(self._inputs, StopRequest(), prompts=self._prompts))

    def _publish(self, *versions: Params) -> CheckFacts:
        with self._engine() as engine:
            rows = [engine.publish(params, number) for number, params in enumerate(versions)]
            band = engine.verifier.band
        tensors = int(rows[0]["publish/verified_tensors"])
        says = f"{len(versions)} version(s) of {tensors} tensors, proven by bits and by use (within {band:.2g} nats)"
        return {"tensors": tensors, "band": band, "says": says, "problems": []}


@jax.jit
def changed(params: Params) -> Params:
    """Returns the parameters, each weight times 1 + CHANGE * n, where n is random (standard normal)."""
    leaves, tree = jax.tree.flatten(params)
    noise = [jax.random.normal(jax.random.key(i), leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, [leaf * (1 + CHANGE * each) for leaf, each in zip(leaves, noise, strict=True)])


def token_facts(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> CheckFacts:
    """Compares the tokenizer's hash and the end-of-sequence tokens of the model with those of the server."""
    stops, said = ours["stop_token_ids"], theirs["stop_token_ids"]
    problems = [] if said == stops else [f"the server ends a response at {said}, the model at {stops}"]
    if theirs["tokenizer"] != ours["tokenizer"]:
        problems.append(f"the server has {'another' if theirs['tokenizer'] else 'no readable'} tokenizer")
    return {"says": f"one tokenizer; a response ends at {stops}", "problems": problems}


def round_trip_facts(same: Mapping[str, bool], stored: Sequence[str]) -> CheckFacts:
    """Judges a round trip by ``same``, whether each tensor kept its bits, and ``stored``, the names in the files."""
    found = {"come back with other bits": [name for name, is_same in same.items() if not is_same]}
    found["of the files are not read"] = [name for name in stored if name not in same and not name.endswith(_UNUSED)]
    problems = [f"{len(names)} tensors {what}: {', '.join(names[:3])}" for what, names in found.items() if names]
    return {"says": f"{len(same)} tensors come back bit for bit", "problems": problems}


def pair_facts(dump: TokenDump, pairs: Sequence[tuple[str, str]], *, bar: float = math.inf) -> CheckFacts:
    """Judges pairs of columns as ``rljax compare`` does, and by their mean k3, at most ``bar`` (nats).

    With a finite ``bar`` the second column must have sampled the tokens, and chance must explain the mean difference.
    """
    found, reasons = {}, defaultdict[str, list[str]](list)
    for pair in (compare_columns(dump, names).pairs[0] for names in pairs):
        gap, k3, bias = (pair.metrics[name] for name in (GAP, "k3_kl", "kl"))
        found[str(pair)] = {"gap": gap, "k3": k3, "kl": bias, "cause": pair.verdict.cause}
        said = {
            pair.verdict.reason: pair.verdict.status != "pass",
            f"the mean k3 is {k3:.3g}, expected at most {bar:.3g}": not k3 <= bar,
            f"the mean difference is {bias:.2g} nats, more than chance: a cut or a temperature": math.isfinite(bar)
            and abs(bias) > k3 + BIAS * math.sqrt(2 * k3 / pair.metrics["token_count"]),
        }
        for reason in (reason for reason, is_wrong in said.items() if is_wrong):
            reasons[reason].append(str(pair))
    problems = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    says = ", ".join(f"{name}: {one['gap']:.2g} nats (k3 {one['k3']:.2g})" for name, one in found.items())
    return {"pairs": found, "says": says, "problems": problems}


def growth_problems(growth: Mapping[str, tuple[float, float]], highest: float) -> list[str]:
    """Judges pairs of gaps by position: of server and trainer, and of the trainer and itself (nats).

    Returns a line if the last gap is above ``highest``, and far above the first gap and the trainer's own last gap.
    """
    (first, _), *_, (last, own) = (*growth.values(), *growth.values())
    if last <= max(highest, GROWTH * first, GROWTH * own):
        return []
    return [f"the gap grows with the position from {first:.2g} to {last:.2g} nats, the trainer's own only to {own:.2g}"]


def training_facts(rows: Sequence[Row], steps: int, bar: float) -> CheckFacts:
    """Judges the rows of a run of ``steps`` steps: complete, finite, with updates, and a mean k3 up to ``bar``."""
    if len(rows) < steps:
        return {"says": "", "problems": [f"{len(rows)} of {steps} steps were made"]}
    k3, lost = np.mean([row["mismatch/k3_kl"] for row in rows]), sum(row["mismatch/nonfinite_count"] for row in rows)
    trained = max(0, steps - int(rows[-1]["optimizer/skipped_updates"]))
    problems = [] if k3 <= bar else [f"the mean k3 of the steps is {k3:.3g}, expected at most {bar:.3g}"]
    problems += [f"{lost:.0f} log-probabilities are not finite"] if lost else []
    problems += [] if trained else ["no step changed the weights: give a --config whose rewards differ in a group"]
    says = f"{steps} steps, {trained} of them with an update; the mean k3 is {k3:.3g}, at most {bar:.3g} is right"
    return {"k3": float(k3), "trained": trained, "says": says, "problems": problems}
