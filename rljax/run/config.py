"""The configuration of a run: the frozen dataclasses of all parts, each under a key of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rljax.algorithms.advantages import AdvantageConfig
from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.data.prompts import DataConfig
from rljax.errors import check_at_least, check_finite
from rljax.policy.config import PolicyOptions
from rljax.policy.lora import LoraConfig
from rljax.record.trackers import RecordConfig
from rljax.rollout.kinds import can, named_engines
from rljax.rollout.types import RolloutConfig
from rljax.run.checkpoint import CheckpointConfig
from rljax.run.guard import GuardConfig
from rljax.run.rate import ScheduleConfig
from rljax.sharding import MeshConfig
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.packing import PackingConfig
from rljax.trainer.state import OptimizerConfig, PrecisionConfig
from rljax.weights.publish_config import PublishConfig


@dataclass(frozen=True)
class RunConfig:
    """The settings of the run itself."""

    dir: str = "runs/run"
    """Run directory. It receives config.yaml, metrics.jsonl, tb/, checkpoints/, summary.json and report.png."""
    steps: int = 100
    """Number of steps. A step samples one batch of responses, and trains on it at one learning rate."""
    seed: int = 0
    """Seed of the rollouts and of the order of the prompts."""
    resume: str = "auto"
    """auto: continue from the newest checkpoint in ``dir`` if there is one. never: refuse a ``dir`` that already holds
    a run. Any other value is the path of another run directory to continue from."""
    fork: str = ""
    """Checkpoint of another run, RUN/checkpoints/STEP, to begin from. Rows and state up to that step are copied; from
    the next step on the settings of this run hold. Schedule, correction, loss, learning rate, weight decay and engine
    may differ from the other run. Empty: begin from the model."""
    grace_s: float = 30.0
    """Longest time from a request to stop (SIGTERM or Ctrl-C) to the end of the run, saving included (seconds). A step
    that still samples is given up if it is not expected to end in time. The times of the last step and of a save decide
    that; before any step has ended, the step is given up. The step before it is then saved."""
    processes: int = 0
    """Number of processes that train together. 0: the number that the cluster says (Slurm, Kubernetes, TPU pod, Open
    MPI), and one process without a cluster. 1: this process alone, whatever the cluster says."""
    process_id: int = -1
    """Index of this process among ``processes``, from 0. -1: the index that the cluster says."""
    coordinator: str = ""
    """HOST:PORT at which the other processes find process 0. Empty: the address that the cluster says."""
    stuck_s: float = 3600.0
    """Longest time in one phase of a step without progress, such as a response that arrives (seconds). The run then
    ends and prints in which phase each process is. 0: no limit."""
    profile_steps: tuple[int, ...] = ()
    """First and last step (from 1) of a JAX profile, which is written to ``dir``/profile. Empty: no profile."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "steps")
        check_at_least(self, 0, "seed", "grace_s", "processes", "stuck_s")
        check_at_least(self, -1, "process_id")
        if self.fork and self.resume not in ("auto", "never"):
            raise ValueError(f"fork and resume name two runs to begin from: {self.fork} and {self.resume}; give one")
        steps = self.profile_steps
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(f"profile_steps must be two steps, the first at least 1, got {list(steps)}")

    @property
    def fork_step(self) -> int:
        """The step of the checkpoint that ``fork`` names; 0 if it names none."""
        name = Path(self.fork).name
        return int(name) if name.isdecimal() else 0


@dataclass(frozen=True)
class ModelConfig:
    """The policy to start from."""

    path: str = "configs/toy-base"
    """Hugging Face directory (config.json, safetensors, tokenizer.json), or OWNER/NAME of a model on the hub. A model
    of the hub is downloaded once, and the run's config.yaml then names the local directory."""


