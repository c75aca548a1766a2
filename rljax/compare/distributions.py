"""Compares scorers by their whole next-token distributions.

The log-ratio of a sampled token says little about other tokens: two engines may agree on every token of a dump and
differ on the others. At each response token, given the same tokens before it, the rollout engine has a distribution p
and the trainer a distribution q. They are compared by KL(p || q) = sum_i p_i log(p_i / q_i).

A scorer may know only its likeliest tokens. Then the tokens that both scorers know are kept, and all others become one
outcome, "the rest". By the data processing inequality the KL over merged outcomes is a lower bound.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax.compare.scorers import check_vocabulary, load_hf, open_server, split_model, split_spec
from rljax.policy.families import read_config
from rljax.policy.head import all_logits, matmul_precision
from rljax.policy.hf import load_params
from rljax.policy.model import Params, cast_params, hidden_states, lm_head_table
from rljax.policy.score import segment_ends
from rljax.record.token_dumps import TokenDump
from rljax.rollout.kinds import engines_that

_SERVERS = engines_that("serves")
KINDS = ("jax", "hf", *_SERVERS)
"""The kinds of scorers that give next-token distributions; a server gives only the likeliest tokens."""

_MULTIPLE = 64  # tokens and places are padded to a multiple of this, so that few shapes are compiled
_LEAST_REST = 1e-7  # the smallest rest: the rounding of a sum of float32 probabilities


class TokenLogprobs(NamedTuple):
    """The next-token log-probabilities that a scorer gives at n positions."""

    logprobs: np.ndarray  # float32 [n, k], nats; -inf fills places with fewer than k known tokens
    ids: np.ndarray | None = None  # the token ids, int32 [n, k], -1 as fill; None for the whole vocabulary in order


DistributionsAt = Callable[[np.ndarray, np.ndarray], TokenLogprobs]
"""A function of token ids [t] and places [n], each >= 1: gives the distribution before the token at each place."""


@dataclass(frozen=True)
class DistributionPair:
    """The comparison of two scorers at every response token of a dump.

    Of the metrics, ``kl`` is the mean of KL(p || q), ``kl_max`` its maximum, ``reverse_kl`` the mean of KL(q || p)
    (nats). ``total_variation`` is the mean of half the sum of abs(p - q). ``top1_agreement`` is the share of positions
    where both scorers have the same likeliest token. ``rest_mass`` is the mean mass of p on the rest, ``token_count``
    the number of positions.
    """

    trainer: str  # the scorer with the distribution q
    rollout: str  # the scorer with the distribution p
    is_complete: bool  # whether both know every token; if not, metrics but top1_agreement are over merged outcomes
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
    """Compares every two of the scorers that give distributions (``KINDS``). Other scorers are left out.

    A server beside another kind is the rollout engine; otherwise the earlier of two specs is the trainer. The models of
    all scorers are in memory together. Sequences are scored one after another: each scorer holds float32 [response
    tokens, vocabulary], and the comparison of two makes several copies in float64.

    Args:
      specs: The specs of the scorers, in the forms of ``score_column``.
      dump: The sequences; their columns are not read.
      model: The Hugging Face directory for specs that name none.
      temperature: The temperature of the distributions; it must be 1 with a server.
      top_k: The number of likeliest tokens that a server returns, at most its --max-logprobs (20 by default). A smaller
        vocabulary of another scorer's model limits it.
      progress: A function that gets the number of newly compared sequences.

    Raises:
      ValueError: Fewer than two specs give distributions, the temperature is not 1 with a server, a scorer has no
        model directory, two vocabularies differ in size, or a token is outside a vocabulary.
      ServerError: A server does not answer, or refuses.
    """
    known = with_distributions(specs)
    whole = {spec: split_spec(spec)[0] not in _SERVERS for spec in known}
    if temperature != 1.0 and not all(whole.values()):
        raise ValueError(f"a server's prompt log-probabilities are at temperature 1, got {temperature:g}")
    directories = [split_model(spec, model)[1] for spec in known if whole[spec]]
    top_k = min([top_k, *(read_config(directory).vocab_size for directory in directories)])
    pairs = list(itertools.combinations(known, 2))
    columns: dict[tuple[str, str], list[np.ndarray]] = {pair: [] for pair in pairs}
    with contextlib.ExitStack() as stack:
        scorers = {spec: stack.enter_context(_open_scorer(spec, dump, model, temperature, top_k)) for spec in known}
        for ids, mask in zip(dump.token_ids, dump.response_mask, strict=True):
            places = np.flatnonzero(mask[1:]) + 1
            if len(places):
                rows = {spec: distributions_at(ids, places) for spec, distributions_at in scorers.items()}
                for q, p in pairs:
                    columns[q, p].append(divergences(rows[p], rows[q]))
            progress(1)
    return [DistributionPair(q, p, whole[q] and whole[p], _summary(parts)) for (q, p), parts in columns.items()]


def with_distributions(specs: Sequence[str]) -> list[str]:
    """Returns each spec whose scorer gives distributions once, servers last.

    Raises ValueError if there are fewer than two.
    """
    kinds = {spec: split_spec(spec)[0] for spec in dict.fromkeys(specs)}
    known = sorted((spec for spec in kinds if kinds[spec] in KINDS), key=lambda spec: kinds[spec] in _SERVERS)
    if len(known) < 2:
        got = ", ".join(specs) or "none"
        raise ValueError(f"whole distributions need two scorers of the kinds {', '.join(KINDS)}, got {got}")
    return known


def divergences(p: TokenLogprobs, q: TokenLogprobs) -> np.ndarray:
    """Compares the distributions of two scorers at each of n positions by five numbers, float64 [n, 5].

    They are KL(p || q) and KL(q || p) (nats), the total variation, the agreement of the likeliest token (0 or 1), and
    the mass of p on the rest. Raises ValueError if both know every token, but their vocabularies differ in size.
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
    """Computes the KL [n] of outcomes with log-probabilities x against y [n, k] from terms p log(p / q) - p + q.

    No term is negative, so tiny KLs keep their digits. The sum also contains the rounding of sum q - sum p.
    """
    with np.errstate(invalid="ignore"):
        gap = np.where(np.isneginf(x), 0.0, x - y)
        return np.where(np.isneginf(x), np.exp(y), np.exp(x) * (np.expm1(-gap) + gap)).sum(1)


