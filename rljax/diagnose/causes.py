"""Names the cause of a mismatch or a collapse from the facts of a log and a dump, or "cannot_tell"."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from rljax.diagnose.course import Course
from rljax.diagnose.evidence import BEYOND, CONFIDENCES, DTYPES, EFFECTS, LIKELY, POSSIBLE, SURE, Facts, Finding
from rljax.diagnose.log_causes import TOGETHER, find_log_causes

if TYPE_CHECKING:
    from rljax.diagnose.token_facts import TokenFacts

DECISIVE: Mapping[str, str] = {
    **dict.fromkeys(("constant_fill", "off_by_one", "other_rows", "other_base", "no_tokens"), "not_comparable"),
    **{cause: cause for cause in ("truncated_sampling", "some_responses", "first_token", "last_tokens", "one_token")},
    **{cause: cause for cause in ("after_environment", "trainer_side", "engine_side")},
}
"""The cause to diagnose by the cause of ``compare``'s verdict, if this makes all other facts of a dump meaningless."""
OF_VERDICTS = {**DECISIVE, "left_out": "missing_numbers", "temperature": "temperature"}
"""The cause to diagnose by the cause of ``compare``'s verdict, if this shows it by itself."""

_FAR_SHARE = 0.01  # the least share of tokens far above the median error; rounding and drift have less
_CUT = 4.0  # the least lack of the mean ratio that lets a cut be possible (standard errors)
_MOST_BIAS = 3.0  # the largest deviation of the mean ratio of noise from 1 (standard errors)
_ALONG = 2.5  # the least ratio between the errors of the last and the first bucket that shows growth, or a fall
_FALL = 1.5  # the least ratio between the errors of the second and the last bucket of a temperature
_STEEP = 4.5  # the least rise of the error with uncertainty that rounding does not explain
_LEAST_CHI2 = 0.01  # the least chi2_token that random gaps of a few thousand tokens do not explain
_NEAR = ("1", "2_to_4")  # the buckets of the smallest distances from an environment's tokens
_FEWEST_EXTREMES = 20
_NEVER_CROSSED = {"extreme_rate", "nonfinite_count"}  # a healthy run crosses none of these limits
_TEMPERATURE_EFFECT = 0.02  # nobody would set a temperature with a smaller error


def judge_cause(facts: Facts) -> tuple[str, list[Finding]]:
    """Returns the cause, a key of CAUSES, and all findings, the best supported first.

    Without a sure or likely finding the cause is "healthy" or "cannot_tell". "healthy" needs no finding at all. With a
    dump no limit may be crossed. A log alone needs a mismatch of usual size, few extreme tokens and no collapse.
    """
    if facts.runs:
        names = ", ".join(facts.runs)
        return "several_runs", [Finding("several_runs", SURE, f"the file has {len(facts.runs)} runs: {names}")]
    if facts.is_summary:
        said = "a summary has the last value of each metric: when it changed, and what changed first, is in the history"
        return "one_row", [Finding("one_row", SURE, said)]
    if facts.course is not None:
        facts = facts._replace(of_course=tuple(find_log_causes(facts.course)))
    every = [finding for rule in RULES for finding in rule(facts)]
    findings = sorted(every, key=lambda finding: CONFIDENCES.index(finding.confidence))
    if findings and findings[0].confidence != POSSIBLE:
        return findings[0].cause, findings
    crossed = {one.signal for one in facts.crossings if one.is_crossed}
    if facts.tokens is None and facts.course is not None:
        is_calm = facts.course.decline is None and not crossed & _NEVER_CROSSED
        is_sound = bool(facts.course.gap_name) and facts.is_normal and is_calm
    else:
        is_sound = facts.tokens is not None and not crossed
    return ("healthy" if is_sound and not findings else "cannot_tell"), findings