@dataclass(frozen=True)
class SamplesConfig:
    """The settings of the responses from which an accuracy is measured."""

    n: int = 1
    """Responses per problem. The accuracy is their mean (avg@n)."""
    pass_k: tuple[int, ...] = ()
    """Values of k, at most n, for which pass@k is estimated from the n responses."""
    temperature: float = 0.0
    """Sampling temperature. 0: greedy."""
    max_response_tokens: int | None = None
    """Longest response (tokens). None: ``rollout.max_response_tokens``."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "n")
        check_finite(self, "temperature")
        if self.temperature == 0.0 and self.n > 1:
            same = "temperature = 0 samples the same response each time"
            raise ValueError(f"{same}, but n = {self.n}: set a temperature")
        if any(not 1 <= k <= self.n for k in self.pass_k):
            raise ValueError(f"pass_k = {list(self.pass_k)} must be from 1 to n = {self.n}")
        if self.max_response_tokens is not None:
            check_at_least(self, 1, "max_response_tokens")


@dataclass(frozen=True)
class EvalConfig(SamplesConfig):
    """The evaluations of a run, through the engine that samples for it. Their results are in the row of the step."""

    every: int = 20
    """Steps between evaluations. The last step is always evaluated. 0: no evaluation."""
    at_start: bool = False
    """Whether the policy before the first step is evaluated. The first row has it as ``eval/.../..._at_start``."""
    datasets: tuple[str, ...] = ()
    """Datasets to evaluate on. Each is a file as in ``data.path``, ``NAME=FILE``, or toy, toy_swaps, calculator or
    ``reasoning_gym:NAME`` for the evaluation split of that task. Empty: the evaluation split of ``data.task``, or no
    dataset if ``data.task`` is file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "every")

    @property
    def is_wanted(self) -> bool:
        """Whether the run makes any evaluation."""
        return self.every > 0 or self.at_start


_BAND = "its value is fixed; rollout.verify.factor widens the bands"
_BUCKETS = "the buckets are fixed"
_SELF = "diagnosis.self_every alone says when the trainer is compared with itself"
_RETRY = "the pauses between attempts are fixed; rollout.limits.request_timeout_s bounds a request"

REMOVED: dict[str, tuple[Any, str]] = {
    "run.heartbeat_s": (30.0, "the other processes end 30 s after the last sign of life of one"),
    "data.seed": (0, "the choice of the problems is fixed; run.seed orders them"),
    "rollout.refill_limit": (4, "a step samples up to 4 further batches"),
    "rollout.max_top_bytes": (8 * 2**30, "give a smaller rollout.top_logprobs, data.batch_size or response"),
    "rollout.max_route_bytes": (8 * 2**30, "give a smaller data.batch_size or response"),
    "rollout.router": (None, "list the servers in rollout.urls or rollout.discovery"),
    "rollout.offload_state": (True, "the state leaves the devices whenever rollout.colocated samples on them"),
    "rollout.weight_quantization": ("none", "give rollout.inject.quantize, and a 16-bit rollout.dtype as inject.dtype"),
    "rollout.seeded": (True, "requests have seeds with rollout.update = wait"),
    "rollout.limits.connect_timeout_s": (10.0, "a server has 10 s to accept a connection"),
    "rollout.limits.max_attempts": (6, _RETRY),
    "rollout.limits.backoff_s": (0.25, _RETRY),
    "rollout.limits.max_backoff_s": (8.0, _RETRY),
    "rollout.verify.rounds": (3, _BAND),
    "rollout.verify.floors.bfloat16": (0.02, _BAND),
    "rollout.verify.floors.float16": (0.0025, _BAND),
    "rollout.verify.floors.float32": (1e-5, _BAND),
    "rollout.verify.ceilings.bfloat16": (0.08, _BAND),
    "rollout.verify.ceilings.float16": (0.01, _BAND),
    "rollout.verify.ceilings.float32": (1e-3, _BAND),
    "rollout.verify.mixture_factor": (3.0, _BAND),
    "rollout.verify.rounded_floor": (0.1, _BAND),
    "rollout.verify.rounded_ceiling": (0.6, _BAND),
    "rollout.verify.rounded_prompts": (16, _BAND),
    "rollout.verify.rounded_own_floor": (0.001, _BAND),
    "rollout.verify.seed": (0, "the probes are fixed"),
    "rollout.episode.max_reply_chars": (16384, "what a tool or an environment says is cut after 16384 characters"),
    "rollout.inject.seed": (0, "the noise is fixed; run.seed changes the samples"),
    "publish.in_place": (False, "servers load the weights as in any other run"),
    "publish.anchor_every": (16, "every 16th version is written whole"),
    "publish.straggler_s": (30.0, "a publish waits 30 s for slower servers"),
    "eval.seed": (0, "the seed of an evaluation is fixed"),
    "checkpoint.upload": ("", "give checkpoint.after_save: COMMAND, which copies each checkpoint"),
    "checkpoint.upload_wait_s": (600.0, "the end of a run waits run.grace_s for checkpoint.after_save"),
    "diagnosis.entropy_edges": ([0.01, 0.1, 0.5, 1.0, 2.0], _BUCKETS),
    "diagnosis.staleness_buckets": (4, _BUCKETS),
    "diagnosis.reference_steps": (10, "a rise is measured from the first 10 steps"),
    "diagnosis.self_causes": (["shape", "mesh", "remat"], _SELF),
    "diagnosis.self_responses": (64, _SELF),
}
"""The default of each removed key, as a file writes it, and a text: what holds instead, or what a user does."""


