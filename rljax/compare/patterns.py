"""Finds tokens or responses that carry the gap between two columns of log-probabilities, and a column with a cut.

The error of a token is abs(log-ratio) over the token's uncertainty 1 - p. Rounding makes about the same error at every
token. Between two states of a policy uncertain tokens have far larger errors than certain ones, so the usual error
is measured at uncertain tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rljax.mismatch.accurate import exp_minus_one_minus_x
from rljax.mismatch.signs import WORSE_THAN_UNIFORM
from rljax.record.dump_facts import TokenPair
from rljax.record.token_arrays import to_rows

LEAST_UNCERTAINTY = 0.02
"""The least number that a log-ratio is divided by. Below it, the log-probability itself is rounded too coarsely."""
_UNCERTAIN = 0.1  # the least uncertainty of a token whose error is compared with that of others
_TIMES = 8.0  # the least ratio of errors between tokens that carry the gap and the others; 1 to 2 without a fault
_SHARE = 0.8  # the least share of k3 that such tokens carry; at most 0.12 without a fault
_MOST = 0.25  # the largest share of the tokens that can be such tokens
_FEWEST = 8  # the fewest of them
_LEAST = 1e-2  # nats; the least log-ratio of a fault
_ROW_TIMES, _ROW_LEAST = 10.0, 0.2  # a wrong response has so many times the usual error, and at least this error
_ROW_FEWEST = 4  # the fewest responses, and the fewest tokens of a wrong one
_HALF = 0.5  # the least share of the gap that wrong responses carry
_PLAUSIBLE = 5.0  # nats; a sampler's own mean entropy is below
_CLEAR = 1e-3  # nats; smaller log-ratios are rounding of certain tokens
_LARGEST_RATIO = 1.1  # the 99% quantile of the ratio; a cut has at most 1.08 and noise in 16 bits, others 1.2 and more
_SIGMAS = 5.0  # the least lack of the mean ratio over its standard error; at most 3.4 without a cut
_OF_GAP = 0.2  # the least lack of the mean ratio over the mean gap; at most 0.14 without a cut

Pattern = tuple[str, str, str]
"""A finding: its status, its cause and its reason, as a ``Verdict`` has them."""


def find_patterns(
    pair: TokenPair, x: np.ndarray, y: np.ndarray, mask: np.ndarray, valid: np.ndarray
) -> Iterator[Pattern]:
    """Yields findings on which tokens carry the gap. Only the first counts, because it may cause the later ones.

    Args:
      pair: The two columns.
      x: The trainer's column of the pair, float64 [b, t] (nats).
      y: The rollout engine's column of the pair, float64 [b, t] (nats).
      mask: The marks of response tokens, bool [b, t].
      valid: The marks of response tokens with a finite number in both columns, bool [b, t].
    """
    lr = np.subtract(x, y, out=np.zeros(x.shape), where=valid)
    if valid.sum() < 2 * _FEWEST or np.abs(lr).max() <= _LEAST:
        return
    uncertainty = np.where(valid, -np.expm1(np.minimum(np.minimum(x, y), 0.0)), 0.0)
    yield from _one_side(x[valid], y[valid])
    yield from _responses(lr, np.where(uncertainty > _UNCERTAIN, uncertainty, 0.0))
    yield from _places(lr, uncertainty, valid, mask, to_rows(pair.dump.token_ids, -1))
    yield from find_cut(pair.distinct_lr)


def _one_side(x: np.ndarray, y: np.ndarray) -> Iterator[Pattern]:
    """Yields a finding if one column finds hardly any token likely that the other finds likely."""
    for cause, name, wrong, right in (("trainer_side", "first", x, y), ("engine_side", "second", y, x)):
        if np.quantile(-wrong, 0.1) > WORSE_THAN_UNIFORM and -np.mean(right) < _PLAUSIBLE:
            size = f"{-np.mean(wrong):.3g} nats in the mean, and nine in ten more than {WORSE_THAN_UNIFORM:g}"
            other = f"while the other column gives them {-np.mean(right):.2g}"
            reason = f"the {name} column gives the tokens {size}: it finds them less likely than random tokens, {other}"
            yield "fail", cause, reason


def _responses(lr: np.ndarray, uncertainty: np.ndarray) -> Iterator[Pattern]:
    """Yields a finding if a few responses are wrong as a whole. Tokens with an uncertainty of 0 are left out.

    The largest tenth of the log-ratios of each response is left out, so that a few extreme tokens make no response
    wrong.
    """
    counts, size = (uncertainty > 0.0).sum(1), np.where(uncertainty > 0.0, np.abs(lr), 0.0)
    kept = np.sort(size, axis=1)[:, ::-1]
    kept[np.arange(kept.shape[1]) < np.ceil(counts / 10)[:, None]] = 0.0
    there = counts >= _ROW_FEWEST
    if there.sum() < _ROW_FEWEST:
        return
    error = kept.sum(1)[there] / uncertainty.sum(1)[there]
    usual = float(np.quantile(error, 0.25))
    wrong = (error > _ROW_TIMES * usual) & (error > _ROW_LEAST)
    carried = size.sum(1)[there][wrong].sum() / np.abs(lr).sum()
    if wrong.any() and carried > _HALF:
        gap = f"a gap per uncertainty of {np.median(error[wrong]):.2g} where the others have {usual:.2g}"
        whole = f"{wrong.sum()} of {there.sum()} responses are wrong as a whole, with {gap}"
        why = "they are paired with other prompts, or their numbers are shifted"
        yield "fail", "some_responses", f"{whole}, and carry {carried:.0%} of the gap: {why}"


def _places(
    lr: np.ndarray, uncertainty: np.ndarray, valid: np.ndarray, mask: np.ndarray, ids: np.ndarray
) -> Iterator[Pattern]:
    """Yields a finding if tokens at one kind of place carry the gap."""
    error = np.abs(lr) / np.maximum(uncertainty, LEAST_UNCERTAINTY)
    k3: np.ndarray = exp_minus_one_minus_x(np, np.clip(lr, -20.0, 20.0))
    for cause, words, at in _kinds(error, valid, mask, ids):
        inside, others = valid & at, ~at & (uncertainty > _UNCERTAIN)
        if not _FEWEST <= inside.sum() <= _MOST * valid.sum() or others.sum() < _FEWEST:
            continue
        share, usual = k3[inside].sum() / max(k3[valid].sum(), 1e-30), float(np.median(error[others]))
        low, size = float(np.quantile(error[inside], 0.25)), float(np.median(np.abs(lr[inside])))
        if share > _SHARE and low > _TIMES * usual and size > _LEAST:
            here = f"{size:.2g} at these {inside.sum()} of {valid.sum()} tokens"
            there = f"{np.median(np.abs(lr[others])):.2g} at uncertain others"
            reason = f"{share:.0%} of k3_kl is at {words}: the median of abs(log-ratio) is {here}, and {there}"
            yield "fail", cause, reason
            return


def _kinds(
    error: np.ndarray, valid: np.ndarray, mask: np.ndarray, ids: np.ndarray
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields kinds of places: a cause, words, and the tokens at such places, bool [b, t]."""
    place = np.cumsum(valid, 1)
    yield "first_token", "the first token of each response", place == 1
    for last in (1, 2, 3):
        words = "the last token" if last == 1 else f"the last {last} tokens"
        yield "last_tokens", f"{words} of each response", place > valid.sum(1, keepdims=True) - last
    before = np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    begins = mask & ~before & (np.cumsum(mask, 1) > 1)
    yield "after_environment", "the first token after each text of the environment", begins
    far = valid & (error > _TIMES * max(float(np.median(error[valid])), 1e-9))
    earlier = np.pad(ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    for words, tokens in (("the token", ids), ("the token after id", earlier)):
        if len(found := tokens[far & (tokens >= 0)]):
            one = int(np.bincount(found).argmax())
            yield "one_token", f"{words} {one}", tokens == one


def ratio_bias(lr: np.ndarray) -> float:
    """Returns the mean of exp(lr) minus 1, in its standard errors, for at least one log-ratio, [n], clipped to +-20."""
    ratio = np.exp(np.clip(lr, -20.0, 20.0))
    return float((np.mean(ratio) - 1.0) / max(float(np.std(ratio)) / math.sqrt(len(ratio)), 1e-9))


def missing_mass(lr: np.ndarray) -> float:
    """Returns how many standard errors the mean of exp(lr) is below 1, for log-ratios [n] to the sampler's column.

    It is 0 if this lack is small beside the mean gap, or if some ratios are far above 1, which no cut causes.
    """
    if len(lr) < _FEWEST or np.quantile(lr, 0.99) >= math.log(_LARGEST_RATIO):
        return 0.0
    lack = 1.0 - float(np.mean(np.exp(lr)))
    return -ratio_bias(lr) if lack > _OF_GAP * float(np.mean(np.abs(lr))) else 0.0


def find_cut(lr: np.ndarray) -> Iterator[Pattern]:
    """Yields a finding if the mean ratio of one column to the other is below 1. ``lr`` are log-ratios [n] (nats).

    If both distributions are over all tokens, the mean ratio to the sampler's is 1, however far apart they are. If the
    sampler's is normalised over fewer tokens, the mean ratio is the mass of these tokens. A cut keeps it below 1 when
    the largest fifth of the log-ratios is clipped. Otherwise a few wrong tokens are the reason.
    """
    for name, signed in (("second", lr), ("first", -lr)):
        lacks = missing_mass(signed)
        if lacks <= _SIGMAS:
            continue
        usual = float(np.quantile(np.abs(signed), 0.8))
        if missing_mass(np.clip(signed, -usual, usual)) > _SIGMAS:
            mass, share = float(np.mean(np.exp(signed))), float(np.mean(signed[np.abs(signed) > _CLEAR] < 0))
            lack = f"{lacks:.0f} standard errors below 1, and {share:.0%} of the log-ratios have one sign"
            left = f"the tokens that a cut (top_p, top_k, min_p) left, with {mass:.1%} of the mass"
            reason = f"the {name} column is normalised over {left}, and the other column over the whole vocabulary"
            yield "refused", "truncated_sampling", f"the mean ratio is {lack}: {reason}"
