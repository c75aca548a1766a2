"""The embedded engine: key-value-cache decoding of the policy in compiled loops.

It is a second engine beside the trainer, with a dtype, a graph and a rounding of its own. As in vLLM, logits leave the
LM head in the rollout dtype and become float32 afterwards, unless the head computes in float32. The trainer's logits
are float32 from the start. So with 16 bits engine and trainer differ on every token, as real engines do.

All responses are decoded at once if their cache fits into the budget of tokens. Otherwise the next response takes the
place of a finished one (``rljax.rollout.decoding``).

With a cache of 8 bits the engine samples from the numbers that the cache of a quantized engine holds. For weights of 8
bits another engine wraps this one (``rljax.rollout.injected``).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rljax.policy.config import PolicyConfig
from rljax.policy.head import matmul_precision
from rljax.policy.model import Params, copy_params, param_shardings
from rljax.rollout import decoding
from rljax.rollout.decode_sizes import (
    DecodeSizes,
    batch_sizes,
    cache_row_bytes,
    free_cache_room,
    padded_count,
    padded_rows,
    padded_width,
    prefill_rows,
    repeats,
)
from rljax.rollout.decoding import Queue, Sampled
from rljax.rollout.engine import RolloutEngine, Samples, TurnRequest
from rljax.rollout.injected import CACHES
from rljax.rollout.likeliest import selection_of
from rljax.rollout.types import InjectConfig, Response, SamplingParams
from rljax.sharding import num_parts, replicated
from rljax.tokens import as_stored


class _PromptRows(NamedTuple):
    """The prompts of one request as arrays, and the sizes that the request decodes with."""

    prompts: np.ndarray  # the prompts padded on the left, int32 [p, s]
    lengths: np.ndarray  # the number of tokens of each prompt, int32 [p]
    n: int  # the number of responses to each prompt
    room: int  # the number of prompts that the arrays of samples have room for, p or more
    responses: int  # the number of responses that they have room for, p * n or more
    places: int  # the number of tokens that the cache holds of each row
    limits: np.ndarray | None = None  # the most tokens of each response, int32 [responses]; None: those of the request
    at_once: int | None = None  # the most prompts that are computed at once; None: as many as are decoded at once


class EngineFunctions(NamedTuple):
    """The jitted functions of an engine."""

    cast: Any  # a function of parameters that returns copies in the rollout dtype
    empty: Any  # the function ``decoding.empty`` without its configuration and dtypes
    admit: Any  # the function ``decoding.admit`` without its configuration
    decode: Any  # the function ``decoding.decode`` without its configuration and ``lm_head_dtype``
    prefill: Any  # the function ``decoding.prefill_logprobs`` without its configuration and dtypes


@functools.lru_cache(maxsize=8)
def make_functions(
    config: PolicyConfig, dtype: Any, mesh: Mesh, lm_head_dtype: Any, cache_dtype: Any, inject: InjectConfig | None
) -> EngineFunctions:
    """Returns the functions of an engine. The cache has ``cache_dtype``, or the rollout ``dtype`` if that is None.

    Engines with equal arguments share the functions, so the second one in a process traces and compiles nothing. The
    functions of the last eight sets of arguments are kept.
    """
    # copy: with a float32 rollout the cast would hand on the trainer's own buffers, which its next step donates.
    cast = jax.jit(functools.partial(copy_params, dtype=dtype), out_shardings=param_shardings(config, mesh))
    whole, of_cache, of_head = replicated(mesh), cache_dtype or dtype, {"lm_head_dtype": lm_head_dtype}

    def program(function: Any, settings: dict[str, Any], **compiled: Any) -> Any:
        def run(params: Params, *args: Any, **chosen: Any) -> Any:
            with jax.default_matmul_precision(matmul_precision(dtype)):
                return function(params, config, *args, **settings, **chosen)

        run.__name__ = function.__name__
        return jax.jit(run, **compiled)

    empty = functools.partial(decoding.empty, config, dtype, of_cache)
    sizes = ("prompts", "width", "rows", "limit", "places", "slots", "with_routes", "reported")
    chosen: Any = {"static_argnames": "selection", "out_shardings": (None, whole, whole)}
    return EngineFunctions(
        cast,
        jax.jit(empty, static_argnames=sizes, out_shardings=(None, whole)),
        program(decoding.admit, {"cache_dtype": of_cache}, donate_argnums=(1, 2), out_shardings=(None, whole)),
        program(decoding.decode, of_head | {"inject": inject}, donate_argnums=(1, 2), **chosen),
        program(decoding.prefill_logprobs, of_head | {"cache_dtype": of_cache}, out_shardings=whole),
    )


@dataclass(eq=False)
class JaxEngine(RolloutEngine):
    """RolloutEngine over the policy in this process. The same seed, weights and prompts give the same bits.

    ``publish`` must be called before ``generate``.
    """

    config: PolicyConfig
    dtype: Any  # the rollout dtype, in which the engine computes; weights have it, and a cache unless it has 8 bits
    max_prompt_tokens: int  # the length that prompts are padded to, so that the number of compilations stays small
    _: KW_ONLY
    mesh: Mesh  # the trainer's mesh; weights stay sharded as they are there
    lm_head_dtype: Any = None  # the dtype of the LM head and of its logits, or None for ``dtype``
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"  # the format of cached keys and values
    with_routes: bool = False  # whether responses report the experts of their tokens; the policy must be a mixture
    # The most tokens whose keys and values are in memory at once, on all devices together. 0: as many as fit into the
    # free memory of the devices.
    decode_tokens: int = 0
    # The number of prompts of a step. Requests for fewer are padded, so that they share compilations. 0: no padding.
    step_prompts: int = 0
    # The most tokens of a trajectory of several turns, its prompt included. 0: ``max_prompt_tokens`` plus the longest
    # response of the request.
    max_tokens: int = 0
    inject: InjectConfig | None = None  # the mismatch that is put into the rollouts on purpose, if any

    def __post_init__(self) -> None:
        dtype, cache_dtype = jnp.dtype(self.dtype), CACHES.get(self.kv_cache_dtype)
        self._dtypes = self.dtype, cache_dtype or self.dtype
        self._functions = make_functions(self.config, dtype, self.mesh, self.lm_head_dtype, cache_dtype, self.inject)
        self._params: Params | None = None
        self._version, self._room = 0, 0.0

    def publish(self, params: Params, policy_version: int) -> dict[str, float]:
        """Keeps a copy of ``params`` in the rollout dtype. Returns the metric ``time/publish_s``."""
        start = time.perf_counter()
        with jax.set_mesh(self.mesh):
            self._params = jax.block_until_ready(self._functions.cast(params))
        self._version = policy_version
        return {"time/publish_s": time.perf_counter() - start}

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples all responses before it returns."""
        return self._sample(prompts, self._laid_out(prompts, sampling, n), sampling, seed)

    def answer_round(self, requests: Sequence[TurnRequest], sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples all turns before it returns.

        The width of the prompts and the number of rows are padded to a few sizes, so that few programs are compiled.
        The first turns of a group have one prompt, which is computed once.
        """
        rows = self._turn_rows(requests, sampling)
        prompts = [request.tokens for request in requests[:: rows.n]]
        samples = self._sample(prompts, rows, sampling, seed)
        turns = (
            dataclasses.replace(response, prompt_index=request.key, sample_index=request.turn - 1)
            for request, response in zip(requests, samples, strict=True)
        )
        return Samples(turns, samples.metrics)

    def draft(
        self,
        requests: Sequence[TurnRequest],
        begun: Sequence[np.ndarray],
        numbers: np.ndarray,
        sampling: SamplingParams,
        *,
        seed: int,
    ) -> list[np.ndarray]:
        """Samples the rest of turns whose first tokens are known. Returns the further tokens of each turn, int32 [t].

        Args:
          requests: The tokens before each turn, and the most tokens of it.
          begun: The first tokens of each turn, int32 [t].
          numbers: The numbers that give each turn its random keys (``token_key``), int32 [n, m].
        """
        rows = self._turn_rows(requests, sampling)
        forced = np.full((rows.responses, sampling.max_response_tokens), -1, np.int32)
        for row, known in zip(forced, begun, strict=False):
            row[: len(known)] = known
        named = np.zeros((rows.responses, numbers.shape[1]), np.int32)
        named[: len(numbers)] = numbers
        sampled = self._run(rows, dataclasses.replace(sampling, reported=0), seed, forced, numbers=named)
        ends = zip(begun, sampled.counts, sampled.tokens, strict=False)
        return [tokens[len(known) : count] for known, count, tokens in ends]

    def _turn_rows(self, requests: Sequence[TurnRequest], sampling: SamplingParams) -> _PromptRows:
        """Returns the rows of one response to each of ``requests``, padded to a few sizes.

        The rows keep the order of the requests. Neighbours with equal tokens share a prompt.
        """
        limit = sampling.max_response_tokens
        places = self.max_tokens or self.max_prompt_tokens + limit
        for request in requests:
            request.check_room(places, "the engine has room for")
        n = repeats([request.tokens for request in requests])
        prompts = [request.tokens for request in requests[::n]]
        padded, lengths = self._padded(prompts, padded_width(max(map(len, prompts)), self.max_prompt_tokens, places))
        limits = np.zeros(padded_rows(len(requests)), np.int32)
        limits[: len(requests)] = [min(request.max_tokens, limit) for request in requests]
        at_once = prefill_rows(self.config, padded.shape[1], num_parts(self.mesh.shape, "rows"))
        # Shared prompts have as much room as separate ones, so that both take the same compiled loop.
        return _PromptRows(padded, lengths, n, len(limits), len(limits), places, limits, at_once)

    def _sample(self, prompts: Sequence[np.ndarray], rows: _PromptRows, sampling: SamplingParams, seed: int) -> Samples:
        """Samples the responses to each of ``prompts``. ``rows`` has the same prompts as padded arrays."""
        start, n = time.perf_counter(), rows.n
        numbers = np.arange(rows.responses, dtype=np.int32)[:, None]
        sampled = self._run(rows, sampling, seed, numbers=numbers, with_routes=self.with_routes)
        metrics = {"time/generate_s": time.perf_counter() - start}
        responses = []
        for row, length in enumerate(sampled.counts[: len(prompts) * n].tolist()):
            prompt, arrays = prompts[row // n], {name: array[row, :length] for name, array in sampled.arrays.items()}
            routes, arrays["version"] = arrays.pop("routes", None), np.full(length, self._version)
            if routes is not None and sampled.prompt_routes is not None:
                of_prompt = sampled.prompt_routes[row // n][-len(prompt) :]
                arrays["routes"] = as_stored(np.concatenate([of_prompt, routes[:-1]]))
            facts = {"prompt_index": row // n, "sample_index": row % n, "truncated": not sampled.stopped[row]}
            responses.append(Response.of(prompt, sampled.tokens[row, :length], arrays, **facts))
        return Samples(iter(responses), metrics)

    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        *,
        temperature: float = 1.0,
        max_response_tokens: int | None = None,
    ) -> list[np.ndarray]:
        """Computes log-probabilities of given responses one token at a time, with the loop of ``generate``.

        Args:
          prompts: The token ids of each prompt, int32 [s], 1 to ``max_prompt_tokens`` of them.
          responses: The token ids of the response to each prompt, int32 [t].
          temperature: The temperature of the distribution, which is positive.
          max_response_tokens: The length of the loop. Calls with an equal length share a compilation. None: the longest
            of ``responses``.

        Returns:
          The log-probabilities of each response (nats), float32 [t].

        Raises:
          ValueError: A prompt has no token, or more than ``max_prompt_tokens``.
          RuntimeError: No policy was published yet.
        """
        limit = max_response_tokens or max(map(len, responses))
        forced = np.zeros((len(prompts), limit), np.int32)
        for row, response in zip(forced, responses, strict=True):
            row[: len(response)] = response
        sampling = SamplingParams(limit, temperature)
        sampled = self._run(self._laid_out(prompts, sampling, 1), sampling, 0, forced, numbers=None)
        logprobs = sampled.arrays["rollout_logprobs"]
        return [row[: len(response)] for row, response in zip(logprobs[: len(responses)], responses, strict=True)]

    def score_prefill(self, sequences: Sequence[np.ndarray], *, temperature: float = 1.0) -> list[np.ndarray]:
        """Computes log-probabilities of given sequences in one pass, as the engine computes prompts.

        The sequences are token ids, int32 [t], 1 to ``max_prompt_tokens`` of them, and the temperature is positive.
        Returns the log-probabilities of all tokens but the first of each sequence (nats), float32 [t - 1]. Raises like
        ``score``.
        """
        padded, lengths = self._padded(sequences, self.max_prompt_tokens)
        with jax.set_mesh(self.mesh):
            columns = self._functions.prefill(self._params, padded, lengths, np.float32(temperature))
            rows = jax.device_get(columns).T[:, :-1]
        return [row[len(row) - (len(ids) - 1) :] for row, ids in zip(rows, sequences, strict=True)]

    def close(self) -> None:
        """Drops the weights."""
        self._params = None

    def _run(
        self,
        rows: _PromptRows,
        sampling: SamplingParams,
        seed: int,
        forced: np.ndarray | None = None,
        *,
        numbers: np.ndarray | None,
        with_routes: bool = False,
    ) -> Sampled:
        """Returns samples on the host with room for ``rows.responses``. Responses to the existing prompts come first.

        ``forced`` and ``numbers`` are those of ``decoding.decode``.
        """
        selection, limit = selection_of(sampling), sampling.max_response_tokens
        # -1 is the id of no token, so without stop tokens a response runs to the limit.
        stops = np.asarray(sampling.stop_token_ids or (-1,), np.int32)
        temperature = np.float32(1.0 if selection.greedy else sampling.temperature)
        given = stops, temperature, np.uint32(seed), numbers, forced, rows.limits
        with jax.set_mesh(self.mesh):
            batch = self._batch(rows.responses, rows.n, rows.places)
            sizes = {"prompts": rows.room, "width": rows.prompts.shape[1], "rows": rows.responses, "limit": limit}
            sizes |= {"places": rows.places, "slots": batch.slots, "reported": selection.reported}
            slots, sampled = self._functions.empty(**sizes, with_routes=with_routes)
            waiting = Queue(rows.prompts, rows.lengths, rows.n, batch, rows.at_once)
            free = np.arange(batch.slots)
            while True:
                for group in waiting.admitted(free):
                    slots, sampled = self._functions.admit(self._params, slots, sampled, *group)
                enough = np.int32(waiting.enough)
                arguments = self._params, slots, sampled, *given, enough
                slots, sampled, is_free = self._functions.decode(*arguments, selection=selection)
                if not waiting.left:
                    return Sampled(*jax.device_get(sampled))
                free = np.flatnonzero(jax.device_get(is_free))

    def _laid_out(self, prompts: Sequence[np.ndarray], sampling: SamplingParams, n: int) -> _PromptRows:
        """Returns the rows of a request for ``n`` responses to each prompt, padded to ``max_prompt_tokens``."""
        padded, lengths = self._padded(prompts, self.max_prompt_tokens)
        count = padded_count(len(prompts), self.step_prompts)
        return _PromptRows(padded, lengths, n, count, count * n, self.max_prompt_tokens + sampling.max_response_tokens)

    def _padded(self, prompts: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the prompts padded on the left to ``width``, int32 [n, s], and their lengths, int32 [n]."""
        if self._params is None:
            raise RuntimeError("no policy was published to the embedded engine yet")
        padded = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            if not 1 <= len(prompt) <= width:
                raise ValueError(f"a prompt has {len(prompt)} tokens, expected 1 to max_prompt_tokens = {width}")
            row[width - len(prompt) :] = prompt
        return padded, np.asarray([len(prompt) for prompt in prompts], np.int32)

    def _batch(self, rows: int, n: int, places: int) -> DecodeSizes:
        """Returns the sizes of a batch whose cache, with ``places`` tokens for each response, fits into the budget."""
        budget = self.decode_tokens // places
        if not self.decode_tokens:
            self._room = self._room or free_cache_room(self.mesh)
            budget = int(self._room / cache_row_bytes(self.config, self.mesh, places, *self._dtypes))
        return batch_sizes(rows, n, budget, num_parts(self.mesh.shape, "rows"))
