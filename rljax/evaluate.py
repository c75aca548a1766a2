"""Greedy accuracy of the published policy on a fixed list of problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljax.data.prompts import Problem, Reward
from rljax.data.tokenizer import Tokenizer
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import SamplingParams


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
