"""Log-probabilities of tokens: ``logprobs[b, t]`` belongs to ``tokens[b, t]``, given the tokens before it.

The policy may compute prefix trees in place of sequences (``PrefixTrees``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.context import fold, unfold, whole_rows
from rljax.policy.families import state_heads
from rljax.policy.head import TokenScores, matmul_precision, token_logprobs
from rljax.policy.kernels import ON_ANY_BACKEND, Kernels
from rljax.policy.model import ForwardStats, Params, Remat, cast_params, hidden_states, lm_head_table
from rljax.sharding import fetch


class PrefixTrees(NamedTuple):
    """Rows of trees that the policy computes, and the indices of the states to score. A pytree of numpy or jax arrays.

    A tree holds a shared token at the beginning of several sequences only once. The children of a token are the tokens
    that follow it in some sequence. A row holds its trees in preorder: a token comes first, and then the subtree of
    each child. So the subtree of the token at ``j`` has the indices from ``j`` up to but not including ``ends[j]``. The
    token at ``i`` sees the token at ``j <= i`` if ``i < ends[j]``. Sequences that share nothing are trees without
    branches. The last token of a sequence is not in its tree, because no token is predicted from it.
    """

    tokens: Any  # int32 [*m, b, t], the token ids
    ends: Any  # int32 [*m, b, t], the place after the last token of the token's subtree; 0 on padding
    positions: Any  # int32 [*m, b, t], the position of the token in its sequences, from 0
    sources: Any  # int32 [*m, b, s], the place in ``tokens`` of the token before each scored token; 0 on padding


def segment_ends(segment_ids: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Returns the ``ends`` of rows of sequences that share nothing; 0 on padding.

    ``segment_ids`` are 0 for padding, else equal for the contiguous tokens of one sequence.
    """
    t = segment_ids.shape[1]
    after = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    last = jnp.where(segment_ids != after, jnp.arange(1, t + 1), t)
    return jnp.where(segment_ids > 0, jax.lax.cummin(last, axis=1, reverse=True), 0)


def states_at(hidden: Float[Array, "b t d"], places: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """Takes the states at the indices ``places`` of each row. The gradients of a state are summed in float32."""
    return jnp.take_along_axis(hidden.astype(jnp.float32), places[..., None], axis=1).astype(hidden.dtype)


_NEVER = -1e30  # The log-probability of a token outside the support: exp gives 0.


def over_support(
    logprobs: Float[Array, "*b"], tops: Float[Array, "*b k"], ids: Int[Array, "*b k"], *, collision: bool = False
) -> TokenScores:
    """Normalises the scores of tokens over the support of a cut distribution, which are the tokens in ``ids``.

    A position without any id has log-probability, entropy and collision 0. The log-probabilities (nats) of the sampled
    token and of each of ``ids`` belong to the whole distribution. An id is negative where there are fewer than k.
    ``collision``: Whether to compute the sum of the squared probabilities, without gradient.
    """
    is_in = ids >= 0
    # Infinite numbers would make the gradient of the sum NaN.
    finite = jnp.where(is_in, tops, _NEVER)
    # These are the operations of log_softmax, so a token in the support gets the bits of its entry there.
    top = jax.lax.stop_gradient(finite.max(axis=-1))
    shifted = finite - top[..., None]
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    inside = shifted - log_sum[..., None]
    p = jnp.where(is_in, jnp.exp(inside), 0.0)
    return TokenScores(
        jnp.where(is_in.any(axis=-1), logprobs - top - log_sum, 0.0),
        -jnp.sum(p * inside, axis=-1),
        jnp.where(is_in, inside, -jnp.inf),
        jax.lax.stop_gradient(jnp.sum(p**2, axis=-1)) if collision else None,
    )


def align(scored: TokenScores, positions: Int[Array, "b t"], segment_ids: Int[Array, "b t"]) -> TokenScores:
    """Moves the scores [b, t - 1], each at the place before its token, to the places of their tokens, [b, t].

    Position 0 of a segment and padding get 0, and -inf in ``tops``.
    """
    moved = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2))), scored)
    return where_inside(moved, (positions > 0) & (segment_ids > 0))


