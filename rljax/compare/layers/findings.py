"""The verdict on two scorers: even rounding, or the layers and operations at which they differ by more.

The report is the verdict with tables for a terminal, as Markdown and as JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rljax.compare.layers.differences import LayerComparison, OperationDifference
from rljax.compare.layers.operations import IN_BLOCK, PRODUCTS
from rljax.compare.report import markdown_table
from rljax.record.rows import finite_json, text_table

EVEN = "rounding, evenly"
_MANY = 4  # so many products of one block above their limits mean that the block has other weights
_COARSENESS = ("bfloat16", "float16", "float32")  # the coarsest dtype first
_NAMED = 6  # the number of findings that the sentence names
_HEAD = ["operation", "own error", "limit", "error / limit", "error up to it", "effect (nats)", "note"]


@dataclass(frozen=True)
class Parting:
    """A layer or operation at which two scorers differ by more than rounding, or round to different dtypes."""

    place: str  # such as "layer 17, attention" or "every layer, rotation of keys"
    reason: str  # what the numbers show
    operations: list[str]  # the names of the operations
    ratio: float  # the largest error as a multiple of its limit


@dataclass(frozen=True)
class LayerVerdict:
    """The verdict on a comparison by layers."""

    sentence: str  # the verdict in words
    findings: list[Parting]  # the places, the largest ratio first, and of equal ones the first operation

    @property
    def passed(self) -> bool:
        """Whether there is no finding: rounding explains every difference."""
        return not self.findings


Judged = tuple[LayerComparison, LayerVerdict]


def judge_layers(comparison: LayerComparison) -> LayerVerdict:
    """Judges each operation by its errors and its dtypes, and groups those above a limit or with different dtypes."""
    above = [each for each in comparison.differences if each.ratio > 1 or _other_dtype(each, comparison)]
    names = [each.operation.name for each in comparison.differences]
    findings = sorted(_grouped(above, comparison), key=lambda found: (-found.ratio, names.index(found.operations[0])))
    if not findings:
        return LayerVerdict(EVEN, [])
    named = [f"{finding.place} ({finding.reason})" for finding in findings[:_NAMED]]
    more = len(findings) - _NAMED
    named += [f"and {more} more"] if more > 0 else []
    named += [f"all else: {EVEN}"] if findings[0].ratio <= 1 else []
    return LayerVerdict("; ".join(named), findings)


def _grouped(above: Sequence[OperationDifference], comparison: LayerComparison) -> Iterator[Parting]:
    """Groups differences: a block with other weights, one operation in every block, and single ones."""
    layers = {each.operation.layer for each in comparison.differences} - {None}
    finite = [each for each in above if math.isfinite(each.ratio)]
    products = [each.operation.layer for each in finite if each.operation.kind in PRODUCTS]
    other = {layer for layer in layers if products.count(layer) >= _MANY and len(layers) > 1}
    if other == layers:
        other = set()
        if len(products) == sum(each.operation.kind in PRODUCTS for each in comparison.differences):
            yield _finding("every layer", above, comparison, "other weights")
            return
    for layer in sorted(other, key=str):
        inside = [each for each in above if each.operation.layer == layer]
        yield _finding(f"layer {layer}", inside, comparison, "other weights in the whole layer, such as stale ones")
    rest = [each for each in above if each.operation.layer not in other]
    by_kind = sorted(rest, key=lambda each: each.operation.kind)
    for kind, group in itertools.groupby(by_kind, key=lambda each: each.operation.kind):
        members = list(group)
        every = sum(each.operation.kind == kind for each in comparison.differences)
        if len(members) == every > 1:
            yield _finding(f"every layer, {IN_BLOCK[kind]}", members, comparison)
        else:
            for each in members:
                yield _finding(each.operation.label, [each], comparison)


def _finding(
    place: str, members: Sequence[OperationDifference], comparison: LayerComparison, reason: str = ""
) -> Parting:
    worst = max(members, key=lambda each: each.ratio)
    other_dtype = _other_dtype(worst, comparison)
    if not reason and worst.ratio <= 1:
        reason = other_dtype
    elif not reason:
        reason = f"own error {worst.own:.2g}, limit {worst.limit:.2g}"
        if worst.own <= worst.limit:
            reason = f"one channel by {worst.worst_channel:.2g}, one token by {worst.worst_token:.2g}"
            reason += f", all by a factor {worst.factor:.5g}"
        reason = "; ".join(filter(None, [reason, worst.hint, other_dtype]))
    return Parting(place, reason, [each.operation.name for each in members], worst.ratio)


def _other_dtype(difference: OperationDifference, comparison: LayerComparison) -> str:
    """Says that one scorer rounds the values of an operation more coarsely; empty if the two have other dtypes."""
    ours, theirs = difference.precisions
    if ours == theirs or len({dtype for dtype in comparison.dtypes if dtype}) != 1:
        return ""
    sides = {ours: comparison.reference, theirs: comparison.tested}
    coarse = min(sides, key=lambda name: _COARSENESS.index(name))
    return f"rounded to {coarse} in {sides[coarse]} only"


def layers_text(judged: Sequence[Judged]) -> str:
    """Formats each verdict, and a table of the worst operation of each kind, for a terminal."""
    parts = [f"{_title(pair[0])}\n{text_table(_kinds(pair[0]))}\n{_sentence(*pair)}" for pair in judged]
    return "\n\n".join(parts) + "\n"


def layers_markdown(judged: Sequence[Judged]) -> str:
    """Formats each verdict, a table of the worst operation of each kind, and a table of all operations as Markdown."""
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


def _kinds(comparison: LayerComparison) -> list[list[str]]:
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
