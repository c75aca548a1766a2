"""Accuracy of a policy on one dataset: ``python -m rljax.evaluate --path PATH [--dataset FILE] [--a value ...]``.

PATH is an HF directory, a run directory, or one of its checkpoints. Prints one JSON object: accuracy (avg@n), pass@k,
response length. The training loop asks the same of the engine it trains with, at its own times (``eval.*``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from rljax.data.prompts import FILE_REWARD, TOYS, DataConfig, Problem, evaluation_datasets
from rljax.data.tokenizer import load_tokenizer
from rljax.errors import caller_errors, run_cli
from rljax.policy.config import PolicyConfig, read_config
from rljax.policy.hf import load_params
from rljax.policy.hub import model_directory
from rljax.policy.qwen3 import param_shardings
from rljax.rewards.pool import RewardConfig, make_pool
from rljax.rollout.build import serve_policy
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.jax_engine import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.rollout.vllm.served_model import ServedModel
from rljax.run.checkpoint import BEST, Checkpointer
from rljax.run.config import Config, check_draws
from rljax.run.config_file import load_config
from rljax.run.evaluation import Scored, score_responses, summarize_scores
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.state import abstract_state, make_optimizer

LONGEST_RESPONSE = 8192


@dataclass(frozen=True)
class Arguments:
    """What to evaluate, on what, and how.

    Attributes:
      path: HF directory or OWNER/NAME on the hub; run directory; or one checkpoint of it, as runs/x/checkpoints/120.
      step: of a run directory, the checkpoint to take; None: the newest.
      best: of a run directory, the best one (``checkpoint.keep_best``).
      dataset: toy or toy_swaps (held problems), or a Parquet or JSONL file of problems.
      n: responses a problem: the accuracy is avg@n.
      pass_k: which pass@k to estimate from them.
      temperature: of the draws; 0: greedy.
      max_response_tokens: longest response (tokens); None: what the toy needs; of a file 8192, or what the model has
        positions for.
      engine: jax, in this process; or vllm: an HF directory's servers are asked as they stand, a run's weights are
        published to them first.
      urls: base URLs of the vLLM servers.
      dtype: of the embedded engine, and of what is published.
      batch_size: problems that the embedded engine decodes at a time.
      reward: as ``data.reward``; None: the toy's own, of a file math.
      reward_workers: as ``data.reward_workers``.
      reward_timeout_s: as ``data.reward_timeout_s``.
      chat_template: as ``data.chat_template``.
      seed: of the toy's held problems (``data.seed`` of the run) and of the draws.
      out: JSONL file for every response, its reward and length; None: none.
    """

    path: str = "runs/toy-base"
    step: int | None = None
    best: bool = False
    dataset: str = "toy"
    n: int = 1
    pass_k: tuple[int, ...] = ()
    temperature: float = 0.0
    max_response_tokens: int | None = None
    engine: Literal["jax", "vllm"] = "jax"
    urls: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_size: int = 256
    reward: str | None = None
    reward_workers: int | None = None
    reward_timeout_s: float = 10.0
    chat_template: bool | Literal["auto"] = "auto"
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        check_draws(self.n, self.pass_k, self.temperature)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if (self.engine == "vllm") != bool(self.urls):
            raise ValueError("urls are needed with engine = vllm, and only there")
        if self.best and self.step is not None:
            raise ValueError("best and step name two checkpoints: give one")


@dataclass(frozen=True)
class Policy:
    """A policy on disk.

    Attributes:
      config: its shape.
      hf_path: HF directory with its tokenizer.
      run: run directory that its weights come from; None: they are those of ``hf_path``.
      step: the checkpoint's.
      best: whether it is the best one.
    """

    config: PolicyConfig
    hf_path: str
    run: Path | None = None
    step: int | None = None
    best: bool = False

    def load(self, mesh: Mesh) -> Any:
        """Float32 parameters on the mesh. Raises ValueError when they cannot be read."""
        if self.run is None:
            return load_params(self.hf_path, self.config, param_shardings(self.config, mesh))
        settings = load_config(Config, [str(self.run / "config.yaml")], prog="evaluate", description="")
        dynamic = settings.precision.compute_dtype == "float16"
        wanted = abstract_state(self.config, make_optimizer(settings.optimizer), mesh, dynamic_scale=dynamic)
        assert self.step is not None
        with contextlib.closing(Checkpointer(_checkpoints(self.run, self.best), read_only=True)) as checkpointer:
            try:
                return checkpointer.restore(self.step, wanted)[0].params
            except RuntimeError as error:
                raise ValueError(str(error)) from error


def find_policy(path: str | Path, *, step: int | None = None, best: bool = False) -> Policy:
    """The policy at ``path``: an HF directory, a run directory, or a checkpoint folder in one.

    Raises:
      ValueError: it is none of these, or has no such checkpoint.
    """
    path = Path(path)
    if path.name.isdigit() and (path.parents[1] / "config.yaml").is_file():
        return find_policy(path.parents[1], step=int(path.name), best=path.parent.name == BEST)
    if not (path / "config.yaml").is_file():
        if step is not None or best:
            raise ValueError(f"{path} is not a run directory: it has no config.yaml")
        directory = model_directory(str(path))
        return Policy(read_config(directory), directory)
    settings = load_config(Config, [str(path / "config.yaml")], prog="evaluate", description="")
    folder = _checkpoints(path, best)
    if not folder.is_dir():
        missing = "best checkpoint; was it run with checkpoint.keep_best?" if best else "checkpoints"
        raise ValueError(f"{path} has no {missing}")
    with contextlib.closing(Checkpointer(folder, read_only=True)) as checkpointer:
        steps = checkpointer.all_steps()
    taken = (steps[-1] if steps else None) if step is None else step
    if taken not in steps:
        raise ValueError(f"no checkpoint of step {taken} in {path}; there are {steps}")
    directory = model_directory(settings.model.path)
    return Policy(read_config(directory), directory, path, taken, best)


@contextlib.contextmanager
def open_engine(
    policy: Policy, engine: str, urls: Sequence[str], dtype: str, *, prompt_tokens: int, response_tokens: int
) -> Iterator[RolloutEngine]:
    """An engine that holds the policy: embedded; servers as they stand (HF directory); or published to (a run).

    Args:
      policy: what it draws from.
      engine: jax or vllm.
      urls: of the servers.
      dtype: of the embedded engine, and of what is published.
      prompt_tokens: longest prompt.
      response_tokens: longest response.
    """
    made: RolloutEngine
    with caller_errors():
        if engine == "vllm" and policy.run is None:
            made = ServedModel(urls)
        else:
            mesh = make_mesh(MeshConfig(), jax.devices()[:1] if engine == "vllm" else None)
            params = policy.load(mesh)
            if engine == "jax":
                made = JaxEngine(policy.config, dtype, prompt_tokens, mesh=mesh)
            else:
                made = serve_policy(urls, policy.config, dtype, prompt_tokens + response_tokens)
            made.publish(params, policy.step or 0)
    with contextlib.closing(made):
        yield made


def in_batches(problems: Sequence[Problem], size: int) -> Iterator[tuple[int, list[Problem]]]:
    """(position of the first, at most ``size`` problems), in order."""
    for start in range(0, len(problems), size):
        yield start, [problems[i] for i in range(start, min(start + size, len(problems)))]


def response_limit(wanted: int | None, policy: PolicyConfig, prompt_tokens: int) -> int:
    """Longest response (tokens), of None the default. Raises ValueError when it does not fit the model's positions."""
    room = policy.max_position_embeddings - prompt_tokens
    if wanted is None:
        return min(LONGEST_RESPONSE, room)
    if wanted > room:
        raise ValueError(
            f"max_response_tokens = {wanted} and the longest prompt, {prompt_tokens} tokens, are more than the model's "
            f"{policy.max_position_embeddings} positions"
        )
    return wanted


