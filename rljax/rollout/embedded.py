"""The embedded engine: key-value-cache decoding of the policy in one compiled loop.

It is a second engine with a dtype, a graph and a rounding of its own. As in vLLM, logits leave the LM head in the
rollout dtype and only then become float32, unless the head computes in float32. The trainer keeps them float32, so in
16 bits the two differ on every token, as real engines do. Prompts are padded on the left, so that all rows decode at
one cache index. A prompt is prefilled once, and its cache is repeated for its ``n`` responses.

With weights or a cache of 8 bits it samples from the numbers that a quantized engine holds. They are a function of the
published weights, without noise. The memory stays that of the rollout dtype, because each publish restores matrices to
it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.attention import attend
from rljax.policy.config import PolicyConfig, route_dtype
from rljax.policy.head import head_operands, matmul_precision
from rljax.policy.model import (
    ForwardStats,
    Params,
    cast_params,
    embed_tokens,
    lm_head_table,
    logical_axes,
    param_shardings,
    run_blocks,
)
from rljax.rollout.engine import Samples
from rljax.rollout.quantization import CACHES, quantize, restore, to_cache
from rljax.rollout.types import Response, SamplingParams, VersionSpan
from rljax.sharding import constrain, replicated

Cache = tuple[Array, Array]  # keys and values, [layers, b, s, kv heads, head_dim]


def attention_with_cache(
    mask: Bool[Array, "b t s"], write_at: Int[Array, ""] | int
) -> Callable[[Cache, Array, Array, Array, Array], tuple[Array, Cache]]:
    """Returns an attention that writes keys and values into a layer's cache, and attends to what ``mask`` allows.

    They are stored in the dtype of the cache, from place ``write_at`` on. The attention reads only what the cache
    stores, of this call's own too.
    """

    def attention_fn(cache: Cache, layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, Cache]:
        keys, values = (
            jax.lax.dynamic_update_slice(old, to_cache(new, old.dtype)[None], (layer, 0, write_at, 0, 0))
            for old, new in zip(cache, (k, v), strict=True)
        )
        k_all, v_all = (jax.lax.dynamic_index_in_dim(part, layer, 0, keepdims=False) for part in (keys, values))
        return attend(q, k_all.astype(k.dtype), v_all.astype(v.dtype), mask), (keys, values)

    return attention_fn


def _prefill(
    params: Params,
    config: PolicyConfig,
    tokens: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    cache_tokens: int,
    cache_dtype: Any,
) -> tuple[Float[Array, "p d"], Cache, Bool[Array, "p c"], Any]:
    """Returns the last hidden state, the cache, its valid places and each token's experts, for left-padded prompts."""
    rows, width = tokens.shape
    index = jnp.arange(width)
    valid = index[None, :] >= width - lengths[:, None]
    positions = jnp.maximum(index[None, :] - (width - lengths[:, None]), 0)
    shape = (config.num_layers, rows, cache_tokens, config.num_kv_heads, config.head_dim)
    cache = (jnp.zeros(shape, cache_dtype), jnp.zeros(shape, cache_dtype))
    valid_cache = jnp.pad(valid, ((0, 0), (0, cache_tokens - width)))
    causal = index[:, None] >= jnp.arange(cache_tokens)[None, :]
    mask = causal[None] & valid_cache[:, None, :]
    embedded = embed_tokens(params, tokens)
    hidden, cache, stats = run_blocks(params, config, embedded, positions, attention_with_cache(mask, 0), cache)
    return hidden[:, -1], cache, valid_cache, _routes(stats, config)


def _routes(stats: ForwardStats, config: PolicyConfig) -> Any:
    """Returns the experts that each token went to, [b, t, l, k], or None for a dense policy."""
    if stats.router is None:
        return None
    return jnp.moveaxis(stats.router.choices, 0, 2).astype(route_dtype(config.num_experts))


