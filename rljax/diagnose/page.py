"""The diagnosis as one page of text and as a JSON object: what is measured, what it answers, and what is still open."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from rljax.diagnose.causes import DECISIVE, judge_cause
from rljax.diagnose.course import FEWEST_STEPS, GAPS, Course
from rljax.diagnose.evidence import CAUSES, Facts, first_remedy
from rljax.mismatch.atlas import normal_range
from rljax.record.rows import finite_json

WIDTH = 110
SHOWN = (*GAPS, "reward", "length", "entropy", "grad_norm", "learning_rate", "staleness")
"""The signals of a log that the page shows. The JSON object has all of them."""


def diagnose(source: str, facts: Facts) -> dict[str, Any]:
    """Returns the whole diagnosis of ``source`` as a JSON object. Numbers that are not finite are null.

    ``facts`` come from the log, the dump and the configuration.
    """
    cause, findings = judge_cause(facts)
    kind, words = CAUSES[cause]
    found: dict[str, Any] = {
        "source": source,
        "cause": cause,
        "kind": kind,
        "confidence": findings[0].confidence if findings and cause == findings[0].cause else None,
        "verdict": words,
        "findings": [finding._asdict() | {"kind": CAUSES[finding.cause][0]} for finding in findings],
        "measured": _measured(facts),
        "limits": [one._asdict() | {"crossed": one.is_crossed} for one in facts.crossings],
        "answers": {} if facts.runs else answers(facts),
        "first_remedy": first_remedy(cause, facts.project),
        "remedies": None if cause == "healthy" else f"rljax docs diagnose#{cause}",
        "next": [f"one run: --run {shlex.quote(run)}" for run in facts.runs] or list(to_measure(facts, cause)),
    }
    plain: dict[str, Any] = json.loads(finite_json(found))
    return plain


def _measured(facts: Facts) -> dict[str, Any]:
    measured: dict[str, Any] = {"declared": facts.declared._asdict()}
    if facts.course is not None:
        course, log = facts.course, facts.course.log
        measured["log"] = {
            "project": log.project,
            "steps": course.steps,
            "starts_at": course.starts_at,
            "columns": dict(log.columns),
            "first": {name: course.first[name] for name in log.columns if name in course.first},
            "last": {name: course.last[name] for name in log.columns if name in course.last},
            "effect": {"first": course.effect_first, "last": course.effect_last},
        }
    if facts.tokens is not None:
        tokens = facts.tokens
        names = ("token_count", "sequence_count", "logprob_abs_diff_mean", "logprob_abs_diff_max", "k3_kl", "kl")
        measured["tokens"] = {
            "trainer": tokens.trainer,
            "rollout": tokens.rollout,
            "roles_known": tokens.roles_known,
            **{name: tokens.metrics[name] for name in names},
            "effect": tokens.effect_without,
            "normalised_gap": tokens.normalised_gap,
            "grids": dict(tokens.grids),
            "compare": {"status": tokens.verdict.status, "cause": tokens.verdict.cause},
        }
    return measured


def to_text(found: Mapping[str, Any]) -> str:
    """Formats a diagnosis as one page for a terminal."""
    sure = f" ({found['confidence']})" if found["confidence"] else ""
    lines = [f"{found['source']}: {found['cause']}{sure}", ""]
    lines += _wrapped(f"{found['verdict']}. Kind: {found['kind']}.")
    for finding in found["findings"]:
        lines += _wrapped(f"- {finding['cause']}, {finding['confidence']}: {finding['evidence']}", 2)
    sections = {
        "Remedies": _remedy_lines(found),
        "What is measured": _measured_lines(found["measured"]),
        "Limits of the field": _limit_lines(found["limits"]),
        "Where it comes from": (f"{question}: {answer}" for question, answer in found["answers"].items()),
        "What to measure next": (f"- {line}" for line in found["next"]),
    }
    for title, texts in sections.items():
        body = [line for text in texts for line in _wrapped(text, 2)]
        lines += ["", title, *(body or ["  nothing"])]
    return "\n".join(lines) + "\n"


def _remedy_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if first := found["first_remedy"]:
        source = f" ({first['source']})" if first["source"] else ""
        yield f"try first: {first['remedy']}{': ' * bool(first['option'])}{first['option'].replace('`', '')}{source}"
        yield f"all of them, the best fitting first: {found['remedies']}"


def _measured_lines(measured: Mapping[str, Any]) -> Iterator[str]:
    log, tokens = measured.get("log"), measured.get("tokens")
    if log:
        yield f"a log of {log['project']}: {log['steps']} steps from step {log['starts_at']}"
        for name, column in log["columns"].items():
            if name not in SHOWN:
                continue
            yield f"{name} ({column}): {_number(log['first'].get(name))} -> {_number(log['last'].get(name))}"
        if log["effect"]["last"] is not None:
            effects = f"{_number(log['effect']['first'])} -> {_number(log['effect']['last'])}"
            yield f"error of the logits (k3_kl / logprob_abs_diff_mean, free of entropy): {effects}"
    if tokens:
        roles = "" if tokens["roles_known"] else "; nothing says which column is the trainer's"
        counts = f"{int(tokens['token_count'])} tokens in {int(tokens['sequence_count'])} responses"
        yield f"a dump of {counts}: {tokens['trainer']} against {tokens['rollout']}{roles}"
        labels = {"logprob_abs_diff_mean": "logprob_abs_diff_mean", "logprob_abs_diff_max": "max", "k3_kl": "k3_kl"}
        labels["effect"] = "error of the logits"
        numbers = ", ".join(f"{label} {_number(tokens[name])}" for name, label in labels.items())
        yield f"{numbers}; compare says {tokens['compare']['status']} ({tokens['compare']['cause']})"
        for column, grid in tokens["grids"].items():
            yield f"the logits of column {column} lie on the grid of {grid}"
    declared = {name: value for name, value in measured["declared"].items() if value}
    if declared:
        yield f"declared: {', '.join(f'{name} {value}' for name, value in declared.items())}"


def _limit_lines(limits: list[Mapping[str, Any]]) -> Iterator[str]:
    for one in filter(itemgetter("crossed"), limits):
        times = f"{one['steps']} of {one['measured']} steps" + (f", first at {one['first']}" if one["first"] else "")
        value = f"{one['signal']} {_number(one['value'])} against {one['limit']:g}"
        yield f"{value}: CROSSED, {one['meaning']} ({times}) [{one['source']}]"
    if kept := [f"{one['signal']} {_number(one['value'])} of {one['limit']:g}" for one in limits if not one["crossed"]]:
        yield f"kept: {', '.join(kept)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _wrapped(text: str, indent: int = 0) -> list[str]:
    ends = (" " * indent, " " * (indent + 2))
    return textwrap.TextWrapper(WIDTH, *ends, break_long_words=False, break_on_hyphens=False).wrap(text)


def answers(facts: Facts) -> dict[str, str]:
    """Returns a sentence for each question that the facts answer. ``to_measure`` says how to answer the others."""
    course = facts.course
    found = {
        "a few tokens or all": _concentration(facts),
        "with length": _by_bucket(facts, "position"),
        "with entropy": _by_bucket(facts, "entropy"),
        "with step": _with_step(course),
        "before or after the collapse": _lead(course),
        "floor": _floor(facts),
        "among healthy runs": _among(facts),
    }
    return {question: answer for question, answer in found.items() if answer}


def _concentration(facts: Facts) -> str:
    tokens, course = facts.tokens, facts.course
    if tokens is not None and tokens.verdict.cause in DECISIVE:
        return f"see what compare says of the columns: {tokens.verdict.reason}"
    if tokens is not None:
        far = f"{tokens.outliers} of {int(tokens.metrics['token_count'])} tokens are far beyond the rest"
        share = f"{far} and carry {tokens.outlier_share:.0%} of k3_kl"
        return f"a few: {share}" if tokens.outlier_share > 0.5 else f"all: {share}"
    if course is None or math.isnan(course.k3_of_most) or "k3_kl" not in course.first:
        return ""
    k3, p99, rest = course.first["k3_kl"], course.first["logprob_abs_diff_p99"], course.k3_of_most
    if course.is_of_few:
        return f"a few: k3_kl is {k3:.2g}, and 99% of the tokens can make at most {rest:.2g} of it"
    return f"all, or no few: 99% of the tokens are below {p99:.2g} nats, which explains a k3_kl of up to {rest:.2g}"


def _by_bucket(facts: Facts, what: str) -> str:
    course, tokens = facts.course, facts.tokens
    measures: dict[str, Mapping[str, float]] = {}
    if tokens is not None and what == "position":
        measures["the gap per uncertainty by position"] = tokens.by_position
    elif tokens is not None:
        measures["the gap per uncertainty by uncertainty (1 - p)"] = tokens.by_uncertainty
    if course is not None:
        measures[f"the error of the logits by {what}"] = course.effects.get(f"mismatch_{what}", {})
    for measure, values in measures.items():
        if len(values) >= 2:
            first, *_, last = values.values()
            change = last / first if first > 0 else math.nan
            return f"{measure}: {_listed(values)} (last over first: {change:.1f})"
    return ""


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{label} {value:.2g}" for label, value in values.items())


def _with_step(course: Course | None) -> str:
    if course is None or not course.gap_name or course.steps < FEWEST_STEPS:
        return ""
    name = course.gap_name
    said = f"{name} {course.first[name]:.2g} in the first steps, {course.last[name]:.2g} in the last"
    if not math.isnan(course.effect_first):
        said += f"; the error of the logits {course.effect_first:.2g} and {course.effect_last:.2g}"
    onset = course.onsets["gap"].step
    grows = f"; above twice its first values for good from step {onset}" if onset else "; it does not double for good"
    return said + grows


def _lead(course: Course | None) -> str:
    if course is None or course.steps < FEWEST_STEPS or math.isnan(course.peak):
        return ""
    if course.decline is None:
        return "the reward does not collapse in this log"
    parts = []
    labels = {"gap": "the mismatch", "grad_norm": "the gradient norm", "entropy": "the fall of entropy"}
    for name, label in (labels | {"length": "length"}).items():
        onset = course.onsets[name]
        order = "does not double before it"
        if onset.lead is not None:
            order = f"{'leads' if onset.lead > 0 else 'follows'} by {abs(onset.lead)} steps"
        parts.append(f"{label} {order}")
    return f"the reward falls for good from step {course.decline} on: {'; '.join(parts)}"


_FLOORS = {
    "at another batch shape": "mismatch_self/logprob_abs_diff_mean",
    "on another mesh": "mismatch_self/mesh/logprob_abs_diff_mean",
    "with another remat": "mismatch_self/remat/logprob_abs_diff_mean",
}
"""The metrics of the trainer's difference from itself, by the cause of the difference."""