def main(argv: Sequence[str]) -> int:
    """Evaluates and prints one JSON object; returns the exit status."""
    arguments = load_config(Arguments, argv, prog="python -m rljax.evaluate", description=__doc__ or "")
    with caller_errors():
        policy = find_policy(arguments.path, step=arguments.step, best=arguments.best)
        tokenizer = load_tokenizer(policy.hf_path)
        data = DataConfig(seed=arguments.seed, chat_template=arguments.chat_template)
        ((name, problems),) = evaluation_datasets([arguments.dataset], data, tokenizer).items()
        prompt_tokens = max(len(tokenizer.encode(problem["prompt"])) for problem in problems)
        toy = TOYS.get(arguments.dataset)
        wanted = arguments.max_response_tokens
        if wanted is None and toy:
            wanted = toy.max_response_tokens
        limit = response_limit(wanted, policy.config, prompt_tokens)
        function = arguments.reward or (toy.reward if toy else FILE_REWARD)
        pool = make_pool(RewardConfig(function, arguments.reward_workers, arguments.reward_timeout_s))
    stops = policy.config.stop_token_ids or (tokenizer.eos_token_id,)
    sampling = SamplingParams(limit, arguments.temperature, stops)
    at_once = arguments.batch_size if arguments.engine == "jax" else len(problems)
    scored: list[Scored] = []
    total = len(problems) * arguments.n
    with (
        pool,
        open_engine(
            policy,
            arguments.engine,
            arguments.urls,
            arguments.dtype,
            prompt_tokens=prompt_tokens,
            response_tokens=limit,
        ) as engine,
        tqdm(total=total, desc=name, unit="response", file=sys.stderr) as bar,
    ):
        for start, part in in_batches(problems, at_once):
            seed = arguments.seed + start
            for one in score_responses(engine, tokenizer, part, pool, sampling, n=arguments.n, seed=seed):
                scored.append(dataclasses.replace(one, problem_index=one.problem_index + start))
                bar.update()
        errors = pool.take_metrics()["reward/errors"]
    if arguments.out is not None:
        write_responses(Path(arguments.out), problems, scored)
    where = {"step": policy.step} if policy.run is not None else {}
    result = summarize_scores(scored, n=arguments.n, pass_k=arguments.pass_k)
    counts = {"problems": len(problems), "n": arguments.n, "reward_errors": errors}
    print(json.dumps({"path": arguments.path, **where, "dataset": name, **counts, **result}))
    return 0


def write_responses(path: Path, problems: Sequence[Problem], scored: Sequence[Scored]) -> None:
    """One JSON line a response: problem, sample, prompt, answer, response, reward, length, truncated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        for one in sorted(scored, key=lambda one: (one.problem_index, one.sample_index)):
            problem = problems[one.problem_index]
            line = {
                "problem": one.problem_index,
                "sample": one.sample_index,
                "prompt": problem["prompt"],
                "answer": problem["answer"],
                "response": one.text,
                "reward": one.reward,
                "response_length": one.length,
                "truncated": one.truncated,
            }
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def _checkpoints(run: Path, best: bool) -> Path:
    return run / (BEST if best else "checkpoints")


if __name__ == "__main__":
    sys.exit(run_cli(main))