def next_tokens(
    params: Params,
    hidden: Float[Array, "b d"],
    keys: Array,
    temperature: Array,
    greedy: bool,
    forced: Int[Array, " b"] | None,
    lm_head_dtype: Any,
) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """Returns next tokens and their log-probabilities under the distribution sampled from (temperature 1 if greedy).

    The last hidden states ``hidden`` give the logits. Where ``forced`` holds tokens, these are taken instead.
    """
    hidden, table = head_operands(hidden, lm_head_table(params), lm_head_dtype)
    exactness = matmul_precision(table.dtype)
    logits = jnp.einsum("bd,vd->bv", hidden, table, precision=exactness, preferred_element_type=jnp.float32)
    # Not a pair of casts: XLA may drop those (xla_allow_excess_precision).
    kept = jnp.finfo(hidden.dtype)
    logits = jax.lax.reduce_precision(logits, kept.nexp, kept.nmant)
    if greedy:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        logits = logits / temperature
        tokens = jax.vmap(jax.random.categorical)(keys, logits) if forced is None else forced
    logprobs = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
    return tokens.astype(jnp.int32), logprobs


def _decode(
    params: Params,
    config: PolicyConfig,
    prompts: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    stops: Int[Array, " k"],
    temperature: Float[Array, ""],
    seed: Int[Array, ""],
    forced: Int[Array, "b r"] | None,
    *,
    n: int,
    limit: int,
    greedy: bool,
    lm_head_dtype: Any,
    cache_dtype: Any,
    with_routes: bool,
) -> tuple[Array, ...]:
    """Samples b = p * n responses of at most r tokens in one loop.

    Args:
      params: The weights in the rollout dtype.
      config: The shape of the policy.
      prompts: The token ids, padded on the left.
      lengths: The number of tokens of each prompt.
      stops: The tokens that end a response.
      temperature: The sampling temperature.
      seed: The seed of the sampling.
      forced: The responses, whose tokens are then taken instead of sampling, or None.
      n: The number of responses to each prompt.
      limit: The longest response, r.
      greedy: Whether the likeliest token is taken.
      lm_head_dtype: The dtype in which the LM head computes, or None for that of ``params``.
      cache_dtype: The dtype of the cached keys and values.
      with_routes: Whether the experts of the tokens are returned.

    Returns:
      The tokens [b, r], their log-probabilities [b, r], the lengths [b] and whether a stop token ended each response
      [b]. With routes, the experts of the prompts' tokens [p, s, l, k] and of the responses' [b, r, l, k] follow.
    """
    width = prompts.shape[1]
    rows = len(prompts) * n
    hidden, cache, valid, prompt_routes = _prefill(params, config, prompts, lengths, width + limit, cache_dtype)

    def repeat(x: Array, axis: int = 0) -> Array:
        return jnp.repeat(x, n, axis=axis)

    hidden, valid, lengths = repeat(hidden), repeat(valid), repeat(lengths)
    cache = (repeat(cache[0], 1), repeat(cache[1], 1))
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))

    def unfinished(state: tuple[Any, ...]) -> Array:
        step, done = state[0], state[1]
        return (step < limit) & ~jnp.all(done)

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, done, tokens, logprobs, counts, hidden, cache, routes = state
        keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, step)
        next_forced = None if forced is None else jax.lax.dynamic_index_in_dim(forced, step, 1, keepdims=False)
        token, logprob = next_tokens(params, hidden, keys, temperature, greedy, next_forced, lm_head_dtype)
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, jnp.where(done, 0, token), step, 1)
        logprobs = jax.lax.dynamic_update_index_in_dim(logprobs, jnp.where(done, 0.0, logprob), step, 1)
        counts = counts + jnp.where(done, 0, 1)
        done = done | jnp.any(token[:, None] == stops[None, :], axis=1)
        at = width + step
        mask = valid | ((jnp.arange(width + limit) >= width) & (jnp.arange(width + limit) <= at))[None]
        embedded = constrain(embed_tokens(params, token[:, None]), "rows", "tokens", "act_embed")
        positions = (lengths + step)[:, None]
        new_hidden, cache, stats = run_blocks(
            params, config, embedded, positions, attention_with_cache(mask[:, None], at), cache
        )
        if routes is not None:
            routes = jax.lax.dynamic_update_slice_in_dim(routes, _routes(stats, config), step, 1)
        return step + 1, done, tokens, logprobs, counts, new_hidden[:, 0], cache, routes

    start = (
        jnp.int32(0),
        jnp.zeros((rows,), bool),
        jnp.zeros((rows, limit), jnp.int32),
        jnp.zeros((rows, limit), jnp.float32),
        jnp.zeros((rows,), jnp.int32),
        hidden,
        cache,
        jnp.zeros((rows, limit, *prompt_routes.shape[2:]), prompt_routes.dtype) if with_routes else None,
    )
    final: Any = jax.lax.while_loop(unfinished, body, start)
    _, done, tokens, logprobs, counts, _, _, *routes = final
    sampled = tokens, logprobs, counts, done
    return (*sampled, prompt_routes, *routes) if with_routes else sampled


