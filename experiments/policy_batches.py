"""Samples batches of responses at the weights of a checkpoint, and computes their gradients in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from rljax.algorithms.advantages import rloo
from rljax.data.encoding import prompt_ids
from rljax.data.prompts import training_problems
from rljax.data.tokenizer import load_tokenizer
from rljax.evaluate import Policy
from rljax.policy.config import PolicyConfig
from rljax.policy.score import packed_logprobs
from rljax.rewards.resolve import RewardFunction, resolve_reward
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.run.config import Config


class Batch(NamedTuple):
    """A batch of responses; each row has a prompt and its response."""

    tokens: np.ndarray  # int32 [b, t]
    segments: np.ndarray  # int32 [b, t], 0 on padding
    mask: np.ndarray  # bool [b, t], True on response tokens
    logprobs: np.ndarray  # float64 [b, t], from the engine that sampled; 0 outside the mask
    rewards: np.ndarray  # float64 [b]
    advantages: np.ndarray  # float64 [b], each reward minus the mean of the prompt's other rewards


class Sampler:
    """A sampler of batches of a run's size, with randomly chosen training problems of the run."""

    def __init__(self, policy: Policy, settings: Config, batches: int, seed: int):
        self._settings = settings
        tokenizer = load_tokenizer(policy.hf_path)
        self._decode: Callable[[np.ndarray], str] = tokenizer.decode
        problems = training_problems(settings.data, tokenizer)
        chosen = np.random.default_rng(seed).integers(len(problems), size=(batches, settings.data.batch_size))
        self._problems = [[problems[int(i)] for i in row] for row in chosen]
        self._prompts = [[prompt_ids(problem, tokenizer) for problem in row] for row in self._problems]
        rollout = settings.rollout
        stops = policy.config.stop_token_ids or (tokenizer.eos_token_id,)
        self._sampling = SamplingParams(rollout.max_response_tokens, rollout.temperature, stops)
        self._reward: RewardFunction = resolve_reward(settings.data.reward_name)

    def sample(self, engine: JaxEngine, index: int, seed: int) -> Batch:
        """Samples ``group_size`` responses to each prompt of batch ``index``."""
        prompts, group = self._prompts[index], self._settings.rollout.group_size
        responses = sorted(
            engine.generate(prompts, group, self._sampling, seed=seed),
            key=lambda response: (response.prompt_index, response.sample_index),
        )
        shape = (len(responses), self._settings.data.max_prompt_tokens + self._sampling.max_response_tokens)
        batch = Batch(
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, bool),
            np.zeros(shape),
            np.zeros(len(responses)),
            np.zeros(len(responses)),
        )
        for row, response in enumerate(responses):
            prompt, problem = prompts[response.prompt_index], self._problems[index][response.prompt_index]
            start, stop = len(prompt), len(prompt) + response.length
            batch.tokens[row, :stop] = np.concatenate([prompt, response.token_ids])
            batch.segments[row, :stop] = 1
            batch.mask[row, start:stop] = True
            batch.logprobs[row, start:stop] = response.logprobs
            batch.rewards[row] = self._reward(problem, self._decode(response.token_ids), response.truncated)
        batch.advantages[:] = rloo(batch.rewards.reshape(-1, group)).reshape(-1)
        return batch

    def score(self, engine: JaxEngine, batch: Batch) -> np.ndarray:
        """Scores the responses of a batch with an engine, float64 [b, t], 0 outside the mask."""
        prompts = [row[(seg > 0) & ~m] for row, seg, m in zip(batch.tokens, batch.segments, batch.mask, strict=True)]
        responses = [row[m] for row, m in zip(batch.tokens, batch.mask, strict=True)]
        limit, temperature = self._sampling.max_response_tokens, self._sampling.temperature
        scored = engine.score(prompts, responses, temperature=temperature, max_response_tokens=limit)
        logprobs = np.zeros(batch.mask.shape)
        logprobs[batch.mask] = np.concatenate(scored)
        return logprobs


class Forward:
    """The trained policy in float32, which computes log-probabilities and gradients of their weighted sums."""

    def __init__(self, policy: PolicyConfig, temperature: float):
        def logprobs(params: Any, tokens: jax.Array, segments: jax.Array) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            with jax.default_matmul_precision("highest"):
                return packed_logprobs(params, policy, tokens, segments, positions, temperature=temperature).logprobs

        def gradient(params: Any, tokens: jax.Array, segments: jax.Array, weights: jax.Array) -> jax.Array:
            return ravel_pytree(jax.grad(lambda p: jnp.sum(logprobs(p, tokens, segments) * weights))(params))[0]

        self._logprobs, self._gradient = jax.jit(logprobs), jax.jit(gradient)

    def logprobs(self, params: Any, batch: Batch) -> np.ndarray:
        """Computes the log-probabilities of a batch, float64 [b, t], 0 outside the responses."""
        logprobs = np.asarray(self._logprobs(params, batch.tokens, batch.segments), np.float64)
        return np.where(batch.mask, logprobs, 0.0)

    def gradient(self, params: Any, batch: Batch, weights: np.ndarray) -> np.ndarray:
        """Computes the mean over responses of sum_t weights[b, t] grad logprobs[b, t], float32 [d].

        The weights are [b, t] or [b, 1].
        """
        inside = np.where(batch.mask, weights, 0.0) / len(batch.mask)
        return np.asarray(self._gradient(params, batch.tokens, batch.segments, inside.astype(np.float32)))