def where_inside(scored: TokenScores, inside: Bool[Array, "b t"]) -> TokenScores:
    """Returns the scores [b, t] of tokens that are ``inside``. Others get 0, and -inf in ``tops``."""

    def kept(x: Array) -> Array:
        return jnp.where(inside, x, 0.0) if x.ndim == 2 else jnp.where(inside[..., None], x, -jnp.inf)

    return jax.tree.map(kept, scored)


def packed_logprobs(
    params: Params,
    config: PolicyConfig,
    tokens: Int[Array, "b t"],
    segment_ids: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    *,
    temperature: float = 1.0,
    lm_head_dtype: Any = None,
    remat: Remat = "none",
    kernels: Kernels = ON_ANY_BACKEND,
    choices: Int[Array, "b t l k"] | None = None,
    top_ids: Int[Array, "b t k"] | None = None,
    cut: bool = False,
    collision: bool = False,
    trees: PrefixTrees | None = None,
) -> TokenScores:
    """Computes the log-probability of each token given the tokens before it in its segment, and the entropy there.

    Args:
      params, remat, kernels, choices: The arguments of ``hidden_states``, of rows that are not folded.
      tokens, segment_ids, positions: The arrays of a micro-batch of ``trainer.packing.PackedBatch``.
      temperature: The temperature of the scored distribution, positive.
      lm_head_dtype: The dtype of the operands of the LM head's products. None: the dtypes of hidden states and table.
      top_ids: The ids of k more tokens to score at each position; -1 where there are fewer. None: no others.
      cut: Whether distributions are cut to ``top_ids`` and normalised over them. Without an id, a token's scores are 0.
      collision: Whether to compute the sum of squared probabilities of each distribution.
      trees: The trees that the policy computes. The segments are then responses only, and ``choices`` belong to the
        tokens of the trees. None: the policy computes the segments, which begin with their prompts.

    Returns:
      The scores with the statistics of the forward pass. ``logprobs[b, t]`` belongs to ``tokens[b, t]``, and
      ``tops[b, t]`` to ``top_ids[b, t]``. The first token of a segment and padding have 0.

    Raises:
      ValueError: The distributions are cut, and ``top_ids`` is None. Or ``trees`` are given, although several devices
        share a row or the policy passes a state from token to token (``state_heads``).
    """
    parts = kernels.parts
    if cut and top_ids is None:
        raise ValueError("top_ids must be given to score a cut distribution, got None")
    if trees is None:
        rows = (tokens, segment_ids, positions) if parts == 1 else whole_rows(tokens, segment_ids, positions)
        computed = (fold(rows[0], parts), segment_ends(rows[1]), fold(rows[2], parts))
        choices = None if choices is None else fold(choices, parts)
    elif parts > 1 or state_heads(config):
        why = "devices cannot share rows" if parts > 1 else f"a {config.family} policy cannot compute rows"
        raise ValueError(f"{why} of trees: give packing.share_prefixes false")
    else:
        computed, kernels = trees[:3], kernels._replace(attention=kernels.tree_attention)
    hidden, stats = hidden_states(params, config, *computed, remat=remat, kernels=kernels, choices=choices)
    if trees is not None:
        states, targets, ids = states_at(hidden, trees.sources), tokens, top_ids
    else:
        # The state at t-1 predicts token t. The last state of a row predicts nothing.
        states, targets = hidden[:, :-1] if parts == 1 else hidden, _next(rows[0], parts)
        ids = None if top_ids is None else _next(top_ids, parts)
    how: dict[str, Any] = {"temperature": temperature, "dtype": lm_head_dtype, "stored": kernels.stored_logits}
    scored = token_logprobs(states, lm_head_table(params), targets, ids, collision=collision and not cut, **how)
    if cut and scored.tops is not None and ids is not None:
        scored = over_support(scored.logprobs, scored.tops, ids, collision=collision)
    if parts > 1:
        scored, stats = _unfold_scores(scored, parts), _unfold_choices(stats, parts)
    scored = align(scored, rows[2], rows[1]) if trees is None else where_inside(scored, segment_ids > 0)
    return scored._replace(stats=stats)