class EngineFunctions(NamedTuple):
    """The jitted functions of an engine.

    Attributes:
      cast: A function of parameters that returns copies in the rollout dtype.
      quantize: A function of weights that returns them as they are stored, or None where they are not quantized.
      restore: A function of stored weights that returns weights in the rollout dtype.
      decode: The function ``_decode`` without its ``config``, ``lm_head_dtype`` and ``cache_dtype``.
    """

    cast: Any
    quantize: Any
    restore: Any
    decode: Any


@functools.lru_cache(maxsize=8)
def make_functions(
    config: PolicyConfig,
    dtype: Any,
    mesh: Mesh,
    lm_head_dtype: Any,
    weight_quantization: Literal["none", "int8", "fp8"],
    cache_dtype: Any,
) -> EngineFunctions:
    """Returns the functions of an engine whose cache has ``cache_dtype``, or its own dtype where that is None.

    Engines of one kind share them: the second in a process is neither traced nor compiled again. The functions of the
    last eight kinds are kept.
    """
    shardings = param_shardings(config, mesh)
    # copy: with a float32 rollout the cast would hand on the trainer's own buffers, which its next step donates.
    cast = jax.jit(
        lambda params: jax.tree.map(lambda p: jnp.array(p, copy=True), cast_params(params, dtype)),
        out_shardings=shardings,
    )
    # Storing and restoring are two executables: inside one XLA may drop a pair of casts.
    stored: Any = None
    if weight_quantization != "none":
        logical = logical_axes(config)
        stored = jax.jit(lambda params: quantize(params, logical, weight_quantization))
    restored = jax.jit(lambda stored: restore(stored, dtype), out_shardings=shardings)

    kept = cache_dtype or dtype

    def decode(params: Params, *args: Any, **static: Any) -> tuple[Array, ...]:
        with jax.default_matmul_precision(matmul_precision(dtype)):
            return _decode(params, config, *args, lm_head_dtype=lm_head_dtype, cache_dtype=kept, **static)

    static = ("n", "limit", "greedy", "with_routes")
    return EngineFunctions(
        cast, stored, restored, jax.jit(decode, static_argnames=static, out_shardings=replicated(mesh))
    )


