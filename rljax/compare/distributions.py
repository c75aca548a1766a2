"""Scorers compared by their whole next-token distributions, and not only by the tokens that were sampled.

A sampled token's log-ratio says little of the tokens that were not sampled: two engines may agree on every token of a
dump and differ elsewhere. At each response token the distributions p of the rollout engine and q of the trainer, given
the same tokens before it, are compared by KL(p || q) = sum_i p_i log(p_i / q_i). Where a side knows only its likeliest
tokens, the tokens that both know are kept and all others become one outcome, "the rest". A KL over merged outcomes is
never above that over all of them (the data processing inequality), so that it is a lower bound.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax.compare.scorers import check_vocabulary, hf_log_softmax, open_server, split_model, split_spec
from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config
from rljax.policy.head import head_operands, matmul_precision
from rljax.policy.hf import load_params
from rljax.policy.model import Params, cast_params, hidden_states, lm_head_table
from rljax.record.token_dumps import TokenDump
from rljax.rollout.types import SERVED

KINDS = ("jax", "hf", *SERVED)
"""Kinds of scorers that know distributions; a server knows the likeliest tokens alone."""

_MULTIPLE = 64  # tokens and places are padded to it, so that few shapes are compiled
_LEAST_REST = 1e-7  # what a rest is at least: the rounding of a sum of float32 probabilities


class Known(NamedTuple):
    """What a scorer knows of the distributions at n places.

    Attributes:
      logprobs: float32 [n, k], nats; -inf where a place has fewer than k known tokens.
      ids: int32 [n, k], whose they are, -1 where there is none; None: of every token of the vocabulary in order.
    """

    logprobs: np.ndarray
    ids: np.ndarray | None = None


Source = Callable[[np.ndarray, np.ndarray], Known]
"""(token ids [t], places [n], each at least 1) -> the distributions of the tokens at these places."""


@dataclass(frozen=True)
class DistributionPair:
    """Two scorers at every response token of a dump.

    Attributes:
      trainer: the scorer in the place of q.
      rollout: the scorer in the place of p.
      is_complete: whether both know every token; otherwise every number but ``top1_agreement`` is of merged outcomes.
      metrics: ``kl`` mean KL(p || q), ``kl_max`` the largest, ``reverse_kl`` mean KL(q || p) (nats);
        ``total_variation`` mean of half the sum of abs(p - q); ``top1_agreement`` share of places with one likeliest
        token; ``rest_mass`` mean of p's mass on the rest; ``token_count`` places.
    """

    trainer: str
    rollout: str
    is_complete: bool
    metrics: dict[str, float]


def compare_distributions(
    specs: Sequence[str],
    dump: TokenDump,
    model: str | Path | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 20,
    progress: Callable[[int], object] = lambda count: None,
) -> list[DistributionPair]:
    """Compares every two of the scorers that know distributions; other specs are left out.

    One sequence is taken at a time. All scorers' models are in memory together, and of one sequence 4 bytes for each
    response token, token of the vocabulary and scorer.

    Args:
      specs: as ``score_column`` takes them. A server stands in the rollout's place; otherwise the earlier of two specs
        is the trainer's.
      dump: the sequences; its columns are not read.
      model: Hugging Face directory of the specs that name none.
      temperature: of the distributions; 1 where one of them is a server's.
      top_k: how many of its likeliest tokens a server is asked for; at most its --max-logprobs, 20 by default. Of a
        smaller vocabulary, as the server or another scorer's directory gives it, all tokens.
      progress: called with a number of sequences when so many have been compared.

    Raises:
      ValueError: fewer than two of the specs know distributions; a temperature that a server does not score; a
        scorer without a model directory; two scorers with vocabularies of different sizes; a token outside one.
      ServerError: a server does not answer, or refuses.
    """
    known = with_distributions(specs)
    kinds = {spec: split_spec(spec)[0] for spec in known}
    if temperature != 1.0 and any(kinds[spec] in SERVED for spec in known):
        raise ValueError(f"a server's prompt log-probabilities are at temperature 1, {temperature:g} was asked for")
    directories = [split_model(split_spec(spec)[1], model)[1] for spec in known if kinds[spec] not in SERVED]
    top_k = min([top_k, *(read_config(Path(path)).vocab_size for path in directories if path is not None)])
    pairs = list(itertools.combinations(known, 2))
    found: dict[tuple[str, str], list[np.ndarray]] = {pair: [] for pair in pairs}
    with contextlib.ExitStack() as stack:
        sources = {spec: stack.enter_context(_opened(spec, dump, model, temperature, top_k)) for spec in known}
        for ids, mask in zip(dump.token_ids, dump.response_mask, strict=True):
            places = np.flatnonzero(mask[1:]) + 1
            if len(places):
                rows = {spec: source(ids, places) for spec, source in sources.items()}
                for q, p in pairs:
                    found[q, p].append(divergences(rows[p], rows[q]))
            progress(1)
    return [
        DistributionPair(q, p, not {kinds[p], kinds[q]} & {*SERVED}, _summary(columns))
        for (q, p), columns in found.items()
    ]


def with_distributions(specs: Sequence[str]) -> list[str]:
    """Those of the specs whose scorers know distributions, servers last.

    Raises:
      ValueError: there are fewer than two, or a spec is unknown.
    """
    kinds = {spec: split_spec(spec)[0] for spec in dict.fromkeys(specs)}
    known = sorted((spec for spec in kinds if kinds[spec] in KINDS), key=lambda spec: kinds[spec] in SERVED)
    if len(known) < 2:
        raise ValueError(
            f"whole distributions need two scorers of the kinds {', '.join(KINDS)}, got {', '.join(specs) or 'none'}"
        )
    return known


def divergences(p: Known, q: Known) -> np.ndarray:
    """Float64 [n, 5]: KL(p || q), KL(q || p), total variation, whether both have one likeliest token, p's rest.

    Raises:
      ValueError: both know every token, of vocabularies of different sizes.
    """
    same_top = _top(p) == _top(q)
    x, y = _shared(p, q)
    rest_p, rest_q = np.zeros(len(x)), np.zeros(len(y))
    if p.ids is not None or q.ids is not None:
        rest_p, rest_q = (np.maximum(1.0 - np.exp(side).sum(1), _LEAST_REST) for side in (x, y))
        x, y = (np.column_stack([side, np.log(rest)]) for side, rest in ((x, rest_p), (y, rest_q)))
    variation = 0.5 * np.abs(np.exp(x) - np.exp(y)).sum(1)
    return np.column_stack([_kl(x, y), _kl(y, x), variation, same_top, rest_p])


def _kl(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """KL [n] of the outcomes with log-probabilities x against y [n, k], term by term as p log(p / q) - p + q.

    No term is negative, and the sum is the KL plus what float32 leaves of sum q - sum p: tiny KLs keep their digits.
    """
    with np.errstate(invalid="ignore"):
        gap = np.where(np.isneginf(x), 0.0, x - y)
        return np.where(np.isneginf(x), np.exp(y), np.exp(x) * (np.expm1(-gap) + gap)).sum(1)


def _top(known: Known) -> np.ndarray:
    """The likeliest token at each place, [n]."""
    best = np.argmax(known.logprobs, axis=1)
    return best if known.ids is None else known.ids[np.arange(len(best)), best]


def _shared(p: Known, q: Known) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the outcomes that both know, float64 [n, k] each; -inf on both sides where there is none."""
    x, y = p.logprobs.astype(np.float64), q.logprobs.astype(np.float64)
    if p.ids is None and q.ids is None:
        if x.shape != y.shape:
            raise ValueError(f"vocabularies of {x.shape[1]} and {y.shape[1]} tokens: of different models?")
        return x, y
    if p.ids is None:
        y, x = _shared(q, p)
        return x, y
    if q.ids is None:
        there = np.take_along_axis(y, np.maximum(p.ids, 0), axis=1)
        return x, np.where(p.ids < 0, -np.inf, there)
    matches = (p.ids[:, :, None] == q.ids[:, None, :]) & (p.ids >= 0)[:, :, None]
    there = np.where(matches, y[:, None, :], -np.inf).max(2)
    return np.where(matches.any(2), x, -np.inf), there