def find_token_causes(tokens: TokenFacts) -> Iterator[Finding]:
    """Yields what a dump shows: repeated responses, the cause of ``compare``'s verdict, a cut, or a router's noise."""
    verdict = tokens.verdict
    if count := tokens.repeated:
        said = "responses have the tokens and, to the bit, the log-probabilities of one to another prompt"
        yield Finding("not_comparable", SURE, f"{count} {said}")
    if verdict.cause in DECISIVE or verdict.cause == "left_out":
        is_likely = verdict.cause in ("trainer_side", "engine_side")
        yield Finding(OF_VERDICTS[verdict.cause], LIKELY if is_likely else SURE, verdict.reason)
    if tokens.is_beyond or tokens.effect_without >= EFFECTS["bfloat16"] or tokens.is_of_few:
        return
    if tokens.ratio_bias < -_CUT and verdict.cause != "truncated_sampling":
        said = f"the mean ratio is {-tokens.ratio_bias:.1f} standard errors below 1, as below a cut of little mass"
        yield Finding("truncated_sampling", POSSIBLE, said)
    elif tokens.far_share > _FAR_SHARE and abs(tokens.ratio_bias) < _MOST_BIAS:
        said = f"the median error of the logits is {tokens.effect_without:.2g}, of rounding in 16 bits"
        far = f"{tokens.far_share:.1%} of the tokens have 8 times that or more"
        yield Finding("router_noise", LIKELY, f"{said}, and {far}; the mean ratio is 1, as of noise")


def _comparable(facts: Facts) -> Iterator[Finding]:
    """Yields the findings that make all other numbers meaningless."""
    if facts.tokens is not None:
        verdict = facts.tokens.verdict
        yield from find_token_causes(facts.tokens)
        if verdict.cause == "other_weights" and verdict.status == "refused" and not facts.declared.forms:
            yield Finding("other_weights", SURE, verdict.reason)
    for one in facts.crossings:
        if one.signal == "nonfinite_count" and one.is_crossed:
            steps = f"{one.steps} of {one.measured} steps have tokens without a finite number on one side"
            yield Finding("missing_numbers", SURE, steps)