class JaxEngine:
    """RolloutEngine over the policy in this process. The same seed, weights and prompts give the same bits."""

    def __init__(
        self,
        config: PolicyConfig,
        dtype: Any,
        max_prompt_tokens: int,
        *,
        mesh: Mesh,
        lm_head_dtype: Any = None,
        weight_quantization: Literal["none", "int8", "fp8"] = "none",
        kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto",
        with_routes: bool = False,
    ):
        """Builds the engine; ``publish`` must be called before ``generate``.

        Args:
          config: The shape of the policy.
          dtype: The rollout dtype. The engine computes in it, and weights and cache have it unless they have 8 bits.
          max_prompt_tokens: The length that prompts are padded to, so that the number of compilations stays small.
          mesh: The trainer's mesh. Weights stay sharded as they are there.
          lm_head_dtype: The dtype in which the LM head computes, and of the logits, or None for ``dtype``.
          weight_quantization: The rounding of the matrices, as ``RolloutConfig.weight_quantization``.
          kv_cache_dtype: The dtype of the cache, as ``RolloutConfig.kv_cache_dtype``.
          with_routes: Whether responses have the experts of their tokens, for a mixture of experts.
        """
        self._with_routes = with_routes
        self._mesh, self._width = mesh, max_prompt_tokens
        self._functions = make_functions(
            config, jnp.dtype(dtype), mesh, lm_head_dtype, weight_quantization, CACHES.get(kv_cache_dtype)
        )
        self._params: Params | None = None
        self._version = 0

    @property
    def compilations(self) -> int:
        """The number of decoding loops compiled so far, those of other engines of this kind included.

        There is one for each number of prompts, n, length limit and greediness.
        """
        return int(self._functions.decode._cache_size())

    def prepare(self, params: Params, policy_version: int) -> None:
        """Does nothing: all of a publish is done at once."""

    def publish(self, params: Params, policy_version: int) -> dict[str, float]:
        """Casts ``params`` to the rollout dtype, rounds them to 8 bits where the engine does, and keeps them."""
        start = time.perf_counter()
        with jax.set_mesh(self._mesh):
            weights = self._functions.cast(params)
            if self._functions.quantize is not None:
                weights = self._functions.restore(self._functions.quantize(weights))
            self._params = jax.block_until_ready(weights)
        self._version = policy_version
        return {"time/publish_s": time.perf_counter() - start}

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples all responses in one compiled loop, before it returns."""
        start = time.perf_counter()
        tokens, logprobs, counts, done, *routes = self._run(prompts, n, sampling, seed, with_routes=self._with_routes)
        metrics = {"time/generate_s": time.perf_counter() - start}
        responses = []
        for row, length in enumerate(counts.tolist()):
            versions = (VersionSpan(self._version, 0, length),)
            kept = tokens[row, :length], logprobs[row, :length]
            of_row = None
            if routes:
                of_prompt, of_response = routes[0][row // n], routes[1][row]
                of_row = np.concatenate([of_prompt[-len(prompts[row // n]) :], of_response[: length - 1]])
            responses.append(Response(*divmod(row, n), *kept, not done[row], versions, of_row))
        return Samples(iter(responses), metrics)

    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        *,
        temperature: float = 1.0,
        max_response_tokens: int | None = None,
    ) -> list[np.ndarray]:
        """Scores given responses with the loop that ``generate`` samples with, one token at a time.

        Args:
          prompts: The token ids of each prompt, int32 [s], 1 to ``max_prompt_tokens`` of them.
          responses: The token ids of the response to each prompt, int32 [t].
          temperature: The temperature of the distribution, which is positive.
          max_response_tokens: The loop's length, so that batches share a compilation, or None for the longest response.

        Returns:
          The log-probabilities of each response, float32 [t].
        """
        limit = max_response_tokens or max(map(len, responses))
        forced = np.zeros((len(prompts), limit), np.int32)
        for row, response in zip(forced, responses, strict=True):
            row[: len(response)] = response
        logprobs = self._run(prompts, 1, SamplingParams(limit, temperature), 0, forced)[1]
        return [row[: len(response)] for row, response in zip(logprobs, responses, strict=True)]

    def close(self) -> None:
        """Drops the weights."""
        self._params = None

    def _run(
        self,
        prompts: Sequence[np.ndarray],
        n: int,
        sampling: SamplingParams,
        seed: int,
        forced: np.ndarray | None = None,
        *,
        with_routes: bool = False,
    ) -> tuple[np.ndarray, ...]:
        """Returns the results of ``_decode`` for the published policy, on the host."""
        if self._params is None:
            raise RuntimeError("no policy was published to the embedded engine yet")
        padded = np.zeros((len(prompts), self._width), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            if not 1 <= len(prompt) <= self._width:
                raise ValueError(f"a prompt has {len(prompt)} tokens, expected 1 to max_prompt_tokens = {self._width}")
            row[self._width - len(prompt) :] = prompt
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        # -1 is no token: a response without stop tokens runs to the limit.
        stops = np.asarray(sampling.stop_token_ids or (-1,), np.int32)
        greedy = sampling.temperature == 0.0
        temperature = np.float32(1.0 if greedy else sampling.temperature)
        static = {"n": n, "limit": sampling.max_response_tokens, "greedy": greedy, "with_routes": with_routes}
        with jax.set_mesh(self._mesh):
            inputs = (padded, lengths, stops, temperature, np.uint32(seed), forced)
            result = self._functions.decode(self._params, *inputs, **static)
        return tuple(jax.device_get(result))