def _summary(columns: Sequence[np.ndarray]) -> dict[str, float]:
    table = np.concatenate(columns) if columns else np.zeros((0, 5))
    means = table.mean(0) if len(table) else np.zeros(5)
    names = ("kl", "reverse_kl", "total_variation", "top1_agreement", "rest_mass")
    largest = float(table[:, 0].max(initial=0.0))
    return dict(zip(names, map(float, means), strict=True)) | {"kl_max": largest, "token_count": float(len(table))}


@contextlib.contextmanager
def _opened(spec: str, dump: TokenDump, model: str | Path | None, temperature: float, top_k: int) -> Iterator[Source]:
    kind, argument = split_spec(spec)
    if kind in SERVED:
        with open_server(argument, kind) as server:
            yield lambda ids, places: _listed(server.top_logprobs(ids, top_k), places)
        return
    dtype, directory = split_model(argument, model)
    if directory is None:
        raise ValueError(f"scorer {spec!r} needs a model directory")
    check_vocabulary(dump, read_config(Path(directory)).vocab_size)
    yield (_jax_source if kind == "jax" else _hf_source)(Path(directory), dtype, temperature)


def _listed(tops: Sequence[dict[int, float]], places: np.ndarray) -> Known:
    """What a server listed at these places."""
    width = max(len(tops[place]) for place in places)
    ids, logprobs = np.full((len(places), width), -1, np.int32), np.full((len(places), width), -np.inf, np.float32)
    for row, place in enumerate(places):
        ids[row, : len(tops[place])], logprobs[row, : len(tops[place])] = [*tops[place]], [*tops[place].values()]
    return Known(logprobs, ids)


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _log_softmax(
    params: Params,
    tokens: jax.Array,
    segments: jax.Array,
    before: jax.Array,
    temperature: jax.Array,
    *,
    config: PolicyConfig,
    dtype: str,
) -> jax.Array:
    """Float32 [n, v] of one row ``tokens`` [1, t], after each of the places ``before`` [n]."""
    with jax.default_matmul_precision(matmul_precision(dtype)):
        cast = cast_params(params, dtype)
        positions = jnp.arange(tokens.shape[1])[None]
        hidden, _ = hidden_states(cast, config, tokens, segments, positions)
        states, table = head_operands(hidden[0, before], lm_head_table(cast), None)
        logits = jnp.einsum(
            "nd,vd->nv", states, table, precision=matmul_precision(table.dtype), preferred_element_type=jnp.float32
        )
    return jax.nn.log_softmax(logits / temperature, axis=-1)


def _jax_source(directory: Path, dtype: str, temperature: float) -> Source:
    config = read_config(directory)
    params = load_params(directory, config)

    def source(ids: np.ndarray, places: np.ndarray) -> Known:
        width, count = (math.ceil(n / _MULTIPLE) * _MULTIPLE for n in (len(ids), len(places)))
        tokens, segments = (np.zeros((1, width), np.int32) for _ in range(2))
        tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
        before = np.zeros(count, np.int32)
        before[: len(places)] = places - 1
        rows = _log_softmax(params, tokens, segments, before, np.float32(temperature), config=config, dtype=dtype)
        return Known(np.asarray(rows[: len(places)]))

    return source


def _hf_source(directory: Path, dtype: str, temperature: float) -> Source:
    rows = hf_log_softmax(directory, dtype, temperature)
    return lambda ids, places: Known(rows(ids, places))