def _unscored(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if no response of a step could be scored."""
    if facts.course is not None and facts.course.largest.get("error_fraction", 0.0) >= 1.0:
        lasts = facts.course.last["error_fraction"] >= 1.0
        which = "the last steps" if lasts else "some steps"
        yield Finding("failed_rewards", SURE if lasts else POSSIBLE, f"no response of {which} could be scored")


def _stale(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if older weights sampled the tokens, according to the log, or else to a dump's versions."""
    course, tokens, fresh, stale = facts.course, facts.tokens, math.nan, math.nan
    is_large, is_doubtful = facts.origin in ("8 bits", BEYOND), True
    if course is not None and course.is_stale:
        names = (f"mismatch_{part}/logprob_abs_diff_mean" for part in ("numerics", "drift"))
        fresh, stale = (course.first.get(name, math.nan) for name in names)
        buckets = course.staleness_gaps
        if math.isnan(stale) and len(buckets) > 1 and "0" in buckets:
            fresh, stale = buckets["0"], max(gap for label, gap in buckets.items() if label != "0")
        age = max(course.first["staleness"], course.last["staleness"], 0.0)
        said = f"rollouts are {age:.3g} versions old" if age else "some rollouts are old"
        split = f"of the gap {stale:.2g} nats are drift and {fresh:.2g} numerics"
        unsplit = ", but the log does not split the gap into drift and numerics"
        is_doubtful = any(one.is_crossed for one in facts.crossings)
    elif course is None and tokens is not None and tokens.staleness > 0:
        if len(gaps := tokens.by_staleness) == 2:
            fresh, stale = gaps["fresh"], gaps["stale"]
        said = f"the tokens were sampled {tokens.staleness:.3g} versions before they were trained on, in the mean"
        split = f"the gap per uncertainty is {stale:.2g} of stale tokens and {fresh:.2g} of fresh"
        unsplit, is_large = "", is_large or _are_two_states(tokens)
    else:
        return
    if not math.isnan(stale):
        yield Finding("staleness", SURE if stale > 2 * fresh else POSSIBLE, f"{said}; {split}")
    elif is_large:
        yield Finding("staleness", LIKELY, f"{said}, and the gap is larger than rounding in 16 bits makes it")
    elif is_doubtful:
        yield Finding("staleness", POSSIBLE, said + unsplit)


def _temperature(facts: Facts) -> Iterator[Finding]:
    tokens, course = facts.tokens, facts.course
    if _is_late(course) or (tokens is not None and _rises_with_uncertainty(tokens)):
        return
    if tokens is not None and tokens.verdict.cause == "temperature":
        yield Finding("temperature", SURE, tokens.verdict.reason)
        return
    values = list(course.effects.get("mismatch_entropy", {}).values()) if course else []
    if len(values) < 3 or max(values) < _TEMPERATURE_EFFECT or values[-1] <= 0 or any(_length(facts)):
        return
    fall = values[0] / values[-1]
    is_steady = values[1] > _FALL * values[-1]  # a sharp policy has large errors in its lowest bucket alone
    if fall > _ALONG and is_steady and values[0] >= values[len(values) // 2] >= values[-1]:
        said = "from the first step on, the relative error falls with the entropy of the token"
        size = f"{fall:.1f} times from the lowest to the highest bucket"
        yield Finding("temperature", LIKELY, f"{said}, {size}: certain tokens differ most, as at another temperature")


def _rises_with_uncertainty(tokens: TokenFacts, times: float = _ALONG) -> bool:
    """Returns whether uncertain tokens have by far the largest error, as between two states of one policy."""
    values = list(tokens.by_uncertainty.values())
    return len(values) > 1 and max(values[1:]) > times * values[0] and values[-1] > 1.5 * values[0]


def _are_two_states(tokens: TokenFacts) -> bool:
    """Returns whether the gap is large and looks like two states of one policy, not like rounding."""
    if tokens.is_beyond:
        return _rises_with_uncertainty(tokens)
    return tokens.effect_without > EFFECTS["bfloat16"] and _rises_with_uncertainty(tokens, _STEEP)


def _is_late(course: Course | None) -> bool:
    """Returns whether a log's mismatch is much smaller at the first step than later, or its rollouts are stale."""
    if course is None or math.isnan(course.effect_start):
        return False
    later = max(course.effect_first, course.effect_last)
    return course.effect_start * 3 < later or course.is_stale


def _weights(facts: Facts) -> Iterator[Finding]:
    course = facts.course
    if facts.of_course:
        return
    if course is not None and course.starts_at <= 2 and not course.is_stale:
        start, later = course.effect_start, max(course.effect_first, course.effect_last)
        name = "error of the logits"
        if math.isnan(start) and course.gap_name:
            name, start = course.gap_name, course.start
            later = max(course.first[course.gap_name], course.last[course.gap_name])
        early = course.early_growth
        is_noise = later > 0 and start > 0 and math.log(later / start) < 4 * course.noise
        is_noise |= course.gap_name == "kl" and facts.is_normal  # one number of a signed mean may be near 0
        if start < later / 4 and early > 3 and early * start > later / 20 and not is_noise:
            if "staleness" not in course.last:
                yield Finding("staleness", POSSIBLE, "the log has no staleness, and the mismatch begins after step 1")
            first = f"{start:.2g} at step {course.starts_at}, when both sides hold the weights that the run starts from"
            then = f"{early:.2g} times that within the first quarter of the steps, and {later:.2g} later"
            why = "no staleness is reported: the engine does not get all of the new weights"
            yield Finding("other_weights", LIKELY, f"the {name} is {first}, {then}; {why}")
    tokens = facts.tokens
    if any(finding.confidence != POSSIBLE for finding in _stale(facts)):
        return
    if tokens is not None and _are_two_states(tokens) and course is None and not facts.declared.forms:
        listed = ", ".join(f"{value:.2g} ({label})" for label, value in tokens.by_uncertainty.items())
        said = (
            f"the gap per uncertainty rises with the uncertainty of the token: {listed}; rounding gives about the same"
        )
        said += " at each, two states of one policy differ where it is undecided (older weights give the same picture)"
        is_likely = _rises_with_uncertainty(tokens, _STEEP) or facts.origin == BEYOND
        yield Finding("other_weights", LIKELY if is_likely else POSSIBLE, said)
    elif facts.origin == BEYOND and not _is_late(course) and not any((*_extreme(facts), *_temperature(facts))):
        said = f"{facts.size} is beyond what rounding in 8 bits gives, from the first step"
        said += ", and it does not have the pattern of a temperature" if facts.is_split else ""
        yield Finding("other_weights", LIKELY if facts.is_split else POSSIBLE, said)


def _extreme(facts: Facts) -> Iterator[Finding]:
    tokens, course = facts.tokens, facts.course
    if tokens is not None and tokens.is_of_few:
        few = f"{tokens.outliers} of {int(tokens.metrics['token_count'])} tokens"
        rest = f"without them the error of the logits is {tokens.effect_without:.2g}"
        yield Finding("extreme_tokens", SURE, f"{few} carry {tokens.outlier_share:.0%} of k3_kl; {rest}")
    if course is None:
        return
    k3, p99 = course.first.get("k3_kl", math.nan), course.first.get("logprob_abs_diff_p99", math.nan)
    if course.is_of_few:
        said = f"one token in a hundred carries at least {1 - course.k3_of_most / k3:.1%} of k3_kl ({k3:.2g})"
        yield Finding("extreme_tokens", SURE, f"{said}: the others are below {p99:.2g} nats")
    names = ("chi2_token", "logprob_abs_diff_mean", "logprob_abs_diff_std")
    chi2, mean, std = (course.first.get(name, math.nan) for name in names)
    if math.isnan(p99) and k3 > 0 and chi2 > max(50 * k3, _LEAST_CHI2):
        yield Finding("extreme_tokens", LIKELY, f"chi2_token is {chi2 / k3:.0f} times k3_kl, where 2 to 4 is usual")
    elif math.isnan(p99) and 0 < mean < std / 8:
        yield Finding("extreme_tokens", LIKELY, f"the standard deviation of abs(lr) is {std / mean:.0f} times its mean")


def _after_environment(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if most extreme tokens, but few tokens in all, directly follow the environment's tokens."""
    course = facts.course
    if course is None:
        return
    turns, after = course.counts("turns/turn"), course.counts("turns/after")
    every, extreme = (sum(each) for each in zip(*turns.values(), strict=True)) if turns else (0.0, 0.0)
    near, found = (sum(after.get(label, (0.0, 0.0))[i] for label in _NEAR) for i in (0, 1))
    if extreme >= max(_FEWEST_EXTREMES, 1e-3 * every) and found > 0.5 * extreme and found / extreme > 3 * near / every:
        share = f"{found / extreme:.0%} of the {extreme:.0f} extreme tokens"
        said = f"{share} are among the first 4 after what the environment wrote"
        yield Finding("after_environment", SURE, f"{said}, and {near / every:.1%} of all tokens are there")


def _length(facts: Facts) -> Iterator[Finding]:
    tokens, course = facts.tokens, facts.course
    groups: list[Mapping[str, float]] = []
    if course is not None:
        groups.append(course.effects.get("mismatch_position", {}))
    if tokens is not None and not _rises_with_uncertainty(tokens) and _growth(tokens.by_position) > _ALONG:
        groups.append(tokens.effects)
    for effects in groups:
        values, labels = list(effects.values()), list(effects)
        growth, falls = _growth(effects), sum(after < before for before, after in itertools.pairwise(values))
        # An engine of 8 bits has a large error at the first tokens already. Its error also grows by itself, because the
        # errors of its cache add up (measured in the study at fixed weights).
        least = 4 * _ALONG if values and values[0] > EFFECTS["bfloat16"] else _ALONG
        if growth > least and 4 * falls < len(values) and not any(_extreme(facts)):
            ends = f"from {values[0]:.2g} ({labels[0]}) to {values[-1]:.2g} ({labels[-1]})"
            said = f"the error of the logits grows {growth:.1f} times along the response, {ends}"
            sure = SURE if growth > 3 * _ALONG else LIKELY
            yield Finding("length_growth", sure, f"{said}; entropy does not enter this number")
            return


def _growth(values: Mapping[str, float]) -> float:
    """Returns the value of the last bucket divided by that of the first; 0 with fewer than three buckets."""
    first, *_, last = values.values() if len(values) > 2 else (1.0, 0.0)
    return last / first if first > 0 else 0.0


def _dtype(facts: Facts) -> Iterator[Finding]:
    tokens, declared, origin = facts.tokens, facts.declared, facts.origin
    size = facts.size
    if tokens is not None and len(tokens.grids) == 1 and declared.coarser:
        column, grid = next(iter(tokens.grids.items()))
        if declared.coarser in DTYPES[: DTYPES.index(grid)]:
            said = f"the logits of column {column!r} lie on {grid}'s grid, those of the other column do not, and both"
            said += f" sides are said to compute in {declared.coarser}: only the head of one side is in {grid}"
            yield Finding("head_dtype", SURE, said)
            return
    if declared.coarser in ("float32", "float16") and origin == "bfloat16":
        said = f"{size} is as of bfloat16, but both sides are said to compute in {declared.coarser}"
        place = "a head in bfloat16 is the likeliest place; the whole forward of one side is another"
        yield Finding("head_dtype", LIKELY, f"{said}: {place}")
    if origin == "8 bits" and not _is_late(facts.course):
        if declared.forms:
            yield Finding("eight_bits", SURE, f"{size} is of 8 bits, and the engine is said to hold {declared.forms}")
        elif facts.is_split and not any(_explains(facts)):
            tokens = facts.tokens
            flat = tokens is None or (len(tokens.by_uncertainty) > 1 and not _rises_with_uncertainty(tokens))
            said = f"{size} is of 8 bits rather than of 16, from the first step on"
            others = "neither a few tokens, nor length, nor a temperature makes it"
            yield Finding("eight_bits", LIKELY if flat and facts.is_clear else POSSIBLE, f"{said}, and {others}")


def _explains(facts: Facts) -> Iterator[Finding]:
    for rule in (attrgetter("of_course"), _stale, _temperature, _weights, _after_environment, _extreme, _length):
        yield from (finding for finding in rule(facts) if finding.confidence != POSSIBLE)


def _failure(facts: Facts) -> Iterator[Finding]:
    """Yields the causes of a collapse, or of a policy that stopped learning."""
    course = facts.course
    if course is None:
        return
    growth = course.onsets["gap"]
    small = facts.origin in ("", "float32", "float16", "bfloat16")
    leads = growth.lead is not None and growth.lead > 0
    is_moving = course.largest.get("learning_rate", 1.0) > 0
    if course.decline is not None and is_moving and small and not leads and not any(_explains(facts)):
        measured = f"the mismatch is of {facts.origin}'s size" if facts.origin else "no mismatch is logged"
        leads_of = (course.onsets[name].lead for name in ("grad_norm", "entropy"))
        rises = course.last.get("entropy", math.nan) > 1.5 * course.first.get("entropy", math.nan)
        is_early = course.decline - course.starts_at < 3
        if rises or is_early or any(lead is not None and lead > -TOGETHER for lead in leads_of):
            heights = f"(peak {course.peak:.2g}, end {course.last.get('reward', math.nan):.2g})"
            said = f"the reward falls for good from step {course.decline} on {heights}, {measured} and does not grow"
            yield Finding("high_rate", LIKELY if facts.origin and growth.lead != 0 else POSSIBLE, f"{said} before")
    if growth.step is not None and (leads or course.decline is None) and not any(_explains(facts)):
        when = f", {growth.lead} steps before the reward falls" if leads else ""
        said = f"the mismatch stays above twice its first values from step {growth.step} on{when}"
        yield Finding("mismatch_growth", LIKELY, said)


def _rounding(facts: Facts) -> Iterator[Finding]:
    """Yields a finding of rounding in 16 bits if a limit is crossed and no other finding explains it."""
    is_crossed = facts.is_split and any(one.is_crossed for one in facts.crossings)
    is_crossed &= facts.tokens is None or not any(find_token_causes(facts.tokens))
    if is_crossed and facts.origin == "bfloat16" and not any(_explains(facts)):
        yield Finding("sixteen_bits", LIKELY, f"{facts.size} is that of bfloat16, and a limit is crossed")


RULES = (
    _comparable,
    _unscored,
    attrgetter("of_course"),
    _after_environment,
    _extreme,
    _stale,
    _temperature,
    _weights,
    _length,
    _dtype,
    _failure,
    _rounding,
)
"""The rules, each a function that yields findings. Of two equally sure findings, the earlier rule's comes first."""