def _floor(facts: Facts) -> str:
    if facts.declared.is_exact:
        return "0 between trainer and engine, which share one executable"
    largest = {} if facts.course is None else facts.course.largest
    floors = {what: largest[name] for what, name in _FLOORS.items() if name in largest}
    if facts.course is not None and floors:
        what = max(floors, key=lambda each: floors[each])
        value, gap = floors[what], facts.course.last.get("logprob_abs_diff_mean", math.nan)
        share = f", {value / gap:.2g} of the gap" if gap > 0 else ""
        return f"at most {value:.2g} nats between the trainer and itself {what}{share}: no remedy goes below it"
    if facts.tokens is not None and facts.tokens.floors:
        return f"{_listed(facts.tokens.floors)} nats between two runs of one scorer: no remedy goes below the larger"
    return ""


def _among(facts: Facts) -> str:
    """Returns where the mismatch lies among the healthy runs of the atlas that are like this one."""
    course, declared, metrics = facts.course, facts.declared, facts.tokens.metrics if facts.tokens else {}
    rollout = declared.forms or declared.rollout_dtype or "bfloat16"
    dtype = "exact" if declared.is_exact else f"{declared.trainer_dtype or 'bfloat16'} / {rollout}"
    signals: Mapping[str, float] = metrics or (course.last if course is not None else {})
    if metrics:
        known = {"tokens": metrics["token_count"] / max(metrics["sequence_count"], 1)}
    else:
        names = {"tokens": "length", "entropy": "entropy"}
        known = {what: signals[name] for what, name in names.items() if signals.get(name, 0.0) > 0}
    for name in GAPS:
        if said := normal_range(name, signals.get(name, math.nan), dtype=dtype, **known):
            return f"{name} {said}"
    return ""


