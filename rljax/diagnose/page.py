"""The diagnosis as one page of text and as a JSON object."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from rljax.diagnose.answers import answers, to_measure
from rljax.diagnose.causes import judge_cause
from rljax.diagnose.course import GAPS
from rljax.diagnose.evidence import Facts
from rljax.diagnose.signals import Log
from rljax.diagnose.tables import CAUSES, first_remedy
from rljax.record.rows import finite_json

WIDTH = 110
SHOWN = (*GAPS, "reward", "length", "entropy", "grad_norm", "learning_rate", "staleness")
"""The signals of a log that the page shows. The JSON object has all of them."""


def diagnose(source: str, facts: Facts, log: Log | None) -> dict[str, Any]:
    """Returns the whole diagnosis of ``source`` as a JSON object. Numbers that are not finite are null.

    ``facts`` come from the log, the dump and the configuration. The log is None if there is only a dump.
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
        "measured": _measured(facts, log),
        "limits": [
            {name: value for name, value in one._asdict().items() if name != "threshold"}
            | {"crossed": one.is_crossed, **one.threshold._asdict()}
            for one in facts.crossings
        ],
        "answers": {} if facts.runs else answers(facts),
        "first_remedy": first_remedy(cause, facts.project),
        "remedies": None if cause == "healthy" else f"rljax docs diagnose#{cause}",
        "next": [f"one run: --run {shlex.quote(run)}" for run in facts.runs] or list(to_measure(facts, cause)),
    }
    plain: dict[str, Any] = json.loads(finite_json(found))
    return plain


def _measured(facts: Facts, log: Log | None) -> dict[str, Any]:
    measured: dict[str, Any] = {"declared": facts.declared._asdict()}
    if facts.course is not None and log is not None:
        course = facts.course
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
