"""Measures the accuracy of a policy on one dataset: ``rljax evaluate --path PATH [--dataset FILE] [--a value ...]``.

PATH is a Hugging Face directory, a run directory, or one of its checkpoints. The program prints one JSON object with
the accuracy (avg@n), pass@k and the response length. A training run measures the same with its own engine (``eval.*``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from rljax.data.gym_problems import task_names
from rljax.data.prompts import (
    TOYS,
    DataConfig,
    Problem,
    ProblemsConfig,
    evaluation_datasets,
    prompt_ids,
    say_marks,
    task_reward,
)
from rljax.data.tokenizer import load_tokenizer
from rljax.errors import caller_errors, check_at_least, naming, run_cli
from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.hub import model_directory
from rljax.policy.model import param_shardings
from rljax.rollout.build import connect, make_engine
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.kinds import Copying, can, named_engines
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.run.build import make_scorer, make_source
from rljax.run.checkpoint import BEST, Checkpointer
from rljax.run.config import Config, SamplesConfig
from rljax.run.config_file import load_config
from rljax.run.data_check import refuse_placeholders
from rljax.run.directory import recorded_config
from rljax.run.evaluation import all_failed_line, summarize_scores
from rljax.run.fingerprint import array_checksums, json_checksum
from rljax.run.sampling import Sampler, Scored
from rljax.run.training import load_merged, wanted_state
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.state import TrainState

LONGEST_RESPONSE = 8192
OF_DATA = (*(field.name for field in dataclasses.fields(ProblemsConfig)), "task_options", "task_instruction")
OF_ROLLOUT = ("engine", "urls", "api_key_file", "dtype", "environment", "episode")
"""The names of arguments that are also settings of a run: ``OF_DATA`` in ``data``, ``OF_ROLLOUT`` in ``rollout``."""


@dataclass(frozen=True)
class EvaluateArguments(ProblemsConfig, SamplesConfig):
    """The arguments of the evaluation."""

    path: str = "configs/toy-base"
    """A Hugging Face directory, OWNER/NAME on the hub, a run directory, or one of its checkpoints, such as
    runs/x/checkpoints/120."""
    step: int | None = None
    """The checkpoint to load from a run directory. None: the newest."""
    best: bool = False
    """Load the best checkpoint of a run directory (``checkpoint.keep_best``)."""
    model: str | None = None
    """The Hugging Face directory, or OWNER/NAME, of the model that the run started from. None: the run's
    ``model.path``."""
    dataset: str = "toy"
    """toy, toy_swaps, calculator or ``reasoning_gym:NAME`` for the evaluation split of that task, or a file as in
    ``data.path``."""
    task_options: tuple[str, ...] = ()
    """Settings of a reasoning-gym task, as in ``data.task_options``."""
    task_instruction: str = ""
    """A text that follows each question of a reasoning-gym task, as in ``data.task_instruction``."""
    max_response_tokens: int | None = None
    """Longest response (tokens). None: enough for a toy task; otherwise 8192, or less if the longest prompt leaves
    fewer positions of the model."""
    engine: Copying = "jax"
    """jax: sample in this process. vllm, sglang: sample from running servers of that kind. The weights of a run are
    published to the servers first. For a Hugging Face directory, the servers must hold the model already."""
    urls: tuple[str, ...] = ()
    """Base URLs of the servers."""
    api_key_file: str | None = None
    """The file with the key of the servers."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the embedded engine and of the published weights."""
    batch_size: int = 256
    """Problems that the embedded engine decodes at the same time."""
    reward: str | None = None
    """The function that scores a response, as in ``data.reward``. None: the reward of the task; math for a file."""
    environment: str | None = None
    """The environment of trajectories of several turns, as in ``rollout.environment``. It replaces ``reward``. None:
    the policy answers each problem once."""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """The limits of trajectories with an environment, as in ``rollout.episode``."""
    seed: int = 0
    """Seed of the sampling."""
    out: str | None = None
    """JSONL file for every response with its reward and length. None: no file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "batch_size")
        if can(self.engine, "serves") != bool(self.urls):
            raise ValueError(f"urls are needed with engine = {named_engines('serves')}, and only there")
        if (self.prompt_key or self.answer_key) and (self.dataset in TOYS or task_names(self.dataset)):
            raise ValueError(f"prompt_key and answer_key are for files, but the dataset is {self.dataset}")
        if self.best and self.step is not None:
            raise ValueError("best and step name two checkpoints: give one")
        if self.environment is not None and self.reward is not None:
            raise ValueError("environment and reward both score the responses: give one")


@dataclass(frozen=True)
class Policy:
    """A policy on disk."""

    config: PolicyConfig
    hf_path: str  # the Hugging Face directory of the model, with the tokenizer
    run: Path | None = None  # the run directory with the trained weights; None: the weights are in ``hf_path``
    step: int | None = None  # the step of the checkpoint; None without a run
    folder: str = "checkpoints"  # the folder of the run directory that holds the checkpoint

    def load(self, mesh: Mesh) -> Any:
        """Returns the parameters on the mesh, with adapters merged in. Raises ValueError if they cannot be read."""
        if self.run is None:
            return load_params(self.hf_path, self.config, param_shardings(self.config, mesh))
        merged = load_merged(self.settings(), self.config, mesh)
        state, base = self.load_state(mesh)
        if merged is None:
            return state.params
        if base not in (None, json_checksum(array_checksums(merged.base))):
            raise ValueError(f"{self.hf_path} is not the model under the adapters of {self.run}: it has other weights")
        return merged(state.params)

    def stops(self, end: int) -> tuple[int, ...]:
        """Returns the ids that end a response: the model's, or ``end`` if it has none, and the run's stop tokens."""
        return self.config.stops(end, self.settings().rollout.stop_token_ids if self.run else ())

    def settings(self) -> Config:
        """Returns the configuration of the policy's run, with the model's local directory as ``model.path``."""
        assert self.run is not None
        settings = recorded_config(self.run)
        return dataclasses.replace(settings, model=dataclasses.replace(settings.model, path=self.hf_path))

    def load_state(self, mesh: Mesh) -> tuple[TrainState, str | None]:
        """Returns the training state on the mesh, and the checksum of the model under trained adapters (else None).

        Raises ValueError if the policy's run cannot be read.
        """
        assert self.run is not None
        assert self.step is not None
        folder = Checkpointer(self.run / self.folder, read_only=True)
        with contextlib.closing(folder) as checkpointer, caller_errors(RuntimeError):
            state, host = checkpointer.restore(self.step, wanted_state(self.settings(), self.config, mesh))
            return state, host.get("fingerprints", {}).get("base")


def find_policy(path: str | Path, *, step: int | None = None, best: bool = False, model: str | None = None) -> Policy:
    """Returns the policy at ``path``: a Hugging Face directory, OWNER/NAME, a run directory or one of its checkpoints.

    In a run directory, ``step`` (None: the newest) or ``best`` chooses the checkpoint, and ``model`` replaces
    ``model.path``. Raises ValueError if there is no such policy, or an argument does not fit the path.
    """
    path = Path(path)
    whole = path.absolute()
    is_checkpoint = path.name.isdecimal() and whole.parent.name in ("checkpoints", BEST)
    if is_checkpoint and (whole.parents[1] / "config.yaml").is_file():
        if step is not None or best:
            raise ValueError(f"{path} is a checkpoint already: leave out the step and the best one")
        return find_policy(whole.parents[1], step=int(path.name), best=whole.parent.name == BEST, model=model)
    if not (path / "config.yaml").is_file():
        if step is not None or best or model is not None:
            raise ValueError(f"{path} is not a run directory: it has no config.yaml")
        directory = model_directory(str(path))
        return Policy(read_config(directory), directory)
    settings = recorded_config(path)
    folder = BEST if best else "checkpoints"
    if not (path / folder).is_dir():
        missing = "best checkpoint; was it run with checkpoint.keep_best?" if best else "checkpoints"
        raise ValueError(f"{path} has no {missing}")
    with contextlib.closing(Checkpointer(path / folder, read_only=True)) as checkpointer:
        steps = checkpointer.all_steps()
    taken = steps[-1] if step is None and steps else step
    if taken not in steps:
        raise ValueError(f"no checkpoint of step {taken} in {path}; there are {steps}")
    with naming(f"the model of {path} (rljax evaluate and rljax export take another by --model)"):
        directory = model_directory(model or settings.model.path)
        return Policy(read_config(directory), directory, path, taken, folder)


@contextlib.contextmanager
def open_engine(
    policy: Policy, rollout: RolloutConfig, *, prompt_tokens: int, response_tokens: int
) -> Iterator[RolloutEngine]:
    """Opens an engine (jax, vllm or sglang) that holds the policy, for prompts and responses of these lengths.

    The weights of a run are published to the engine. Servers must already hold the model of a Hugging Face directory.
    Raises ConfigError if the weights cannot be read, or the engine cannot be used.
    """
    with caller_errors():
        if can(rollout.engine, "serves") and policy.run is None:
            made: RolloutEngine = connect(rollout.urls, kind=rollout.engine, api_key_file=rollout.api_key_file)
        else:
            mesh = make_mesh(MeshConfig(), jax.devices()[:1] if can(rollout.engine, "serves") else None)
            params = policy.load(mesh)
            longest = prompt_tokens + response_tokens
            made = make_engine(rollout, policy.config, mesh, max_prompt_tokens=prompt_tokens, max_tokens=longest)
            made.publish(params, policy.step or 0)
    with contextlib.closing(made):
        yield made


def in_batches(problems: Sequence[Problem], size: int) -> Iterator[tuple[int, list[Problem]]]:
    """Yields pairs, in order: the position of the first problem, and a list of at most ``size`` problems."""
    for start in range(0, len(problems), size):
        yield start, [problems[i] for i in range(start, min(start + size, len(problems)))]


def response_limit(wanted: int | None, policy: PolicyConfig, prompt_tokens: int) -> int:
    """Returns the longest response (tokens): ``wanted``, or up to ``LONGEST_RESPONSE`` if it is None.

    Raises ValueError if the longest prompt, ``prompt_tokens``, leaves fewer positions than ``wanted``, or none.
    """
    room = policy.max_position_embeddings - prompt_tokens
    if (least := 1 if wanted is None else wanted) > room:
        have = f"more than the model's {policy.max_position_embeddings} positions"
        raise ValueError(f"max_response_tokens = {least} and the longest prompt, {prompt_tokens} tokens, are {have}")
    return min(LONGEST_RESPONSE, room) if wanted is None else wanted


def main(argv: Sequence[str]) -> int:
    """Evaluates a policy and prints one JSON object; returns the exit status. Raises ConfigError for bad arguments."""
    arguments = load_config(EvaluateArguments, argv, prog="rljax evaluate", description=__doc__ or "")
    with caller_errors():
        policy = find_policy(arguments.path, step=arguments.step, best=arguments.best, model=arguments.model)
        tokenizer = load_tokenizer(policy.hf_path)
        task = arguments.dataset if task_names(arguments.dataset) else "toy"
        reward = arguments.environment or arguments.reward or task_reward(arguments.dataset)
        data = DataConfig(task, reward=reward, **{name: getattr(arguments, name) for name in OF_DATA})
        rollout = RolloutConfig(**{name: getattr(arguments, name) for name in OF_ROLLOUT})
        ((name, problems),) = evaluation_datasets([arguments.dataset], data, tokenizer).items()
        say_marks(problems, tokenizer)
        prompt_tokens = max(len(prompt_ids(problem, tokenizer)) for problem in problems)
        toy = TOYS.get(arguments.dataset)
        toy_limit = toy.max_response_tokens if toy else None
        wanted = toy_limit if arguments.max_response_tokens is None else arguments.max_response_tokens
        if arguments.environment is not None:  # its prompts may be longer than those of the problems
            allowed = (policy.settings().data if policy.run else data).max_prompt_tokens
            room = policy.config.max_position_embeddings - (wanted or policy.config.max_position_embeddings // 2)
            prompt_tokens = max(prompt_tokens, min(allowed, room))
        limit = response_limit(wanted, policy.config, prompt_tokens)
        if arguments.environment is None:
            refuse_placeholders(problems, reward, arguments.dataset)
        scorer = make_scorer(data, rollout)
        if arguments.out is not None:  # a file that cannot be written is found before the sampling
            Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
            Path(arguments.out).open("a").close()
    sampling = SamplingParams(limit, arguments.temperature, policy.stops(tokenizer.eos_token_id))
    at_once = len(problems) if can(arguments.engine, "serves") else arguments.batch_size
    scored: list[Scored] = []
    total = len(problems) * arguments.n
    with (
        scorer,
        open_engine(policy, rollout, prompt_tokens=prompt_tokens, response_tokens=limit) as engine,
        tqdm(total=total, desc=name, unit="response", file=sys.stderr) as bar,
    ):
        data = dataclasses.replace(data, max_prompt_tokens=prompt_tokens)
        source = make_source(data, rollout, engine, tokenizer, scorer)
        sampler = Sampler(source, sampling, arguments.n)
        for start, part in in_batches(problems, at_once):
            for one in sampler.scored(part, arguments.seed + start):
                response = dataclasses.replace(one.response, prompt_index=one.response.prompt_index + start)
                scored.append(one._replace(response=response))
                bar.update()
        errors = source.pop_metrics()["reward/errors"]
    if line := all_failed_line(errors, total):
        print(f"warning: {line}", file=sys.stderr)
    if arguments.out is not None:
        write_responses(Path(arguments.out), problems, scored)
    where = {"step": policy.step} if policy.run is not None else {}
    result = summarize_scores(scored, n=arguments.n, pass_k=arguments.pass_k)
    counts = {"problems": len(problems), "n": arguments.n, "reward_errors": errors}
    print(json.dumps({"path": arguments.path, **where, "dataset": name, **counts, **result}))
    return 0


def write_responses(path: Path, problems: Sequence[Problem], scored: Sequence[Scored]) -> None:
    """Writes one JSON object for each response, one a line.

    The keys are problem, sample, prompt, answer, response, reward, response_length and truncated. The reward of a
    trajectory that failed is null.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        for one in sorted(scored, key=lambda one: one.place):
            index, sample = one.place
            problem = {"prompt": problems[index]["prompt"], "answer": problems[index]["answer"]}
            line = {"problem": index, "sample": sample, **problem, "response": one.text}
            line["reward"] = None if math.isnan(one.reward) else one.reward
            line |= {"response_length": one.response.length, "truncated": one.response.truncated}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(run_cli(main))