_NUMERICS = ("eight_bits", "sixteen_bits", "head_dtype", "length_growth", "mismatch_growth")
"""The causes in the arithmetic of the engines, which a comparison of their layers can locate."""


def to_measure(facts: Facts, cause: str) -> Iterator[str]:
    """Yields a line for each measurement that would answer a question still open after the diagnosis ``cause``."""
    course, tokens = facts.course, facts.tokens
    names, is_own = set(course.last) if course is not None else set(), facts.project == "rljax"
    if course is not None and not course.gap_name:
        yield "the mismatch itself: log the engine's log-probabilities of its own tokens beside the trainer's"
    if course is not None and cause == "cannot_tell" and "ratio_max" not in names:
        yield "the mean, smallest and largest exp(lr) of tokens beside k3_kl: they show a cut or another temperature"
    if tokens is None:
        how = "--rollout.dump-every 20" if is_own else "rljax docs compare has the lines that write them"
        yield f"the tokens: {how}, then rljax diagnose on the file"
    elif len(tokens.by_position) < 2 and tokens.verdict.cause not in DECISIVE:
        yield "more tokens, or longer responses: the dump is too small for buckets by position"
    if course is None:
        yield "the log of the run, from step 1: it shows growth, and what fails before what"
    elif course.starts_at > 2:
        yield f"the first steps: the log begins at step {course.starts_at}; weights that are not loaded show at step 2"
    if course is not None and "staleness" not in names:
        yield "how old the weights are that sampled each batch"
    if course is not None and "entropy" not in names:
        yield "the policy's entropy: it tells a smaller error from a more certain policy"
    has_floor = bool(names.intersection(_FLOORS.values())) or (tokens is not None and bool(tokens.floors))
    if not has_floor and not facts.declared.is_exact:
        yield f"the floor: {'--diagnosis.self-every 20, or ' * is_own}rljax compare with --second-run"
    if not facts.declared.coarser:
        yield "the dtypes of both sides: of the weights, the LM head and the key-value cache"
    if cause in ("cannot_tell", "eight_bits", "sixteen_bits", "mismatch_growth"):
        scorers = "--scorer jax:float32 --scorer jax:bfloat16"
        yield f"the same tokens by other engines: rljax compare TOKENS --model DIR {scorers}"
    if cause in (*_NUMERICS, "other_weights", "cannot_tell"):
        scorers = "--scorer jax:DTYPE --scorer vllm:URL"
        yield f"the layer and operation at which the engines part: rljax compare TOKENS --model DIR {scorers} --layers"
    if tokens is not None and cause != "healthy":
        yield "the tokens one by one, the worst sequences first: rljax view on the file or on the run"
    if is_own and cause in ("high_rate", "mismatch_growth"):
        yield "a short run with --rollout.engine exact: if it fails too, the mismatch is not the cause"