def _next(x: Int[Array, "b t *k"], parts: int) -> Array:
    """Returns the entry of the next token for each token but the last one of a row, [b, t - 1, ...].

    If ``parts`` devices share a row the result is folded, and the last token of a row has the entry 0.
    """
    if parts == 1:
        return x[:, 1:]
    return fold(jnp.pad(x[:, 1:], [(0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)]), parts)


def _unfold_scores(scored: TokenScores, parts: int) -> TokenScores:
    """Returns folded scores as scores of whole rows without their last states, [b, t - 1, ...]."""
    of_tokens = {name: x for name, x in scored._asdict().items() if x is not None and name != "tops"}
    # The numbers of a token travel as one array.
    whole = unfold(jnp.stack([*of_tokens.values()], axis=2), parts)[:, :-1]
    scored = scored._replace(**{name: whole[..., i] for i, name in enumerate(of_tokens)})
    return scored if scored.tops is None else scored._replace(tops=unfold(scored.tops, parts)[:, :-1])


def _unfold_choices(stats: ForwardStats, parts: int) -> ForwardStats:
    """Returns the measurements of a forward with the experts of each token [layers, b, t, k] in whole rows."""
    if stats.router is None:
        return stats
    choices = unfold(jnp.moveaxis(stats.router.choices, 0, 2), parts)
    return stats._replace(router=stats.router._replace(choices=jnp.moveaxis(choices, 2, 0)))


@functools.lru_cache(maxsize=8)
def make_scorer(
    config: PolicyConfig,
    dtype: Any,
    *,
    temperature: float = 1.0,
    multiple: int = 64,
    mesh: Mesh | None = None,
    remat: Remat | None = None,
) -> Callable[[Params, Sequence[np.ndarray]], list[np.ndarray]]:
    """Builds a function ``score(params, sequences) -> logprobs`` for checks outside the training step.

    The function takes float32 masters and casts them to ``dtype``. It returns one vector for each sequence, and
    ``logprobs[i][0]`` is 0. Rows are padded to a multiple of ``multiple`` tokens, and their number to a power of two,
    so that few shapes are compiled. Equal arguments give the same function; the last eight functions are kept.

    With a ``mesh`` the masters lie on it. With ``remat`` the program also has the backward of a training step, which
    recomputes the activations that ``remat`` names.
    """

    def with_sum(params: Params, tokens: Array, segment_ids: Array) -> tuple[Array, Array]:
        rows = (tokens, segment_ids, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
        logprobs = packed_logprobs(params, config, *rows, temperature=temperature, remat=remat or "none").logprobs
        return jnp.sum(logprobs), logprobs

    @jax.jit
    def run(params: Params, tokens: Array, segment_ids: Array) -> tuple[Array, Array]:
        with jax.default_matmul_precision(matmul_precision(dtype)):
            cast = cast_params(params, dtype)
            if remat is None:
                return with_sum(cast, tokens, segment_ids)[1], jnp.float32(0.0)
            (_, logprobs), grads = jax.value_and_grad(with_sum, has_aux=True)(cast, tokens, segment_ids)
            # Without a use of the gradients the compiler would leave the backward out.
            squares = [jnp.sum(jnp.square(g), dtype=jnp.float32) for g in jax.tree.leaves(grads)]
            return logprobs, jnp.sum(jnp.stack(squares))

    def score(params: Params, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        if not sequences:
            return []
        width = -(-max(len(s) for s in sequences) // multiple) * multiple
        rows = 1 << (len(sequences) - 1).bit_length()
        tokens = np.zeros((rows, width), np.int32)
        segments = np.zeros((rows, width), np.int32)
        for i, sequence in enumerate(sequences):
            tokens[i, : len(sequence)] = sequence
            segments[i, : len(sequence)] = 1
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            logprobs, _ = fetch(run(params, tokens, segments))
        return [logprobs[i, : len(sequence)] for i, sequence in enumerate(sequences)]

    return score
