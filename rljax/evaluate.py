"""Greedy accuracy of a policy on the held problems: ``python -m rljax.evaluate --path HF_DIRECTORY``.

The training loop asks the same question of the engine it trains with, at its own times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rljax.config_loader import caller_errors, load_config, run_cli
from rljax.data.prompts import DataConfig, Problem, Reward, held_problems
from rljax.data.tokenizer import Tokenizer, load_tokenizer
from rljax.policy.config import read_config
from rljax.policy.hf import load_params
from rljax.policy.qwen3 import param_shardings
from rljax.rewards.toy import addition_reward
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.jax_engine import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh


@dataclass(frozen=True)
class Arguments:
    """What to evaluate.

    Attributes:
      path: HF directory, for instance from tools/convert_checkpoint.py.
      dtype: dtype of the engine.
      max_response_tokens: longest answer.
      seed: of the held problems (``data.seed`` of the run).
    """

    path: str = "runs/toy-base"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_response_tokens: int = 36
    seed: int = 0


def greedy_accuracy(
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    reward: Reward,
    *,
    max_response_tokens: int,
    stop_token_ids: tuple[int, ...],
) -> dict[str, Any]:
    """One greedy answer a problem through the training engine; draws no random numbers of the run.

    Returns:
      ``accuracy`` (mean reward) and ``response_length`` (mean, tokens).
    """
    sampling = SamplingParams(max_response_tokens, 0.0, stop_token_ids)
    prompts = [tokenizer.encode(problem["prompt"]) for problem in problems]
    scores, lengths = [0.0] * len(problems), [0] * len(problems)
    for response in engine.generate(prompts, 1, sampling, seed=0):
        text = tokenizer.decode(response.token_ids)
        scores[response.prompt_index] = reward(problems[response.prompt_index], text, response.truncated)
        lengths[response.prompt_index] = response.length
    return {"accuracy": sum(scores) / len(scores), "response_length": sum(lengths) / len(lengths)}


def main(argv: Sequence[str]) -> int:
    """Evaluates an HF directory with the embedded engine and prints one JSON object; returns the exit status."""
    arguments = load_config(Arguments, argv, prog="python -m rljax.evaluate", description=__doc__ or "")
    with caller_errors():
        policy, tokenizer = read_config(arguments.path), load_tokenizer(arguments.path)
        mesh = make_mesh(MeshConfig())
        params = load_params(arguments.path, policy, param_shardings(policy, mesh))
    problems = held_problems(DataConfig(seed=arguments.seed))
    longest = max(len(tokenizer.encode(problem["prompt"])) for problem in problems)
    engine = JaxEngine(policy, arguments.dtype, longest, mesh=mesh)
    engine.publish(params, 0)
    result = greedy_accuracy(
        engine,
        tokenizer,
        problems,
        addition_reward,
        max_response_tokens=arguments.max_response_tokens,
        stop_token_ids=policy.stop_token_ids or (tokenizer.eos_token_id,),
    )
    print(json.dumps({"path": arguments.path, "problems": len(problems), **result}))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
