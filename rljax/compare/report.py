"""Compares the columns of a dump in pairs (metrics, growth with position, noise floors, verdicts) and prints tables."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rljax.compare.distributions import DistributionPair
from rljax.compare.verdict import Verdict, judge
from rljax.mismatch.diagnosis import bucket_labels, finalize_buckets, mismatch_by_position
from rljax.mismatch.turns import mismatch_by_turn
from rljax.record.dump_facts import TokenPair, check_logprobs, turns_of
from rljax.record.rows import finite_json
from rljax.record.text_tables import text_table
from rljax.record.token_arrays import to_rows
from rljax.record.token_dumps import OTHER_RUNS, PLACES, ColumnSource, TokenDump

POSITION_EDGES = (16, 64, 256, 1024, 4096, 16384)
OF_BUCKETS = ("token_count", "k3_kl", "logprob_abs_diff_mean", "extreme_rate")
MATRIX_METRICS = ("logprob_abs_diff_mean", "k3_kl", "log_ppl_abs_diff")


@dataclass(frozen=True)
class Pair:
    """The comparison of two columns.

    If the roles of the columns are unknown, the columns keep their order. Then the sign of ``kl`` and the direction of
    ``k3_kl`` may be reversed.
    """

    trainer: str  # the column in the trainer's place of every formula
    rollout: str  # the column in the rollout engine's place
    roles_known: bool
    metrics: dict[str, float]  # the metrics of mismatch_metrics
    growth: dict[str, dict[str, float]]  # token_count, k3_kl, logprob_abs_diff_mean of each position bucket with tokens
    verdict: Verdict
    # The token_count, k3_kl, logprob_abs_diff_mean and extreme_rate of each bucket of mismatch_by_turn; empty without
    # responses of several turns.
    turns: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """All pairs of a dump's columns, and how much each scorer differs from its own second run."""

    columns: dict[str, ColumnSource]  # with their roles, in the order of the matrix, without second runs
    pairs: list[Pair]  # every two columns
    noise_floor: dict[str, dict[str, float]]  # the metrics between the two runs of a column
    # The metrics between a column and its run on another mesh ("mesh") or with another remat ("remat"), by column.
    other_floors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    distributions: list[DistributionPair] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every pair passes."""
        return all(pair.verdict.status == "pass" for pair in self.pairs)


def compare_columns(dump: TokenDump, columns: Sequence[str] | None = None, *, same_weights: bool = False) -> Comparison:
    """Compares every two of the columns; None means all of them, in the order of their names.

    The roles of two columns (``TokenDump.role``) decide their places: a trainer comes first, then a column without a
    role, then a rollout engine. Two columns of the same role keep their order, and the pair says that the roles are
    unknown. The order of the columns in a file changes no number.

    A pair with the sampler's column is refused if top_p, top_k or min_p cut the distribution. It is compared if both
    columns are normalised over the tokens that were left (``ColumnSource.cut``). ``TokenDump.sampling`` names the
    sampler's column; if it names none, every column with the role "rollout" counts.

    ``same_weights`` says that columns with different weight hashes have the same weights, as before and after a
    conversion of the model's files.

    Raises ValueError if a named column is missing, there are fewer than two, or a log-probability is above 0.
    """
    chosen = list(columns) if columns is not None else sorted(dump.first_runs)
    if missing := [name for name in chosen if name not in dump.logprobs]:
        raise ValueError(f"no column {missing[0]!r} in the dump, which has {sorted(dump.logprobs)}")
    if len(set(chosen)) != len(chosen) or len(chosen) < 2:
        raise ValueError(f"a comparison needs at least two columns, each once, got {chosen}")
    check_logprobs(dump, chosen)
    roles = {name: dump.role(name) for name in chosen}
    names = sorted(chosen, key=lambda name: PLACES.index(roles[name]))
    mask = to_rows(dump.response_mask, False)
    cut, sampler = _cut(dump.sampling), dump.sampling.get("column")
    cuts = {name: cut if (name == sampler if sampler else roles[name] == "rollout") else "" for name in names}
    arrays = {name: to_rows(dump.logprobs[name], np.nan) for name in names}
    pairs, turns = [], turns_of(dump)
    for a, b in itertools.combinations(names, 2):
        origins, pair = (dump.sources[a], dump.sources[b]), TokenPair(dump, a, b)
        cut_of_pair = _cut_of_pair(*origins, cuts[a] or cuts[b])
        verdict = judge(arrays[a], arrays[b], mask, *origins, cut=cut_of_pair, same_weights=same_weights)
        buckets = pair.measured(lambda tokens: mismatch_by_position(tokens, POSITION_EDGES))
        growth = _by_bucket(finalize_buckets(buckets, bucket_labels(POSITION_EDGES)), OF_BUCKETS[:3])
        by_turn = _by_bucket(mismatch_by_turn(dump.logprobs[a], dump.logprobs[b], turns), OF_BUCKETS)
        pairs.append(Pair(a, b, roles[a] != roles[b], pair.metrics(), growth, verdict, by_turn))
    floors: dict[str, dict[str, dict[str, float]]] = {}
    for name, (cause, suffix) in itertools.product(names, OTHER_RUNS.items()):
        if name + suffix in dump.logprobs:
            floors.setdefault(name, {})[cause] = TokenPair(dump, name, name + suffix).metrics()
    sources = {name: dataclasses.replace(dump.sources[name], role=roles[name]) for name in names}
    shape = {name: found.pop("shape") for name, found in floors.items() if "shape" in found}
    return Comparison(sources, pairs, shape, {name: found for name, found in floors.items() if found})


def _cut_of_pair(a: ColumnSource, b: ColumnSource, cut: str) -> str:
    """Returns the words for a cut that makes two columns incomparable, or an empty string.

    ``cut`` describes the cut of the sampling if one of the columns is the sampler's; otherwise it is empty.
    """
    if a.cut != b.cut:
        return cut or "top_k, top_p or min_p"
    return "" if a.cut else cut


def _cut(sampling: Mapping[str, Any]) -> str:
    """Names the settings of the sampling that excluded some tokens; empty if there are none."""
    off = {"top_p": lambda value: value >= 1, "top_k": lambda value: value < 1, "min_p": lambda value: value <= 0}
    numbers = {name: sampling[name] for name in off if isinstance(sampling.get(name), (int, float))}
    return ", ".join(f"{name} = {value:g}" for name, value in numbers.items() if not off[name](value))


def to_json(comparison: Comparison) -> str:
    """Formats the whole comparison as one JSON object; numbers that are not finite become null."""
    columns = {name: source.document() for name, source in comparison.columns.items()}
    plain = {"passed": comparison.passed, **dataclasses.asdict(comparison), "columns": columns}
    return finite_json(plain)


def to_markdown(comparison: Comparison) -> str:
    """Formats the tables as Markdown."""
    return _join(comparison, "## {}\n\n{}", markdown_table)


def to_text(comparison: Comparison) -> str:
    """Formats the tables for a terminal."""
    return _join(comparison, "{}\n{}", text_table)


def _join(comparison: Comparison, section: str, to_table: Callable[[_Rows], str]) -> str:
    """Joins the formatted tables and a paragraph about columns that share a role."""
    matrices = [_matrix(comparison, metric) for metric in MATRIX_METRICS]
    tables = [_columns_table(comparison), *matrices, _growth_table(comparison), _verdict_table(comparison)]
    if comparison.other_floors:
        tables[-2:-2] = [_floors_table(comparison)]
    if any(pair.turns for pair in comparison.pairs):
        tables[-1:-1] = [_turns_table(comparison, *about) for about in TURN_TABLES]
    if comparison.distributions:
        tables.append(_distributions_table(comparison))
    parts = [section.format(title, to_table(rows)) for title, rows in tables]
    return "\n\n".join([*parts, *_unknown_roles(comparison)]) + "\n"


def _by_bucket(metrics: Mapping[str, float], kept: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns some metrics of each bucket with tokens. The names of ``metrics`` are ``<label>/<name>``."""
    labels = dict.fromkeys(name.partition("/")[0] for name in metrics)
    filled = [label for label in labels if metrics[f"{label}/token_count"]]
    return {label: {name: metrics[f"{label}/{name}"] for name in kept} for label in filled}


