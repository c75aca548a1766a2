"""Continuous decoding of the policy: slots of a cache that take the next prompt as soon as they are free.

A *slot* is one row of the cache, which holds whatever the policy's mixers ask for (``Mixer.state_spec``). The places of
a row form a ring. All slots write their next key and value at the same place, the ring's *time*, which moves on by one
with each token. A response needs ``prompt + response`` places, and the ring has at least that many, so no slot
overwrites its own keys. The mask of a slot marks the places of its prompt and its present response. All other
places hold keys of earlier responses.

Each response depends on the seed, on its own number and on its prompt. It does not depend on the slot or on the other
rows, except that products of another shape may round differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.attention import attend
from rljax.policy.config import PolicyConfig, route_dtype
from rljax.policy.mixers import BlockState, StateArray, Where
from rljax.policy.model import ForwardStats, Params, States, embed_tokens, run_blocks
from rljax.policy.rotary import rotation
from rljax.rollout.decode_sizes import CacheSpec, DecodeSizes, cache_spec
from rljax.rollout.injected import to_cache
from rljax.rollout.likeliest import ALL, NextTokens, Selection, next_tokens, token_key
from rljax.rollout.types import InjectConfig
from rljax.sharding import constrain
from rljax.tokens import COLUMNS, TOPS


class Slots(NamedTuple):
    """The state of all slots: the response that each slot decodes, and its cache."""

    time: Int[Array, ""]  # the place of the ring at which the next keys and values are written
    # The number of the response in each slot, from 0. A free slot has the total number of responses here.
    row: Int[Array, " b"]
    step: Int[Array, " b"]  # the number of tokens that each slot has sampled
    length: Int[Array, " b"]  # the number of tokens of each slot's prompt
    hidden: Float[Array, "b d"]  # the hidden state of each slot's last token, after the final norm
    valid: Bool[Array, "b c"]  # whether a place holds a key of the slot's response or of its prompt
    cache: States  # the states of the mixers, of which a row is one slot


class Sampled(NamedTuple):
    """The tokens that were sampled so far, of all responses."""

    tokens: Any  # int32 [n, r], the tokens of each response, 0 after its end
    # The arrays [n, r, ...] of the tokens by name, as in ``NextTokens``, filled after the end. Where experts are kept,
    # ``routes`` [n, r, l, k] has those of each token.
    arrays: dict[str, Any]
    counts: Int[Array, " n"]  # the number of tokens of each response
    stopped: Bool[Array, " n"]  # whether a stop token ended the response
    # The experts of each prompt's tokens, padded on the left, or None where ``arrays`` has no routes.
    prompt_routes: Int[Array, "p s l k"] | None


class Queue:
    """The responses that no slot has taken yet, in their order. ``left`` is the number of units that wait.

    They start in units: responses to one prompt that start together (``DecodeSizes.unit``).
    """

    def __init__(self, prompts: np.ndarray, lengths: np.ndarray, n: int, batch: DecodeSizes, most: int | None = None):
        """Begins with ``n`` responses to each of the ``prompts``, int32 [p, s], which have ``lengths``, int32 [p].

        ``most``: The most units that start together, or None for as many as there are slots.
        """
        self._prompts, self._lengths, self._n, self._batch = prompts, lengths, n, batch
        self._units = np.arange(len(prompts) * n, dtype=np.int32).reshape(-1, batch.unit)
        most = most or batch.slots
        self._group, self._next_group = min(batch.slots // batch.unit, most), min(batch.group, most)
        self.left = len(self._units)

    @property
    def enough(self) -> int:
        """The number of free slots at which the next units start, or the number of all slots if no unit waits."""
        return min(self._group, self.left) * self._batch.unit if self.left else self._batch.slots

    def admitted(self, free: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields the last five positional arguments of ``admit`` for each group of units that starts now.

        ``free`` are the indices of the free slots, int [f]. A group that is too small is filled up.
        """
        while self.left and len(free) >= self.enough:
            first, group = len(self._units) - self.left, self._group
            units = self._units[first : first + group]
            into, free = np.split(free, [units.size])
            rest = [(0, group - len(units)), (0, 0)]
            rows = np.pad(units, rest)
            into = np.pad(into.astype(np.int32).reshape(units.shape), rest, constant_values=self._batch.slots)
            numbers = np.pad(units[:, 0] // self._n, rest[0], constant_values=len(self._prompts))
            known = np.minimum(numbers, len(self._prompts) - 1)
            self.left, self._group = self.left - len(units), self._next_group
            yield self._prompts[known], self._lengths[known], rows, into, numbers


def cached(
    config: PolicyConfig,
    positions: Int[Array, "b t"],
    valid: Bool[Array, "b t"],
    mask: Bool[Array, "b t s"],
    write_at: Int[Array, ""] | int,
) -> Where:
    """Returns the ``Where`` of new tokens whose keys and values go into a cache. ``valid`` tells tokens from padding.

    Attention writes these keys and values in the dtype of the cache, from place ``write_at`` on. Then it reads all keys
    and values from the cache, rounded to its dtype. ``mask`` says which places each new token attends to.
    """

    def attend_to_cache(q: Array, k: Array, v: Array, state: BlockState | None) -> tuple[Array, BlockState]:
        assert state is not None
        state = state.write((to_cache(new, old.dtype) for old, new in zip(state.arrays, (k, v), strict=True)), write_at)
        k_all, v_all = state.read()
        return attend(q, k_all.astype(k.dtype), v_all.astype(v.dtype), mask), state

    return Where(rotation(config, positions), attend_to_cache, positions, valid)


def _zeros(spec: CacheSpec) -> States:
    return tuple(tuple(jnp.zeros(each.shape, each.dtype) for each in of_block) for of_block in spec)


def _on_mesh(cache: States, spec: CacheSpec) -> States:
    """Constrains the arrays of a cache to their logical axes."""
    return jax.tree.map(lambda array, each: constrain(array, *each.axes), cache, spec)


def empty(
    config: PolicyConfig,
    dtype: Any,
    cache_dtype: Any,
    *,
    prompts: int,
    width: int,
    rows: int,
    limit: int,
    places: int,
    slots: int,
    with_routes: bool,
    reported: int = 0,
) -> tuple[Slots, Sampled]:
    """Returns slots that are all free, and arrays of samples without any token yet.

    Args:
      dtype, cache_dtype: The dtype of the hidden states, and of the cached keys and values.
      width: The length that prompts are padded to.
      rows: The number of responses.
      limit: The longest response (tokens).
      places: The size of the ring, which is more than ``width`` and holds the longest prompt with its response.
      with_routes: Whether the experts of the tokens are kept.
      reported: The number of likeliest tokens that are kept at each position.
    """
    spec = cache_spec(config, slots, places, dtype, cache_dtype)
    cache = _on_mesh(_zeros(spec), spec)
    hidden, valid = jnp.zeros((slots, config.hidden_size), dtype), jnp.zeros((slots, places), bool)
    zeros = jnp.zeros((slots,), jnp.int32)
    free = Slots(jnp.int32(width), zeros + rows, zeros, zeros, hidden, valid, cache)
    tokens, counts = jnp.zeros((rows, limit), jnp.int32), jnp.zeros((rows,), jnp.int32)
    kept = {"rollout_logprobs": (rows, limit)} | dict.fromkeys(TOPS if reported else (), (rows, limit, reported))
    arrays = {name: jnp.full(size, COLUMNS[name].fill, COLUMNS[name].dtype) for name, size in kept.items()}
    prompt_routes = None
    if with_routes:
        experts, dtype = (config.num_layers, config.experts_per_token), route_dtype(config.num_experts)
        arrays["routes"] = jnp.zeros((rows, limit, *experts), dtype)
        prompt_routes = jnp.zeros((prompts, width, *experts), dtype)
    return free, Sampled(tokens, arrays, counts, counts > 0, prompt_routes)


def prefill(
    params: Params, config: PolicyConfig, prompts: Int[Array, "g s"], lengths: Int[Array, " g"], cache_dtype: Any
) -> tuple[Float[Array, "g s d"], States, ForwardStats]:
    """Returns the hidden states of prompts after the final norm, their cache, and the forward's statistics.

    The ``prompts`` are padded on the left, and ``lengths`` has the number of tokens of each. ``cache_dtype`` is the
    dtype of the returned keys and values.
    """
    group, width = prompts.shape
    index = jnp.arange(width)
    valid = index[None, :] >= width - lengths[:, None]
    positions = jnp.maximum(index[None, :] - (width - lengths[:, None]), 0)
    fresh = _zeros(cache_spec(config, group, width, params["embed"].dtype, cache_dtype))
    mask = (index[:, None] >= index[None, :])[None] & valid[:, None, :]
    embedded = embed_tokens(params, prompts)
    return run_blocks(params, config, embedded, cached(config, positions, valid, mask, 0), fresh)


def prefill_logprobs(
    params: Params,
    config: PolicyConfig,
    tokens: Int[Array, "g s"],
    lengths: Int[Array, " g"],
    temperature: Float[Array, ""],
    *,
    cache_dtype: Any,
    lm_head_dtype: Any,
) -> Float[Array, "s g"]:
    """Returns the log-probability of each token but the first, computed in one pass as prompts are.

    ``tokens`` are padded on the left. Row i of the result has the log-probabilities of the tokens at place i + 1. The
    last row has no meaning. The head computes one row at a time, as a step of ``decode`` does.
    """
    hidden, _, _ = prefill(params, config, tokens, lengths, cache_dtype)

    def column(given: tuple[Array, Array]) -> Array:
        new = next_tokens(params, given[0], None, temperature, given[1], lm_head_dtype)
        return new.arrays["rollout_logprobs"]

    return jax.lax.map(column, (jnp.moveaxis(hidden, 1, 0), jnp.roll(tokens, -1, axis=1).T))


def admit(
    params: Params,
    config: PolicyConfig,
    slots: Slots,
    sampled: Sampled,
    prompts: Int[Array, "g s"],
    lengths: Int[Array, " g"],
    rows: Int[Array, "g u"],
    into: Int[Array, "g u"],
    numbers: Int[Array, " g"],
    *,
    cache_dtype: Any,
) -> tuple[Slots, Sampled]:
    """Computes the cache of prompts, and puts each prompt into the slots of its responses.

    The slots and samples are donated. Nothing is written for a prompt that only fills the group up. It has the number
    of slots in ``into`` and the number of prompts in ``numbers``.

    Args:
      params: The weights in the rollout dtype.
      prompts: The token ids, padded on the left.
      lengths: The number of tokens of each prompt.
      rows: The numbers of the responses to each prompt that start now.
      into: The slot of each of these responses.
      numbers: The number of each prompt in the request, from 0.
      cache_dtype: The dtype of cached keys and values.
    """
    group, width = prompts.shape
    places = slots.valid.shape[1]
    index = jnp.arange(width)
    valid = index[None, :] >= width - lengths[:, None]
    hidden, fresh, stats = prefill(params, config, prompts, lengths, cache_dtype)
    ring = (slots.time - width + index) % places
    spec = cache_spec(config, group, width, params["embed"].dtype, cache_dtype)

    def put(number: Array, slots: Slots) -> Slots:
        """Fills one slot for each prompt."""
        at = into[:, number]

        def filled(old: Array, new: Array, each: StateArray) -> Array:
            own = (at[:, None], ring[None, :]) if "tokens" in each.axes else (at,)
            return old.at[:, *own].set(new, mode="drop")

        cache = jax.tree.map(filled, slots.cache, fresh, spec)
        own = jnp.zeros((group, places), bool).at[:, ring].set(valid)
        return slots._replace(
            row=slots.row.at[at].set(rows[:, number], mode="drop"),
            step=slots.step.at[at].set(0, mode="drop"),
            length=slots.length.at[at].set(lengths, mode="drop"),
            hidden=slots.hidden.at[at].set(hidden[:, -1], mode="drop"),
            valid=slots.valid.at[at].set(own, mode="drop"),
            cache=_on_mesh(cache, spec),
        )

    slots = jax.lax.fori_loop(0, into.shape[1], put, slots)
    if sampled.prompt_routes is not None:
        routes = sampled.prompt_routes.at[numbers].set(_routes(stats, config), mode="drop")
        sampled = sampled._replace(prompt_routes=routes)
    return slots, sampled


def decode(
    params: Params,
    config: PolicyConfig,
    slots: Slots,
    sampled: Sampled,
    stops: Int[Array, " k"],
    temperature: Float[Array, ""],
    seed: Int[Array, ""],
    numbers: Int[Array, "n m"] | None,
    forced: Int[Array, "n r"] | None,
    limits: Int[Array, " n"] | None,
    enough: Int[Array, ""],
    *,
    lm_head_dtype: Any,
    selection: Selection = ALL,
    inject: InjectConfig | None = None,
) -> tuple[Slots, Sampled, Bool[Array, " b"]]:
    """Samples tokens, one for every slot at a time, until ``enough`` slots are free. Slots and samples are donated.

    Args:
      params: The weights in the rollout dtype.
      stops: The tokens that end a response.
      numbers: The numbers that give each response its random keys (``token_key``), or None if every token is forced.
      forced: The token that is taken, by response and position, -1 where one is sampled, or None if all are sampled.
      limits: The most tokens of each response, or None where each may fill its row of ``sampled``.
      lm_head_dtype: The dtype in which the LM head computes, or None for that of ``params``.
      selection: The tokens that can be sampled and those that are reported.
      inject: The noise that is put on the logits, or None.

    Returns:
      The slots, the samples, and whether each slot is free.
    """
    total, places = len(sampled.tokens), jnp.arange(slots.valid.shape[1])

    def body(state: tuple[Slots, Sampled]) -> tuple[Slots, Sampled]:
        slots, sampled = state
        known = jnp.minimum(slots.row, total - 1)  # a free slot has no response
        given = None if forced is None else forced[known, slots.step]
        keys = None if numbers is None else jax.vmap(token_key, (None, 0, 0))(seed, numbers[known], slots.step)
        new = next_tokens(params, slots.hidden, keys, temperature, given, lm_head_dtype, selection, inject)
        return _appended(params, config, slots, sampled, new, stops, limits, places)

    slots, sampled = jax.lax.while_loop(lambda state: jnp.sum(state[0].row == total) < enough, body, (slots, sampled))
    return slots, sampled, slots.row == total


def _appended(
    params: Params,
    config: PolicyConfig,
    slots: Slots,
    sampled: Sampled,
    new: NextTokens,
    stops: Int[Array, " k"],
    limits: Int[Array, " n"] | None,
    places: Int[Array, " c"],
) -> tuple[Slots, Sampled]:
    """Runs the policy on the new token of each slot, keeps the token, and frees the slots whose response ends."""
    total, limit = sampled.tokens.shape
    stopped = jnp.any(new.tokens[:, None] == stops[None, :], axis=1)
    valid = slots.valid | (places == slots.time)[None]
    embedded = constrain(embed_tokens(params, new.tokens[:, None]), "rows", "tokens", "act_embed")
    positions = (slots.length + slots.step)[:, None]
    where = cached(config, positions, jnp.ones_like(positions, bool), valid[:, None], slots.time)
    hidden, cache, stats = run_blocks(params, config, embedded, where, slots.cache)
    kept, step = dict(new.arrays), slots.step + 1
    if sampled.prompt_routes is not None:
        kept["routes"] = _routes(stats, config)[:, 0]
    at = slots.row, slots.step  # the token of a free slot is dropped
    sampled = sampled._replace(
        tokens=sampled.tokens.at[at].set(new.tokens, mode="drop"),
        arrays={name: old.at[at].set(kept[name], mode="drop") for name, old in sampled.arrays.items()},
        counts=sampled.counts.at[slots.row].set(step, mode="drop"),
        stopped=sampled.stopped.at[slots.row].set(stopped, mode="drop"),
    )
    most = limit if limits is None else limits[jnp.minimum(slots.row, total - 1)]
    row = jnp.where(stopped | (step >= most), total, slots.row)
    time = (slots.time + 1) % len(places)
    return Slots(time, row, step, slots.length, hidden[:, 0], valid, cache), sampled


def _routes(stats: ForwardStats, config: PolicyConfig) -> Any:
    """Returns the experts that each token went to, [b, t, l, k]."""
    assert stats.router is not None
    return jnp.moveaxis(stats.router.choices, 0, 2).astype(route_dtype(config.num_experts))
