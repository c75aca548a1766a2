"""The engine with exactly zero mismatch: it samples from the log-softmax rows of the trainer's own executable.

The engine runs the whole forward and backward on the rows so far, and samples a token from the distribution after each
row's last token. The token's entry there is kept as its log-probability, so nothing is scored again. Sequence i of a
request is in row i % b, where it will also be trained. A cut distribution (``top_k``) is made from the same
numbers, by the trainer's own operations.

A second engine may guess the tokens that follow. It samples with the same random keys, so most guesses are right. One
run of the executable then samples all tokens up to the first wrong guess, and corrects that one. Guesses change no
token and no log-probability. They only reduce the number of runs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from rljax.policy.model import Params
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.engine import RolloutEngine, Samples, TurnRequest
from rljax.rollout.likeliest import NextTokens, Selection, draw_tokens, selection_of, token_key, with_noise
from rljax.rollout.types import InjectConfig, Response, SamplingParams
from rljax.sharding import replicated
from rljax.tokens import COLUMNS, TOPS


class Executable(Protocol):
    """The trainer's executable, which the engine samples with."""

    rows: int  # the number of rows, b
    row_tokens: int  # the number of tokens of a row, t
    mesh: Mesh  # the mesh that it runs on

    def log_softmax(self, params: Params, tokens: np.ndarray, lengths: np.ndarray, temperature: float) -> jax.Array:
        """Returns the log-softmax of the logits divided by ``temperature`` at each position, float32 [b, t, v].

        Position i has the distribution of token i + 1. ``tokens`` are int32 [b, t]. ``lengths``, int32 [b], is the
        number of tokens of each row; all later positions are padding.
        """


class _ExactRows(NamedTuple):
    """The rows of the executable while one batch is sampled."""

    tokens: np.ndarray  # the token ids, int32 [b, t], 0 after the last token
    arrays: dict[str, np.ndarray]  # the arrays [b, t, ...] of the sampled tokens, by name
    numbers: np.ndarray  # the numbers that name each response (``token_key``), int32 [b, 2]
    starts: np.ndarray  # the number of tokens before each response, int32 [b]
    lengths: np.ndarray  # the number of tokens of each row so far, int32 [b]
    ends: np.ndarray  # the most tokens of each row, int32 [b]
    stopped: np.ndarray  # whether a stop token ended each response, bool [b]

    @property
    def is_open(self) -> np.ndarray:
        """Whether each response goes on, bool [b]."""
        return ~self.stopped & (self.lengths < self.ends)

    def append(self, sampled: NextTokens, guesses: np.ndarray, stops: Sequence[int]) -> None:
        """Adds the sampled tokens up to a stop token, or up to the correction of the first wrong guess.

        Args:
          sampled: The tokens after the last one of each row, [r, b], and their arrays, [r, b, ...].
          guesses: The guesses for these tokens, int32 [b, r], -1 where there is none.
          stops: The tokens that end a response.
        """
        new = np.asarray(sampled.tokens).T
        is_right, is_stop = np.cumprod(new == guesses, axis=1), np.isin(new, stops)
        ahead = np.pad(is_right[:, :-1], ((0, 0), (1, 0)), constant_values=1) > 0
        ahead &= np.cumsum(is_stop, axis=1) - is_stop == 0
        ahead &= (np.arange(new.shape[1]) < (self.ends - self.lengths)[:, None]) & self.is_open[:, None]
        rows, places = ahead.nonzero()
        at = rows, self.lengths[rows] + places
        self.tokens[at] = new[rows, places]
        for name, array in sampled.arrays.items():
            self.arrays[name][at] = array[places, rows]
        self.lengths[:] += ahead.sum(axis=1)
        self.stopped[:] |= (ahead & is_stop).any(axis=1)


