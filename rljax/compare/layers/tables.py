"""The report of a comparison by layers: a verdict with tables for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.compare.layers.differences import LayerComparison, OperationDifference
from rljax.compare.layers.findings import LayerVerdict
from rljax.compare.layers.operations import IN_BLOCK
from rljax.compare.report import markdown_table
from rljax.record.rows import finite_json, text_table

Judged = tuple[LayerComparison, LayerVerdict]
_HEAD = ["operation", "own error", "limit", "error / limit", "error up to it", "effect (nats)", "note"]
_TableRows = list[list[str]]


def layers_text(judged: Sequence[Judged]) -> str:
    """Formats the verdicts and a table of the kinds of operations for a terminal."""
    parts = [f"{_title(pair[0])}\n{text_table(_kinds(pair[0]))}\n{_sentence(*pair)}" for pair in judged]
    return "\n\n".join(parts) + "\n"


def layers_markdown(judged: Sequence[Judged]) -> str:
    """Formats the verdicts, a table of the kinds of operations and a table of all operations as Markdown."""
    parts = []
    for comparison, verdict in judged:
        rows = [_HEAD, *(_row(each.operation.label, each) for each in comparison.differences)]
        tables = f"{markdown_table(_kinds(comparison))}\n\n{markdown_table(rows)}"
        parts.append(f"## {_title(comparison)}\n\n{_sentence(comparison, verdict)}\n\n{tables}")
    return "\n\n".join(parts) + "\n"


def layers_json(judged: Sequence[Judged]) -> str:
    """Formats the comparisons and verdicts as one JSON list; numbers that are not finite become null."""
    plain = []
    for comparison, verdict in judged:
        differences = [dataclasses.asdict(each) | {"operation": each.operation.name} for each in comparison.differences]
        document = dataclasses.asdict(comparison) | {"differences": differences}
        plain.append({"passed": verdict.passed, "verdict": dataclasses.asdict(verdict), **document})
    return finite_json(plain)


def _title(comparison: LayerComparison) -> str:
    return f"{comparison.tested} against {comparison.reference}, {comparison.tokens} tokens"


def _sentence(comparison: LayerComparison, verdict: LayerVerdict) -> str:
    gap = f"mean {comparison.logprob_mean:.3g}, largest {comparison.logprob_max:.3g} nats"
    return f"log-probabilities differ by {gap}\nverdict: {verdict.sentence}"


def _kinds(comparison: LayerComparison) -> _TableRows:
    """Returns one row for each kind of operation: the layer with the largest error for its limit."""
    order = ["embedding", *IN_BLOCK, "final_norm", "logits"]
    by_kind: dict[str, list[OperationDifference]] = {kind: [] for kind in order}
    for each in comparison.differences:
        by_kind[each.operation.kind].append(each)
    worst = [max(group, key=lambda each: each.ratio) for group in by_kind.values() if group]
    return [_HEAD, *(_row(each.operation.label, each) for each in worst)]


def _row(label: str, each: OperationDifference) -> list[str]:
    effect = "" if each.effect_mean is None else f"{each.effect_mean:.2g} (max {each.effect_max:.2g})"
    ratio = f"{each.ratio:.2g}" + (" ABOVE" if each.ratio > 1 else "")
    pair = " / ".join(each.precisions) if each.precisions[0] != each.precisions[1] else ""
    note = "; ".join(filter(None, (each.hint, pair)))
    numbers = (f"{value:.2g}" if np.isfinite(value) else "" for value in (each.own, each.limit))
    return [label, *numbers, ratio, f"{each.up_to:.2g}", effect, note]
