"""The configuration of a run: each room's frozen dataclass under its own key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rljax.algorithms.advantages import AdvantageConfig
from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.data.prompts import DataConfig
from rljax.rewards.pool import RewardConfig
from rljax.rollout.types import RolloutConfig
from rljax.run.checkpoint import CheckpointConfig
from rljax.run.guard import GuardConfig
from rljax.run.rate import ScheduleConfig
from rljax.sharding import MeshConfig
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.packing import PackingConfig
from rljax.trainer.state import OptimizerConfig
from rljax.trainer.step import PrecisionConfig


@dataclass(frozen=True)
class RunConfig:
    """The run itself.

    Attributes:
      dir: run directory: config.yaml, metrics.jsonl, tb/, checkpoints/, summary.json, report.png.
      steps: rollout batches, one update each at most.
      seed: of the rollouts and of the order of the prompts.
      resume: auto: go on from the newest checkpoint in ``dir`` if there is one; never: refuse a ``dir`` that holds a
        run; or the path of another run directory to go on from.
      profile_steps: first and last step (from 1) of a JAX profile, written into ``dir``/profile; none: no profile.
    """

    dir: str = "runs/run"
    steps: int = 100
    seed: int = 0
    resume: str = "auto"
    profile_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.profile_steps and not (
            len(self.profile_steps) == 2 and 1 <= self.profile_steps[0] <= self.profile_steps[1]
        ):
            raise ValueError(f"profile_steps must be two steps, the first at least 1, got {list(self.profile_steps)}")


@dataclass(frozen=True)
class ModelConfig:
    """The policy to start from.

    Attributes:
      path: an HF directory (config.json, safetensors, tokenizer.json), or OWNER/NAME of a model on the hub, which is
        fetched once; the run's config.yaml then names the directory that it was fetched to.
    """

    path: str = "runs/toy-base"


@dataclass(frozen=True)
class EvalConfig:
    """Accuracy through the engine that the run trains with, in the step's own row.

    Attributes:
      every: steps between evaluations, the last step included; 0: never.
      at_start: also evaluate the policy that the run starts from; in the first row, as ``eval/.../..._at_start``.
      datasets: each a Parquet or JSONL file, ``NAME=FILE``, or toy or toy_swaps for its held problems; none: the toy's
        held problems, of a file task nothing.
      n: responses a problem: the accuracy is avg@n.
      pass_k: which pass@k to estimate from them; each at most n.
      temperature: of the draws; 0: greedy.
      max_response_tokens: longest response (tokens); None: as in the rollouts.
      seed: of the draws, the same at each evaluation.
    """

    every: int = 20
    at_start: bool = False
    datasets: tuple[str, ...] = ()
    n: int = 1
    pass_k: tuple[int, ...] = ()
    temperature: float = 0.0
    max_response_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"every must not be negative, got {self.every}")
        check_draws(self.n, self.pass_k, self.temperature)
        if self.max_response_tokens is not None and self.max_response_tokens < 1:
            raise ValueError(f"max_response_tokens must be at least 1, got {self.max_response_tokens}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    @property
    def is_wanted(self) -> bool:
        """Whether the run is evaluated at any time."""
        return self.every > 0 or self.at_start


def check_draws(n: int, pass_k: Sequence[int], temperature: float) -> None:
    """Raises ValueError, opening with the field's name, for numbers of responses that make no sense together."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    if temperature == 0.0 and n > 1:
        raise ValueError(f"temperature = 0 draws the same response each time, but n = {n}: set a temperature")
    if any(not 1 <= k <= n for k in pass_k):
        raise ValueError(f"pass_k = {list(pass_k)} must be from 1 to n = {n}")


@dataclass(frozen=True)
class Config:
    """Everything that decides a run; written resolved into the run directory, from which it reloads."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    diagnosis: DiagnosisConfig = field(default_factory=DiagnosisConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        if self.data.batch_size % self.loss.mini_batches:
            raise ValueError(
                f"data.batch_size = {self.data.batch_size} does not divide into loss.mini_batches = "
                f"{self.loss.mini_batches}"
            )
        correction = self.correction.resolved()
        if self.loss.old_logprobs == "rollout" and correction.level != "none":
            raise ValueError(
                "loss.old_logprobs = rollout puts the mismatch into the ratio already; correction.level must be none"
            )
        if self.rollout.engine == "exact":
            self._check_exact()

    def _check_exact(self) -> None:
        """One executable samples and trains: one dtype, and one update a rollout batch."""
        if self.rollout.dtype != self.precision.compute_dtype:
            raise ValueError(
                f"rollout.engine = exact samples with the trainer's executable: rollout.dtype = {self.rollout.dtype} "
                f"must be precision.compute_dtype = {self.precision.compute_dtype}"
            )
        if self.loss.mini_batches * self.loss.epochs > 1:
            raise ValueError(
                "rollout.engine = exact makes one update a step: loss.mini_batches and loss.epochs must be 1"
            )
        if self.loss.kl != "none" and self.correction.resolved().normalize:
            raise ValueError(
                "rollout.engine = exact knows the mean weight only after the KL penalty's gradient: "
                "correction.normalize must be false, or loss.kl none"
            )

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus longest response (tokens)."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_engine_tokens(self) -> int:
        """Longest prompt plus longest response (tokens) that the engine is asked for, evaluations included."""
        longest = max(self.rollout.max_response_tokens, self.eval.max_response_tokens or 0)
        return self.data.max_prompt_tokens + longest

    @property
    def reward(self) -> RewardConfig:
        """What scores responses, and where."""
        return RewardConfig(self.data.reward_name, self.data.reward_workers, self.data.reward_timeout_s)

    @property
    def num_sequences(self) -> int:
        """Responses of a step."""
        return self.data.batch_size * self.rollout.group_size