@dataclass(frozen=True)
class Config:
    """All settings of a run. The file config.yaml of the run directory holds them, and they load again from it."""

    removed_keys: ClassVar = REMOVED
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    lora: LoraConfig = field(default_factory=LoraConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    diagnosis: DiagnosisConfig = field(default_factory=DiagnosisConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    record: RecordConfig = field(default_factory=RecordConfig)

    def __post_init__(self) -> None:
        """Raises ValueError for the first of the settings that exclude each other."""
        correction = self.correction.resolved()
        conflicts = [self._conflicts(correction), self._token_conflicts(correction)]
        if can(self.rollout.engine, "is_exact"):
            conflicts.append(self._exact_conflicts(correction))
        if text := next(itertools.chain(*conflicts), ""):
            raise ValueError(text)

    def _conflicts(self, correction: CorrectionConfig) -> Iterator[str]:
        """Yields a message for settings of two sections that exclude each other."""
        size, parts, part = self.data.batch_size, self.loss.mini_batches, correction.part
        estimator, engine, store = self.advantage.estimator, self.rollout.engine, self.publish.store
        if (self.data.prompt_key or self.data.answer_key) and self.data.task != "file" and not self.eval.datasets:
            yield "data.prompt_key and data.answer_key are for files, but the run reads none"
        if size % parts:
            yield f"data.batch_size = {size} does not divide into loss.mini_batches = {parts}"
        if self.rollout.refill and estimator == "reinforce":
            carry = "with advantage.estimator = reinforce they carry loss, too"
            remedy = "choose another estimator, or set rollout.refill = false"
            yield f"rollout.refill replaces groups whose rewards are all equal, but {carry}: {remedy}"
        if self.loss.old_logprobs == "rollout" and correction.level != "none":
            yield "loss.old_logprobs = rollout puts the mismatch into the ratio already; correction.level must be none"
        if part != "whole" and self.max_version_lag == 0:
            yield f"correction.part = {part} is for rollouts that may be stale: give rollout.max_staleness"
        if estimator == "optimal_token" and part != "whole":
            needed = f"advantage.estimator = optimal_token needs correction.part = whole, got {part}"
            yield f"{needed}: its energies are weighted by the whole ratio"
        if store != "shared" and not can(engine, "serves"):
            needed = f"rollout.engine must be {named_engines('serves')}, got {engine}"
            yield f"publish.store = {store} is for servers: {needed}"

    def _token_conflicts(self, correction: CorrectionConfig) -> Iterator[str]:
        """Yields a message for settings that rule out the correction of single tokens or the clip of stale tokens."""
        loss, updates = self.loss, self.loss.mini_batches * self.loss.epochs
        if correction.needs_tops and self.rollout.reported == 0:
            wish = "score_centering" if correction.score_centering else "region_over = tops"
            remedy = "set rollout.top_logprobs, such as 20, or rollout.top_k"
            yield f"correction.{wish} needs the sampler's likeliest tokens: {remedy}"
        if correction.score_centering and loss.kind in ("gspo", "vespo"):
            kinds = "loss.kind must be policy_gradient, ppo_clip or cispo"
            yield f"correction.score_centering is for losses of single tokens: {kinds}, got {loss.kind}"
        if correction.score_centering and loss.old_logprobs == "rollout":
            weights = "correction.score_centering weights tokens by correction.level"
            yield f"{weights}: loss.old_logprobs must be trainer, got rollout"
        is_plain = loss.kind == "policy_gradient" and correction.level == "none"
        if correction.score_centering and updates > 1 and not is_plain:
            kinds = f"loss.kind = {loss.kind} and correction.level = {correction.level}"
            got = f"loss.mini_batches and loss.epochs must be 1, got {loss.mini_batches} and {loss.epochs}"
            yield f"correction.score_centering needs one update a batch with {kinds}: {got}"
        if updates == 1 and loss.old_logprobs == "trainer":
            remedy = "set loss.old_logprobs = rollout, or several mini_batches or epochs"
            if loss.kind == "vespo":
                yield f"loss.kind = vespo is policy_gradient where the ratio is 1: {remedy}"
            if loss.clips_stale:
                yield f"loss.stale_clip_low and stale_clip_high do nothing where the ratio is 1: {remedy}"
        if loss.clips_stale and self.max_version_lag == 0:
            remedy = "give rollout.max_staleness"
            yield f"loss.stale_clip_low and stale_clip_high are for rollouts that may be stale: {remedy}"

    def _exact_conflicts(self, correction: CorrectionConfig) -> Iterator[str]:
        """Yields a message for settings that one executable, which samples and trains, cannot have."""
        exact, part, dtype = "rollout.engine = exact", self.correction.part, self.precision.compute_dtype
        if self.mesh.context > 1:
            yield f"{exact} samples from whole rows: mesh.context = {self.mesh.context} must be 1"
        if self.rollout.dtype != dtype:
            must = f"rollout.dtype = {self.rollout.dtype} must be precision.compute_dtype = {dtype}"
            yield f"{exact} samples with the trainer's executable: {must}"
        if self.loss.mini_batches * self.loss.epochs > 1:
            yield f"{exact} makes one update a step: loss.mini_batches and loss.epochs must be 1"
        scores_first = {
            "advantage.estimator = optimal_token": self.advantage.estimator == "optimal_token",
            "correction.region = moment": self.correction.cuts_batch,
        }
        for key in (key for key, is_set in scores_first.items() if is_set):
            yield f"{key} needs a forward before the update, which {exact} does not make: choose another"
        if part != "whole":
            yield f"{exact} has no older policies to tell apart: correction.part = {part} must be whole"
        if (self.loss.kl != "none" or self.loss.router_balance) and correction.normalize:
            remedy = "correction.normalize must be false, or loss.kl none and loss.router_balance 0"
            yield f"{exact} knows the mean weight only after the gradient of a KL penalty or router loss: {remedy}"

    def check_start(self) -> None:
        """Raises ValueError for settings that do nothing, fail late or train wrongly. An older file may have some."""
        if (buffer := self.advantage.overlong_buffer_tokens) > (most := self.rollout.max_response_tokens):
            said = f"advantage.overlong_buffer_tokens = {buffer}"
            raise ValueError(f"{said} must be at most rollout.max_response_tokens = {most}")
        if self.checkpoint.keep_best and not self.eval.every:
            raise ValueError("checkpoint.keep_best needs evaluations: set eval.every above 0")
        if self.loss.old_logprobs == "rollout" and self.loss.kind == "policy_gradient":
            raise ValueError("loss.old_logprobs = rollout does nothing for loss.kind = policy_gradient: give trainer")
        if self.advantage.estimator == "optimal_token" and (rows := self.rollout.episode.max_rows) > 1:
            compared = "advantage.estimator = optimal_token compares responses of one row"
            raise ValueError(f"{compared}: rollout.episode.max_rows = {rows} must be 1")
        if self.optimizer.eps == 0.0:
            raise ValueError("optimizer.eps must be above 0, because a gradient may be exactly 0")
        self.record.check_names()

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt plus the longest response, in tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_version_lag(self) -> int:
        """The largest number of policy versions between the sampling of a batch and the update on it."""
        return self.rollout.max_staleness + self.rollout.inject.staleness

    @property
    def trained_tops(self) -> int:
        """The number of the sampler's likeliest tokens that an update gets for each position; 0 if it needs none."""
        needed = self.rollout.is_cut or self.correction.needs_tops or can(self.rollout.engine, "is_exact")
        return self.rollout.reported if needed else 0

    @property
    def max_engine_tokens(self) -> int:
        """The longest prompt plus the longest response that the engine samples, evaluations included, in tokens."""
        longest = max(self.rollout.max_response_tokens, self.eval.max_response_tokens or 0)
        return self.data.max_prompt_tokens + longest

    @property
    def num_sequences(self) -> int:
        """The largest number of rows of tokens in a step: ``rollout.episode.max_rows`` for each response."""
        return self.data.batch_size * self.rollout.group_size * self.rollout.episode.max_rows
