"""The engine with exactly zero mismatch: it samples from the log-softmax rows of the trainer's own executable.

For each token of a response it runs the whole forward and backward on the rows so far. It samples from each row's
distribution at the row's last place. The token's entry in that distribution is kept as its log-probability, so nothing
is scored again. Sequence i of a request is in row i % b, where it will also be trained. A cut distribution (``top_k``)
is made from the same numbers, by the trainer's own operations.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from rljax.policy.model import Params
from rljax.rollout.engine import RolloutEngine, Samples
from rljax.rollout.likeliest import ALL, NextTokens, Selection, sample_support, selection_of
from rljax.rollout.turns import TurnRequest
from rljax.rollout.types import InjectConfig, Response, SamplingParams, Tops, VersionSpan
from rljax.sharding import replicated


class Executable(Protocol):
    """The trainer's executable, which the engine samples with."""

    rows: int  # the number of rows, b
    row_tokens: int  # the number of tokens of a row, t
    mesh: Mesh  # the mesh that it runs on

    def log_softmax(self, params: Params, tokens: np.ndarray, lengths: np.ndarray, temperature: float) -> jax.Array:
        """Returns the log-softmax of the logits divided by ``temperature`` at each place, float32 [b, t, v].

        Place i holds the distribution of the token after it. ``tokens`` are int32 [b, t]. ``lengths``, int32 [b], is
        the number of tokens of each row; the places after them are padding.
        """


def token_key(seed: Array, prompt_index: Array, sample_index: Array, position: Array) -> Array:
    """Returns the random key of one token. It depends on these four numbers alone."""
    key = jax.random.key(seed)
    for number in (prompt_index, sample_index, position):
        key = jax.random.fold_in(key, number)
    return key


def sample_tokens(
    log_softmax: Float[Array, "b v"],
    seed: Int[Array, ""],
    prompt_index: Int[Array, " b"],
    sample_index: Int[Array, " b"],
    position: Int[Array, " b"],
    temperature: Float[Array, ""],
    *,
    greedy: bool,
    selection: Selection = ALL,
    inject: InjectConfig | None = None,
) -> NextTokens:
    """Samples the next token of each response, and reads its log-probability from the row that it is sampled from.

    Args:
      log_softmax: The distribution after the last token of each response, at ``temperature``.
      seed: The seed of the request.
      prompt_index: The position of each response's prompt in the request.
      sample_index: The position of each response among the responses to its prompt.
      position: The position of the new token in each response, from 0.
      temperature: The sampling temperature.
      greedy: Whether the likeliest token is taken.
      selection: The tokens that can be sampled and those that are reported.
      inject: The noise that is first put on the logits. It is divided by the temperature as the logits are. None: no
        noise.
    """
    keys = jax.vmap(token_key, (None, 0, 0, 0))(seed, prompt_index, sample_index, position)
    if inject is not None and inject.logit_noise:
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, np.uint32(inject.seed))
        normal = jax.vmap(lambda key: jax.random.normal(key, log_softmax.shape[1:]))(own)
        log_softmax = jax.nn.log_softmax(log_softmax + inject.logit_noise / temperature * normal)
    if selection.top_k:
        return sample_support(keys, log_softmax, selection)
    tokens = jnp.argmax(log_softmax, axis=-1) if greedy else jax.vmap(jax.random.categorical)(keys, log_softmax)
    logprobs = jnp.take_along_axis(log_softmax, tokens[:, None], axis=-1)[:, 0]
    if not selection.reported:
        return NextTokens(tokens.astype(jnp.int32), logprobs)
    top_logprobs, top_ids = jax.lax.top_k(log_softmax, selection.reported)
    return NextTokens(tokens.astype(jnp.int32), logprobs, top_ids.astype(jnp.int32), top_logprobs)