_Rows = list[list[str]]


def _unknown_roles(comparison: Comparison) -> list[str]:
    groups = [[name for name, source in comparison.columns.items() if source.role == role] for role in PLACES]
    unordered = "; ".join(", ".join(group) for group in groups if len(group) > 1)
    paragraph = (
        f"Nothing says which of these columns is the trainer's and which the rollout engine's: {unordered}. In each "
        "pair of them the first was taken as the trainer's. The other way round kl and log_ppl_diff change their sign, "
        "and k3_kl and the numbers beside the limits change their value. --trainer NAME and --rollout NAME decide it."
    )
    return [paragraph] if unordered else []


def _columns_table(comparison: Comparison) -> tuple[str, _Rows]:
    rows = [["column", "role", "engine", "dtype", "weights", "temperature"]]
    for name, source in comparison.columns.items():
        temperature = "?" if source.temperature is None else f"{source.temperature:g}"
        known = (source.role, source.engine, source.dtype, source.weights_hash[:19])
        rows.append([name, *(text or "?" for text in known), temperature])
    return "Columns", rows


def _matrix(comparison: Comparison, metric: str) -> tuple[str, _Rows]:
    """Makes a table with the trainer's place in rows and the rollout's in columns, and noise floors on the diagonal."""
    names = list(comparison.columns)
    cells = {(pair.trainer, pair.rollout): f"{pair.metrics[metric]:.3g}" for pair in comparison.pairs}
    cells |= {(name, name): f"({floor[metric]:.3g})" for name, floor in comparison.noise_floor.items()}
    rows = [["", *names], *([row, *(cells.get((row, name), "") for name in names)] for row in names)]
    floor = "on the diagonal the floor: a scorer against its own second run, as mismatch_self/ of a run"
    return f"{metric} ({floor})", rows