class ExactEngine(RolloutEngine):
    """RolloutEngine over the trainer's executable. The same seed, weights and prompts give the same bits."""

    def __init__(self, executable: Executable, *, inject: InjectConfig | None = None, drafts: JaxEngine | None = None):
        """Prepares the sampling; ``publish`` must be called before ``generate``.

        Args:
          executable: The trainer's executable.
          inject: The noise that is put on the logits, or None.
          drafts: The engine that guesses tokens, or None. It should have the same noise. It gets the same weights, and
            is closed with this engine.
        """
        self._executable, self._drafts = executable, drafts

        def sample(
            log_softmax: Array,
            last: Array,
            seed: Array,
            numbers: Array,
            position: Array,
            temperature: Array,
            *,
            count: int,
            selection: Selection,
        ) -> NextTokens:
            """Samples from the distribution after place ``last`` of each row, and after the next ``count`` - 1."""

            def after(ahead: Array) -> NextTokens:
                at = jnp.minimum(last + ahead, log_softmax.shape[1] - 1)[:, None, None]
                rows = jnp.take_along_axis(log_softmax, at, axis=1)[:, 0]
                keys = jax.vmap(token_key, (None, 0, 0))(seed, numbers, position + ahead)
                if inject is not None and inject.logit_noise and not selection.greedy:
                    rows = jax.nn.log_softmax(with_noise(rows, keys, temperature, inject))
                return draw_tokens(rows, 0.0, keys, selection)

            return jax.lax.map(after, jnp.arange(count))

        static = ("count", "selection")
        self._sample_tokens = jax.jit(sample, static_argnames=static, out_shardings=replicated(executable.mesh))
        self._params: Params | None = None
        self._version = 0

    def publish(self, params: Params, policy_version: int) -> dict[str, float]:
        """Keeps ``params`` without copying them. A training step reuses their buffers, so publish after each step."""
        self._params, self._version = params, policy_version
        return {} if self._drafts is None else self._drafts.publish(params, policy_version)

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples ``n`` responses to each prompt, as many at a time as the executable has rows.

        Raises ValueError if a prompt and the longest response do not fit into a row.
        """
        limit, size = sampling.max_response_tokens, self._executable.rows
        room = self._executable.row_tokens - limit
        for prompt in prompts:
            if not 1 <= len(prompt) <= room:
                raise ValueError(
                    f"a prompt has {len(prompt)} tokens, expected 1 to {room}: rows of {self._executable.row_tokens} "
                    f"tokens minus max_response_tokens = {limit}"
                )
        wanted = [TurnRequest(i, j + 1, prompt, limit) for i, prompt in enumerate(prompts) for j in range(n)]
        batches = [dict(enumerate(wanted[first : first + size])) for first in range(0, len(wanted), size)]
        return self._sample(batches, sampling, seed)

    def answer_round(self, requests: Sequence[TurnRequest], sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples each turn of trajectory i in row i % b of b rows, where the whole trajectory will also be trained.

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
        """Yields the responses of one batch. Each run of the executable samples at least one token of each response."""
        executable, stops, selection = self._executable, sampling.stop_token_ids, selection_of(sampling)
        temperature = 1.0 if selection.greedy else sampling.temperature
        count = 1 if self._drafts is None else sampling.max_response_tokens
        start, rows = time.perf_counter(), self._laid_out(batch, selection.reported)
        while rows.is_open.any():
            guesses = self._guesses(batch, rows, count, sampling, seed)
            lengths = rows.lengths + (guesses >= 0).sum(axis=1, dtype=np.int32)
            tokens = rows.tokens.copy()
            guessed, ahead = (guesses >= 0).nonzero()
            tokens[guessed, rows.lengths[guessed] + ahead] = guesses[guessed, ahead]
            log_softmax = executable.log_softmax(params, tokens, lengths, temperature)
            metrics["rollout/executable_runs"] += 1
            with jax.set_mesh(executable.mesh):
                sampled = self._sample_tokens(
                    log_softmax,
                    np.maximum(rows.lengths - 1, 0),
                    np.uint32(seed),
                    rows.numbers,
                    rows.lengths - rows.starts,
                    np.float32(temperature),
                    count=count,
                    selection=selection,
                )
            rows.append(jax.device_get(sampled), guesses, stops)
        metrics["time/generate_s"] += time.perf_counter() - start
        for place, (key, turn, before, _) in batch.items():
            own = slice(rows.starts[place], rows.lengths[place])
            arrays = {name: array[place, own] for name, array in rows.arrays.items()}
            arrays["version"] = np.full(own.stop - own.start, self._version)
            facts = {"prompt_index": key, "sample_index": turn - 1, "truncated": not rows.stopped[place]}
            yield Response.of(before, rows.tokens[place, own], arrays, **facts)

    def _laid_out(self, batch: Mapping[int, TurnRequest], reported: int) -> _ExactRows:
        """Returns the rows with the tokens before each response. A row without a response can get no token."""
        shape = self._executable.rows, self._executable.row_tokens
        kept = {"rollout_logprobs": shape} | dict.fromkeys(TOPS if reported else (), (*shape, reported))
        arrays = {name: np.full(size, COLUMNS[name].fill, COLUMNS[name].dtype) for name, size in kept.items()}
        tokens, numbers = np.zeros(shape, np.int32), np.zeros((shape[0], 2), np.int32)
        lengths, ends = np.zeros(shape[0], np.int32), np.zeros(shape[0], np.int32)
        for place, (key, turn, before, limit) in batch.items():
            tokens[place, : len(before)] = before
            lengths[place], ends[place], numbers[place] = len(before), len(before) + limit, (key, turn - 1)
        return _ExactRows(tokens, arrays, numbers, lengths.copy(), lengths, ends, np.zeros(shape[0], np.bool_))

    def _guesses(
        self, batch: Mapping[int, TurnRequest], rows: _ExactRows, count: int, sampling: SamplingParams, seed: int
    ) -> np.ndarray:
        """Returns guesses for the next ``count`` tokens of each row, int32 [b, count], -1 where there is none."""
        guesses = np.full((len(rows.tokens), count), -1, np.int32)
        if self._drafts is None:
            return guesses
        # A response that has ended takes part, too, with room for no further token: other sizes would be compiled.
        begun = [rows.tokens[place, rows.starts[place] : rows.lengths[place]] for place in batch]
        drafted = self._drafts.draft([*batch.values()], begun, rows.numbers[[*batch]], sampling, seed=seed)
        for place, tokens in zip(batch, drafted, strict=True):
            if rows.is_open[place]:
                guesses[place, : len(tokens)] = tokens
        return guesses

    def close(self) -> None:
        """Drops the parameters, and closes the engine that guesses."""
        self._params = None
        if self._drafts is not None:
            self._drafts.close()