def _top(known: TokenLogprobs) -> np.ndarray:
    best = np.argmax(known.logprobs, axis=1)
    return best if known.ids is None else known.ids[np.arange(len(best)), best]


def _shared(p: TokenLogprobs, q: TokenLogprobs) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probabilities of the outcomes that both sides know, float64 [n, k] each, filled with -inf."""
    x, y = p.logprobs.astype(np.float64), q.logprobs.astype(np.float64)
    if p.ids is None and q.ids is None:
        if x.shape != y.shape:
            raise ValueError(f"vocabularies of {x.shape[1]} and {y.shape[1]} tokens; are the models different?")
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
    table = np.concatenate([np.zeros((0, 5)), *columns])
    names = ("kl", "reverse_kl", "total_variation", "top1_agreement", "rest_mass")
    means = dict(zip(names, (table.sum(0) / max(len(table), 1)).tolist(), strict=True))
    return means | {"kl_max": float(table[:, 0].max(initial=0.0)), "token_count": float(len(table))}


@contextlib.contextmanager
def _open_scorer(
    spec: str, dump: TokenDump, model: str | Path | None, temperature: float, top_k: int
) -> Iterator[DistributionsAt]:
    kind, argument = split_spec(spec)
    if kind in _SERVERS:
        with open_server(argument, kind) as server:
            yield lambda ids, places: _read_top(server.top_logprobs(ids, top_k), places)
        return
    dtype, directory = split_model(spec, model)
    check_vocabulary(dump, read_config(directory).vocab_size)
    yield {"jax": _jax_scorer, "hf": _hf_scorer}[kind](directory, dtype, temperature)


def _read_top(tops: Sequence[dict[int, float]], places: np.ndarray) -> TokenLogprobs:
    width = max(len(tops[place]) for place in places)
    ids, logprobs = np.full((len(places), width), -1, np.int32), np.full((len(places), width), -np.inf, np.float32)
    for row, place in enumerate(places):
        ids[row, : len(tops[place])], logprobs[row, : len(tops[place])] = [*tops[place]], [*tops[place].values()]
    return TokenLogprobs(logprobs, ids)


def _jax_scorer(directory: Path, dtype: str, temperature: float) -> DistributionsAt:
    config = read_config(directory)
    params = load_params(directory, config)

    @jax.jit
    def log_softmax(params: Params, tokens: Any, segments: Any, before: Any, temperature: Any) -> jax.Array:
        """Computes the log-softmax after the positions ``before`` [n] of one row ``tokens`` [1, t], float32 [n, v]."""
        with jax.default_matmul_precision(matmul_precision(dtype)):
            cast = cast_params(params, dtype)
            positions = jnp.arange(tokens.shape[1])[None]
            hidden, _ = hidden_states(cast, config, tokens, segment_ends(segments), positions)
            logits = all_logits(hidden[0, before], lm_head_table(cast))
        return jax.nn.log_softmax(logits / temperature, axis=-1)

    def distributions_at(ids: np.ndarray, places: np.ndarray) -> TokenLogprobs:
        width, count = (math.ceil(n / _MULTIPLE) * _MULTIPLE for n in (len(ids), len(places)))
        tokens, segments = (np.zeros((1, width), np.int32) for _ in range(2))
        tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
        before = np.zeros(count, np.int32)
        before[: len(places)] = places - 1
        rows = log_softmax(params, tokens, segments, before, np.float32(temperature))
        return TokenLogprobs(np.asarray(rows[: len(places)]))

    return distributions_at


def _hf_scorer(directory: Path, dtype: str, temperature: float) -> DistributionsAt:
    torch, model, device = load_hf(directory, dtype)

    def distributions_at(ids: np.ndarray, places: np.ndarray) -> TokenLogprobs:
        with torch.inference_mode():
            tokens = torch.tensor(ids[None], dtype=torch.long, device=device)
            logits = model(input_ids=tokens).logits[0, torch.tensor(places - 1, device=device)].float() / temperature
            return TokenLogprobs(torch.log_softmax(logits, dim=-1).cpu().numpy())

    return distributions_at