def _floors_table(comparison: Comparison) -> tuple[str, _Rows]:
    """Makes a table of all noise floors of the columns that have more than one."""
    rows = [["column", *OTHER_RUNS]]
    for name, others in comparison.other_floors.items():
        found = {"shape": comparison.noise_floor.get(name)} | others
        gaps = (found.get(cause) for cause in OTHER_RUNS)
        rows.append([name, *("" if gap is None else f"{gap['logprob_abs_diff_mean']:.3g}" for gap in gaps)])
    return "logprob_abs_diff_mean of a scorer to itself, by what differs (as in mismatch_self/ of a run)", rows


def _growth_table(comparison: Comparison) -> tuple[str, _Rows]:
    labels = list(dict.fromkeys(label for pair in comparison.pairs for label in pair.growth))
    rows = [["pair", *labels, "slope_per_1k"]]
    for pair in comparison.pairs:
        gaps = [f"{pair.growth[k]['logprob_abs_diff_mean']:.3g}" if k in pair.growth else "" for k in labels]
        rows.append([f"{pair.trainer} / {pair.rollout}", *gaps, f"{pair.metrics['slope_per_1k']:.3g}"])
    return "logprob_abs_diff_mean by position in the response", rows


TURN_TABLES = (
    ("turn_", "turn"),
    ("after_", "distance from the environment's last token (its next token is at 1)"),
)
"""The beginning of the labels in each table of turns, and the quantity by which the table splits the mismatch."""


def _turns_table(comparison: Comparison, kind: str, what: str) -> tuple[str, _Rows]:
    labels = dict.fromkeys(label for pair in comparison.pairs for label in pair.turns if label.startswith(kind))
    rows = [["pair", *(label.removeprefix(kind) for label in labels)]]
    for pair in comparison.pairs:
        cells = (pair.turns.get(label) for label in labels)
        texts = [f"{cell['logprob_abs_diff_mean']:.3g} ({cell['extreme_rate']:.2%})" if cell else "" for cell in cells]
        rows.append([f"{pair.trainer} / {pair.rollout}", *texts])
    return f"logprob_abs_diff_mean (and share of extreme tokens) by {what}", rows


def _verdict_table(comparison: Comparison) -> tuple[str, _Rows]:
    bars = list(comparison.pairs[0].verdict.bars.items())
    rows = [["pair", "verdict", "cause", "left_out", *(f"{name} (limit {bar:g})" for name, (_, bar) in bars), "reason"]]
    for pair in comparison.pairs:
        verdict = pair.verdict
        numbers = [f"{value:.3g}" for value, _ in verdict.bars.values()]
        label = f"{pair.trainer} / {pair.rollout}"
        left_out = f"{verdict.left_out} of {verdict.tokens}"
        rows.append([label, verdict.status.upper(), verdict.cause, left_out, *numbers, verdict.reason])
    return "Verdicts", rows


def _distributions_table(comparison: Comparison) -> tuple[str, _Rows]:
    numbers = ("kl", "kl_max", "reverse_kl", "total_variation", "top1_agreement", "rest_mass")
    rows = [["pair", "outcomes", *numbers]]
    for pair in comparison.distributions:
        known = "all tokens" if pair.is_complete else "listed tokens and the rest"
        rows.append([f"{pair.trainer} / {pair.rollout}", known, *(f"{pair.metrics[name]:.3g}" for name in numbers)])
    return "Whole distributions at each response token (kl: of the second against the first, nats)", rows


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of cells as a Markdown table. The first row is the head."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])