class ExactEngine(RolloutEngine):
    """RolloutEngine over the trainer's executable. The same seed, weights and prompts give the same bits."""

    def __init__(self, executable: Executable, *, inject: InjectConfig | None = None):
        """Prepares the sampling; ``publish`` must be called before ``generate``.

        Args:
          executable: The trainer's executable.
          inject: The noise that is put on the logits, or None.
        """
        self._executable = executable

        def sample(log_softmax: Array, last: Array, *rest: Array, greedy: bool, selection: Selection) -> NextTokens:
            rows = jnp.take_along_axis(log_softmax, last[:, None, None], axis=1)[:, 0]
            return sample_tokens(rows, *rest, greedy=greedy, selection=selection, inject=inject)

        static = ("greedy", "selection")
        self._sample_tokens = jax.jit(sample, static_argnames=static, out_shardings=replicated(executable.mesh))
        self._params: Params | None = None
        self._version = 0

    def publish(self, params: Params, policy_version: int) -> dict[str, float]:
        """Keeps the masters themselves, not a copy. A training step takes their buffers over, so publish after each."""
        self._params, self._version = params, policy_version
        return {}

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples as many responses at a time as the executable has rows.

        Raises ValueError if a prompt and the longest response do not fit into a row.
        """
        limit, size = sampling.max_response_tokens, self._executable.rows
        room = self._executable.row_tokens - limit
        for prompt in prompts:
            if not 1 <= len(prompt) <= room:
                raise ValueError(
                    f"a prompt has {len(prompt)} tokens, expected 1 to {room}: rows of {self._executable.row_tokens} "
                    f"tokens less max_response_tokens = {limit}"
                )
        wanted = [TurnRequest(i, j + 1, prompt, limit) for i, prompt in enumerate(prompts) for j in range(n)]
        batches = [dict(enumerate(wanted[first : first + size])) for first in range(0, len(wanted), size)]
        return self._sample(batches, sampling, seed)

    def answer_round(self, requests: Sequence[TurnRequest], sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples each turn of trajectory i in row i % b, where the whole trajectory will also be trained.

        Raises ValueError if a request's tokens and the longest turn do not fit into a row.
        """
        batches: list[dict[int, TurnRequest]] = []
        for request in requests:
            request.check_room(self._executable.row_tokens, "rows have")
            place = request.key % self._executable.rows
            batch = next((each for each in batches if place not in each), None)
            if batch is None:
                batches.append(batch := {})
            batch[place] = request._replace(max_tokens=min(request.max_tokens, sampling.max_response_tokens))
        return self._sample(batches, sampling, seed)

    def _sample(self, batches: Sequence[Mapping[int, TurnRequest]], sampling: SamplingParams, seed: int) -> Samples:
        """Samples the batches one after the other, as their responses are iterated. A key is the executable's row."""
        if self._params is None:
            raise RuntimeError("no policy was published to the exact engine yet")
        metrics = {"rollout/executable_runs": 0.0, "time/generate_s": 0.0}
        each = (self._responses(self._params, batch, sampling, seed, metrics) for batch in batches)
        return Samples(itertools.chain.from_iterable(each), metrics)

    def _responses(
        self,
        params: Params,
        batch: Mapping[int, TurnRequest],
        sampling: SamplingParams,
        seed: int,
        metrics: dict[str, float],
    ) -> Iterator[Response]:
        """Yields the responses of one batch. It runs the executable once for each token of the longest of them."""
        executable, greedy, selection = self._executable, sampling.temperature == 0.0, selection_of(sampling)
        temperature = 1.0 if greedy else sampling.temperature
        start = time.perf_counter()
        tokens = np.zeros((executable.rows, executable.row_tokens), np.int32)
        logprobs = np.zeros(tokens.shape, np.float32)
        size = (*tokens.shape, selection.reported)
        top_ids, top_logprobs = np.full(size, -1, np.int32), np.full(size, -np.inf, np.float32)
        lengths, ends, prompt_index, sample_index = (np.zeros(executable.rows, np.int32) for _ in range(4))
        for place, (key, turn, prompt, limit) in batch.items():
            tokens[place, : len(prompt)] = prompt
            lengths[place], ends[place] = len(prompt), len(prompt) + limit
            prompt_index[place], sample_index[place] = key, turn - 1
        starts, stopped = lengths.copy(), np.zeros(executable.rows, np.bool_)
        for position in range(max(request.max_tokens for request in batch.values())):
            log_softmax = executable.log_softmax(params, tokens, lengths, temperature)
            metrics["rollout/executable_runs"] += 1
            with jax.set_mesh(executable.mesh):
                sampled = self._sample_tokens(
                    log_softmax,
                    np.maximum(lengths - 1, 0),
                    np.uint32(seed),
                    prompt_index,
                    sample_index,
                    np.full(executable.rows, position, np.int32),
                    np.float32(temperature),
                    greedy=greedy,
                    selection=selection,
                )
            new = jax.device_get(sampled)
            at = (~stopped & (lengths < ends)).nonzero()[0]
            places = at, lengths[at]
            tokens[places], logprobs[places] = new.tokens[at], new.logprobs[at]
            if selection.reported:
                top_ids[places], top_logprobs[places] = new.top_ids[at], new.top_logprobs[at]
            lengths[at] += 1
            stopped[at] = np.isin(new.tokens[at], sampling.stop_token_ids)
            if (stopped | (lengths == ends)).all():
                break
        metrics["time/generate_s"] += time.perf_counter() - start
        for place, (key, turn, *_) in batch.items():
            own = slice(starts[place], lengths[place])
            versions = (VersionSpan(self._version, 0, int(lengths[place] - starts[place])),)
            of_row = tokens[place, own], logprobs[place, own], not stopped[place], versions
            tops = Tops(top_ids[place, own].copy(), top_logprobs[place, own].copy()) if selection.reported else None
            yield Response(key, turn - 1, *of_row, tops=tops)

    def close(self) -> None:
        """Drops the parameters."""
        self._params = None
