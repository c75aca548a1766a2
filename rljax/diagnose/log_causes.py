"""Names causes from the course of a log: faults of trainer or engine, of synchronisation, rewards and groups.

The rules need the numbers of the steps and no buckets, so they hold for the logs of all projects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rljax.diagnose.course import FEWEST_STEPS, Course
from rljax.diagnose.evidence import LIKELY, POSSIBLE, SURE, Finding
from rljax.mismatch.signs import WORSE_THAN_UNIFORM

TOGETHER = 5
"""The number of steps by which a sign may come after the fall of the reward and still belong to it."""
_STAYS, _BREAKS = 0.7, 0.5  # the shares of its former value above which a reward stays, and below which it breaks
_JUMP = 5.0  # the least ratio of one step's mismatch to all earlier ones that shows a fault and no growth
_CUT = 0.005  # the smallest mass that a cut takes, as one minus the mean ratio
_MOST_STEPS = 0.9  # the share of the steps that have to show a sign that does not come and go
_SPIKE = 4.0  # the least ratio of a spike's mismatch to the median
_LEAST_SPIKED = 1e-7  # the least usual mismatch whose steps are not rounding alone
_CHANCE = 1e-3  # the largest chance that the steps of a reward with few values are equal by themselves
_MOST_ENTROPY = 20.0  # a larger one is a sum over responses, as verl may log: a token has log(vocabulary) at most
_DEAD = 0.1  # the share of its first value under which entropy, signal or gradient norm is gone


def find_log_causes(course: Course) -> Iterator[Finding]:
    """Yields the findings of the first rule that fits, because they explain the signs that later rules look for."""
    for rule in _RULES:
        found = list(rule(course))
        if found:
            yield from found
            return


def _known(course: Course, name: str) -> np.ndarray:
    values = course.log.get(name)
    return values[np.isfinite(values)]


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _is_constant(values: np.ndarray) -> bool:
    return bool(len(values) and np.ptp(values) == 0.0)


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Returns the medians of the first and the last quarter of some numbers."""
    count = max(1, len(values) // 4)
    return _median(values[:count]), _median(values[-count:])


def _reward_around(course: Course, at: int) -> tuple[float, float]:
    """Returns the medians of the reward over five steps before index ``at`` and from it on; NaN if there is none."""
    reward = course.log.get("reward")
    parts = (reward[max(0, at - 5) : at], reward[at : at + 5])
    before, after = (_median(part[np.isfinite(part)]) for part in parts)
    return before, after


def _nonfinite(course: Course) -> Iterator[Finding]:
    lost = dict(course.log.lost)
    names = [name for name in ("loss", "grad_norm", "entropy") if name in lost]
    if names:
        first = min(lost[name] for name in names)
        others = f"; the reward ends at {course.last['reward']:.2g}" if "reward" in course.last else ""
        said = f"{', '.join(names)} and {len(lost) - len(names)} other signals are not finite from step {first} on"
        yield Finding("nonfinite_training", SURE if len(lost) > 1 else LIKELY, said + others)
    elif lost:
        name = min(lost, key=lambda each: lost[each])
        yield Finding("missing_numbers", LIKELY, f"{name} is not finite from step {lost[name]} on")


def _trainer_side(course: Course) -> Iterator[Finding]:
    names = ("kl", "logprob_abs_diff_mean", "log_ppl_abs_diff", "k3_kl")
    name = next((name for name in names if course.log.has(name)), "")
    is_far = np.abs(course.log.get(name)) > WORSE_THAN_UNIFORM
    if not name and course.log.has("ratio_mean"):
        name, is_far = "ratio_mean", course.log.get("ratio_mean") < math.exp(-WORSE_THAN_UNIFORM)
    count = max(1, len(is_far) // 4)
    if is_far[-count:].mean() < _MOST_STEPS:
        return
    at = int(np.flatnonzero(is_far)[0])
    first, after = _ends(_known(course, "reward"))
    before = first if at == 0 else _reward_around(course, at)[0]
    if before > 0 and after > _STAYS * before:
        said = f"from step {course.log.steps[at]} on the trainer finds the responses less likely than random tokens"
        numbers = f"{name} {course.last[name]:.3g} at the end, reward {before:.2g} before and {after:.2g} after"
        yield Finding("trainer_side", LIKELY, f"{said}, and they earn as before ({numbers})")


def _sync_fault(course: Course) -> Iterator[Finding]:
    rate, gap = _known(course, "learning_rate"), np.abs(_known(course, course.gap_name))
    if len(gap) < 4 or not len(rate) or rate.any():
        return
    first, last = _median(gap[:2]), _median(gap[-2:])
    if last > 3 * first and gap[-2:].min() > 2 * gap[: max(2, len(gap) // 4)].max():
        said = f"{course.gap_name} goes from {first:.2g} to {last:.2g} at a learning rate of 0"
        yield Finding("sync_fault", LIKELY, f"{said}: no update explains it, so weights change on their way")


def _jump(course: Course) -> Iterator[Finding]:
    """Yields a finding if the mismatch jumps from one step to the next and stays, or at the end of a short log."""
    gap, steps = np.abs(course.log.get(course.gap_name)), course.log.steps
    known = np.flatnonzero(np.isfinite(gap))
    is_short = 1 < len(known) < FEWEST_STEPS
    for place in range(1 if is_short else 2, len(known) if is_short else len(known) - 2):
        before, at, after = gap[known[:place]], known[place], gap[known[place:]]
        usual = float(np.median(before))
        if usual <= 0 or gap[at] < max(_JUMP * before[-5:].max(), 2 * before.max()):
            continue
        is_near = steps[at] - steps[known[place - 1]] <= 2
        stays = np.mean(after > max(_JUMP / 2 * usual, before.max())) >= _MOST_STEPS
        if not is_near or not stays or course.is_stale or (is_short and gap[at] < 1.5 * _JUMP * before.max()):
            return
        earned, earns = _reward_around(course, int(at))
        said = f"{course.gap_name} goes from {usual:.2g} to {gap[at]:.2g} in step {steps[at]} and stays"
        if earned > 0 and earns < _BREAKS * earned:
            yield Finding("engine_side", LIKELY, f"{said}, and the reward falls from {earned:.2g} to {earns:.2g} there")
        else:
            yield Finding("other_weights", LIKELY, f"{said}: one update does not move a policy so far")
        return


def _short_growth(course: Course) -> Iterator[Finding]:
    """Yields growth in a table of a few steps, which is too short for an onset."""
    gap = np.abs(_known(course, course.gap_name))
    if 4 <= len(gap) < FEWEST_STEPS and (gap[1:] > 0.9 * gap[:-1]).all() and gap[-1] > 4 * gap[0] > 0:
        listed = ", ".join(f"{value:.2g}" for value in gap)
        yield Finding("mismatch_growth", LIKELY, f"{course.gap_name} grows from step to step of the table: {listed}")


def _stale_cache(course: Course) -> Iterator[Finding]:
    gap = np.abs(_known(course, course.gap_name))
    if len(gap) < 12:
        return
    low = float(np.quantile(gap, 0.1))
    drops = [at for at in range(len(gap) - 1) if gap[at] > 2.5 * low and gap[at + 1 : at + 3].max() < 0.6 * gap[at]]
    edges = [-1, *drops]
    teeth = [gap[a + 1 : b + 1] for a, b in zip(edges, drops, strict=False)]
    rises = [_rank_correlation(tooth) for tooth in teeth if len(tooth) >= FEWEST_STEPS]
    if len(rises) >= 2 and len(rises) == len(teeth) and np.median(rises) > 0.7:
        lengths = ", ".join(str(len(tooth)) for tooth in teeth[:4])
        back = f"falls back to {_median(gap[np.array(drops) + 1]):.2g}, {len(drops)} times (after {lengths} steps)"
        yield Finding("stale_cache", LIKELY, f"{course.gap_name} rises step by step and {back}, as at restarts")


def _rank_correlation(values: np.ndarray) -> float:
    """Returns Spearman's rank correlation of numbers with their indices; 0 for equal numbers."""
    ranks = np.argsort(np.argsort(values))
    return 0.0 if _is_constant(values) else float(np.corrcoef(np.arange(len(values)), ranks)[0, 1])


def _cut(course: Course) -> Iterator[Finding]:
    """Yields a finding if the mean ratio of the tokens is below 1 at every step. Without a cut its mean is 1."""
    log = course.log
    lack = 1.0 - log.get("ratio_mean")
    known = np.isfinite(lack)
    mass = _median(lack[known])
    if not known.any() or not mass > _CUT or np.mean(lack[known] > mass / 4) < _MOST_STEPS:
        return
    largest, gap = _median(_known(course, "ratio_max")), _median(_known(course, "logprob_abs_diff_mean"))
    k1, k3 = _median(_known(course, "kl")), _median(_known(course, "k3_kl"))
    if log.columns.get("kl") and math.isfinite(k3):
        is_cut = k1 > 2.5 * k3
        sign = f"kl is {k1 / max(k3, 1e-9):.1f} times k3_kl, where both are about equal without a cut"
    elif math.isfinite(gap):
        # Each abs(lr) of a cut is at least 1 - exp(lr); a ratio of whole sequences is far outside.
        is_cut = 0.3 * gap < mass < 1.1 * gap and not largest > 1.9
        sign = f"abs(lr) is {gap:.2g}, so nearly all log-ratios are negative"
    else:
        is_cut = largest < 1.5 if math.isfinite(largest) else float(np.std(lack[known])) < 0.3 * mass < 0.1
        sign = f"the largest ratio is {largest:.3g}" if math.isfinite(largest) else "it hardly changes"
    if is_cut:
        said = f"the mean ratio of trainer to engine is {1 - mass:.3f} at nearly every step, and {sign}"
        removed = f"the tokens that top_p, top_k or min_p removed have a mass of {mass:.3f}"
        yield Finding("truncated_sampling", LIKELY, f"{said}: {removed}")


def _sharpened(course: Course) -> Iterator[Finding]:
    """Yields a temperature if the engine's distribution is a sharpened form of the trainer's."""
    high, low = (np.log(np.maximum(_known(course, f"ratio_{end}"), 1e-9)) for end in ("max", "min"))
    gap, lack = _known(course, "logprob_abs_diff_mean"), _median(1.0 - _known(course, "ratio_mean"))
    if len(gap) < 3 or not len(high) or not len(low) or np.quantile(gap, 0.1) < 0.05:
        return
    first, last = _ends(gap)
    up, down = _median(high), -_median(low)
    if up > 1.5 * down and abs(lack) < 0.05 and 0.5 < last / first < 2:
        said = f"ratios reach from {math.exp(-down):.2g} to {math.exp(up):.2g} around a mean of {1 - lack:.3f}"
        yield Finding("temperature", LIKELY, f"from the first step on {said}, as where the engine is sharper")


def _spikes(course: Course) -> Iterator[Finding]:
    """Yields extreme tokens if single steps, far apart, have many times the mismatch of the others."""
    for name in (course.gap_name, "k3_kl"):
        values = np.abs(_known(course, name))
        usual = _median(values)
        if len(values) < 12 or not usual > _LEAST_SPIKED:
            continue
        far = values > max(_SPIKE * usual, usual + 10 * _median(np.abs(values - usual)))
        largest = np.abs(course.log.get("logprob_abs_diff_max")[np.isfinite(course.log.get(name))])
        far |= (values > 2 * usual) & (largest > 10 * _median(largest[np.isfinite(largest)]))
        starts = int(np.sum(far[1:] & ~far[:-1])) + int(far[0])
        halves = [float(np.mean(half)) for half in np.array_split(far, 2)]
        if starts >= 3 and min(halves) > 0 and far.mean() < 0.5 and far.sum() < 3 * starts:
            said = f"{name} is {usual:.2g} in most steps and up to {values.max():.3g} in {far.sum()} of {len(values)}"
            yield Finding("extreme_tokens", LIKELY, f"{said}, which come and go: single tokens make them")
            return


def _bad_start(course: Course) -> Iterator[Finding]:
    gap = np.abs(_known(course, course.gap_name))
    rest = gap[len(gap) // 4 :]
    if len(gap) < 12 or not len(rest):
        return
    usual = float(np.median(rest))
    count = int(np.argmin(gap > 4 * usual))  # the steps before the first that is not large
    # A gap that shrinks as the policy learns and becomes sure does so by degrees.
    is_sudden = count > 0 and gap[count] < 0.5 * gap[count - 1]
    if usual > 0 and is_sudden and count <= len(gap) // 4 and (gap[count + 1 :] < 2.5 * usual).all():
        said = f"{course.gap_name} is {_median(gap[:count]):.2g} in the first {count} steps"
        yield Finding("bad_start", LIKELY, f"{said} and {usual:.2g} after them")


def _truncation(course: Course) -> Iterator[Finding]:
    share = _known(course, "truncated")
    first, last = _ends(share)
    if _is_constant(_known(course, "reward")) and share.min(initial=1.0) >= _MOST_STEPS and len(share):
        reward = course.last["reward"]
        said = f"{first:.0%} of the responses are cut at the limit from the first step on, and each earns {reward:.3g}"
        yield Finding("truncation", LIKELY, said)
        return
    length, entropy = _known(course, "length"), _ends(_known(course, "entropy"))
    leads = (course.onsets["gap"].lead or 0) > 0
    tail = length[-max(3, len(length) // 10) :]
    if last >= 0.5 and first <= 0.5 * last:
        said = f"the share of responses that the limit cuts rises from {first:.1%} to {last:.0%}"
    elif not len(share) and len(length) and np.std(tail) < 0.01 * tail.mean() > 0.015 * _ends(length)[0]:
        said = f"the mean length rises from {_ends(length)[0]:.4g} to {tail.mean():.4g} tokens and stands still there"
    else:
        return
    if course.decline is not None and not leads and not entropy[1] > 2 * entropy[0]:
        fall = f"from step {course.decline} on (peak {course.peak:.2g}, end {course.last['reward']:.2g})"
        yield Finding("truncation", LIKELY, f"{said}, and the reward falls {fall}")


def _entropy_collapse(course: Course) -> Iterator[Finding]:
    first, last, fall = course.first, course.last, course.onsets["entropy"].lead
    dead = {name: last[name] < _DEAD * first[name] for name in ("entropy", "signal", "grad_norm") if name in last}
    is_gone = dead.get("signal") or dead.get("grad_norm") or course.decline is not None
    is_in_time = course.decline is None or (fall is not None and fall > -TOGETHER)
    reward = last.get("reward", math.nan)
    if dead.get("entropy") and is_gone and is_in_time and not reward > 0.8:
        said = f"entropy falls from {first['entropy']:.2g} to {last['entropy']:.2g} nats"
        yield Finding("entropy_collapse", LIKELY, f"{said}, and the reward ends at {reward:.2g}")


def _constant_reward(course: Course) -> Iterator[Finding]:
    """Yields a broken reward if it jumps to a constant, at which it stays, in one step."""
    log = course.log
    reward = _known(course, "reward")
    if len(reward) < 8 or _is_constant(reward):
        return
    at = int(np.flatnonzero(reward != reward[-1])[-1]) + 1
    usual, noise = _median(reward[max(0, at - 5) : at]), _median(np.abs(np.diff(reward[:at])))
    change = abs(usual - reward[-1])
    index = int(np.flatnonzero(np.isfinite(log.get("reward")))[at])
    size = "" if course.gap_name == "kl" else course.gap_name  # noise alone doubles and halves a mean of both signs
    is_alone = all(_is_unchanged(log.get(name), index) for name in (size, "entropy", "length"))
    count = len(reward) - at
    is_long = count >= max(3, len(reward) // 20) and np.mean(reward[:at] == reward[-1]) ** count < _CHANCE
    if is_alone and is_long and abs(reward[at - 1] - reward[-1]) > 0.5 * change > 2 * noise:
        said = f"the reward goes from {usual:.2g} to exactly {reward[-1]:.3g} in step {log.steps[index]}"
        yield Finding("reward_broken", LIKELY, f"{said} and is the same at all {count} steps since")


def _is_unchanged(values: np.ndarray, at: int) -> bool:
    """Returns whether a signal is of about one size before and from index ``at`` on; True if it is unknown."""
    before, after = (_median(np.abs(part[np.isfinite(part)])) for part in (values[:at], values[at:]))
    return not (before > 2 * after or after > 2 * before)


def _no_signal(course: Course) -> Iterator[Finding]:
    signal, spread, advantage = (_known(course, name) for name in ("signal", "reward_std", "largest_advantage"))
    gradient, reward = _known(course, "grad_norm"), _known(course, "reward")
    if course.decline is not None:  # groups lose their signal where a policy has failed
        return
    is_still = len(gradient) > 0 and not gradient.any()
    signs = {
        "the share of groups whose rewards differ is 0": len(signal) > 0 and _ends(signal)[1] <= 0.01,
        "the standard deviation of the rewards is 0": len(spread) > 0 and not spread.any(),
        "all advantages are 0": len(advantage) > 0 and not advantage.any(),
    }
    if any(signs.values()):
        said = next(sign for sign, holds in signs.items() if holds)
        still = ", and the gradient norm is 0" if is_still else ""
        yield Finding("no_signal", SURE if is_still else LIKELY, said + still)
    elif is_still and len(reward) >= 3 and _is_constant(reward):
        said = f"the reward is exactly {reward[0]:.3g} at all {len(reward)} steps, and the gradient norm is 0"
        yield Finding("reward_broken", LIKELY, said)
    elif len(reward) >= 8 and _is_constant(reward) and not gradient.any():
        yield Finding("reward_broken", POSSIBLE, f"the reward is exactly {reward[0]:.3g} at all {len(reward)} steps")
    elif is_still and len(reward) >= 3:
        said = f"the gradient norm is exactly 0 at all {len(gradient)} steps, and the reward differs between steps"
        yield Finding("no_update", LIKELY, said)


def _policy_drift(course: Course) -> Iterator[Finding]:
    name = "reference_kl" if course.log.has("reference_kl") else "policy_kl"
    drift = _known(course, name)
    if course.gap_name or len(drift) < 8 or course.largest.get("entropy", 0.0) > _MOST_ENTROPY:
        return
    first, last = _ends(np.abs(drift))
    if last > max(1.0, 10 * first):
        said = f"{name} goes from {first:.2g} to {last:.2g} nats a token; the log has no mismatch"
        yield Finding("policy_drift", LIKELY, said)


_RULES = (
    *(_nonfinite, _trainer_side, _sync_fault, _stale_cache, _cut, _sharpened, _spikes, _bad_start, _jump),
    *(_short_growth, _truncation, _entropy_collapse, _constant_reward, _no_signal, _policy_drift),
)
