"""Compares the columns of a dump in pairs (metrics, growth with position, noise floors, verdicts) and prints tables."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rljax.compare.distributions import DistributionPair
from rljax.compare.verdict import Verdict, judge
from rljax.mismatch.diagnosis import bucket_labels, finalize_buckets, mismatch_by, mismatch_by_turn
from rljax.record.dump_facts import TokenPair, check_logprobs, turns_of
from rljax.record.rows import finite_json, text_table
from rljax.record.token_dumps import OTHER_RUNS, PLACES, ColumnSource, TokenDump

POSITION_EDGES = (16, 64, 256, 1024, 4096, 16384)
OF_BUCKETS = ("token_count", "k3_kl", "logprob_abs_diff_mean", "extreme_rate")
"""The metrics of each bucket in ``Pair.turns``. The buckets in ``Pair.growth`` have the first three."""
GAP = "logprob_abs_diff_mean"
MATRIX_METRICS = (GAP, "k3_kl", "log_ppl_abs_diff")


@dataclass(frozen=True)
class Pair:
    """The comparison of two columns.

    If the roles of the columns are unknown, the columns keep their order. Then the sign of ``kl`` and the direction of
    ``k3_kl`` may be reversed.
    """

    trainer: str  # the column in the trainer's place of every formula
    rollout: str  # the column in the rollout engine's place
    roles_known: bool  # whether the columns have different roles, which decide their order
    metrics: dict[str, float]  # the metrics of mismatch_metrics
    growth: dict[str, dict[str, float]]  # the metrics of each bucket of positions with tokens, by label
    verdict: Verdict
    # The metrics of each bucket of mismatch_by_turn, by label; empty without responses of several turns.
    turns: dict[str, dict[str, float]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)  # the numbers of ``ratio_bars``; empty without a token

    def __str__(self) -> str:
        return f"{self.trainer} / {self.rollout}"


@dataclass(frozen=True)
class Comparison:
    """All pairs of a dump's columns, and the difference of each scorer from its own second run."""

    columns: dict[str, ColumnSource]  # the sources with their roles, in the order of the matrix, without second runs
    pairs: list[Pair]  # the comparisons of every two columns
    noise_floor: dict[str, dict[str, float]]  # the metrics between the two runs of a column, by column
    # The metrics between a column and its run on another mesh ("mesh") or with another remat ("remat"), by column.
    other_floors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    distributions: list[DistributionPair] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every pair passes."""
        return all(pair.verdict.status == "pass" for pair in self.pairs)


def compare_columns(dump: TokenDump, columns: Sequence[str] | None = None, *, same_weights: bool = False) -> Comparison:
    """Compares every two of the columns; None means all but runs for noise floors, by their names.

    The roles of two columns (``TokenDump.role``) decide their order: a trainer comes first, then a column without a
    role, then a rollout engine. Two columns of one role keep their order, and the pair says that the roles are unknown.

    With ``same_weights`` different hashes count as equal weights, such as one model in two kinds of files.

    Raises ValueError if a column is missing or named twice, there are fewer than two, or a log-probability is above 0.
    """
    chosen = list(columns) if columns is not None else sorted(dump.first_runs)
    if missing := [name for name in chosen if name not in dump.logprobs]:
        raise ValueError(f"no column {missing[0]!r} in the dump, which has {sorted(dump.logprobs)}")
    if len(set(chosen)) != len(chosen) or len(chosen) < 2:
        hint = "rljax docs compare lists the names of columns that are known, and --scorer computes further ones"
        raise ValueError(f"a comparison needs at least two columns, each once, got {chosen}: {hint}")
    check_logprobs(dump, chosen)
    roles = {name: dump.role(name) for name in chosen}
    names = sorted(chosen, key=lambda name: PLACES.index(roles[name]))
    pairs, turns = [], turns_of(dump)
    for a, b in itertools.combinations(names, 2):
        pair = TokenPair(dump, a, b)
        verdict = judge(pair, same_weights=same_weights)
        buckets = pair.measured(lambda tokens: mismatch_by(tokens, tokens.sequences.position, POSITION_EDGES))
        growth = _by_bucket(finalize_buckets(buckets, bucket_labels(POSITION_EDGES)), OF_BUCKETS[:3])
        by_turn = _by_bucket(mismatch_by_turn(dump.logprobs[a], dump.logprobs[b], turns), OF_BUCKETS)
        pairs.append(Pair(a, b, roles[a] != roles[b], pair.metrics, growth, verdict, by_turn, ratio_bars(pair)))
    floors: dict[str, dict[str, dict[str, float]]] = {}
    for name, (cause, suffix) in itertools.product(names, OTHER_RUNS.items()):
        if name + suffix in dump.logprobs:
            floors.setdefault(name, {})[cause] = TokenPair(dump, name, name + suffix).metrics
    sources = {name: dataclasses.replace(dump.sources[name], role=roles[name]) for name in names}
    shape = {name: found.pop("shape") for name, found in floors.items() if "shape" in found}
    return Comparison(sources, pairs, shape, {name: found for name, found in floors.items() if found})


def ratio_bars(pair: TokenPair) -> dict[str, float]:
    """Returns the shares of tokens whose ratio exp(lr) other projects' limits allow, and the bias of the log-ratio lr.

    ``mean`` is the mean ratio. ``within_1%`` and its like are the shares. ``bias`` is the mean of lr, and ``noise`` its
    standard error, which falls as 1 / sqrt(tokens). A mean of several times the noise is a true bias.
    """
    lr = pair.lr[pair.valid]
    if not len(lr):
        return {}
    ratio = np.exp(np.clip(lr, -20.0, 20.0))
    bands = {"in_0.999_1.002": (0.999, 1.002), "within_1%": (0.99, 1.01), "within_5%": (0.95, 1.05)}
    shares = {name: float(np.mean((low <= ratio) & (ratio <= high))) for name, (low, high) in bands.items()}
    noise = float(np.std(lr)) / math.sqrt(len(lr))
    return {"mean": float(np.mean(ratio)), **shares, "bias": float(np.mean(lr)), "noise": noise}


def to_json(comparison: Comparison) -> str:
    """Formats the whole comparison as one JSON object; numbers that are not finite become null."""
    columns = {name: source.document() for name, source in comparison.columns.items()}
    plain = {"passed": comparison.passed, **dataclasses.asdict(comparison), "columns": columns}
    return finite_json(plain)


def to_markdown(comparison: Comparison) -> str:
    """Formats the tables of a comparison as Markdown."""
    return _join(comparison, "## {}\n\n{}", markdown_table)


def to_text(comparison: Comparison) -> str:
    """Formats the tables of a comparison for a terminal."""
    return _join(comparison, "{}\n{}", text_table)


_Rows = list[list[str]]


def _join(comparison: Comparison, section: str, to_table: Callable[[_Rows], str]) -> str:
    """Joins the formatted tables, and a paragraph about columns with the same role."""
    parts = [section.format(title, to_table(rows)) for title, rows in _tables(comparison)]
    groups = [[name for name, source in comparison.columns.items() if source.role == role] for role in PLACES]
    if unordered := "; ".join(", ".join(group) for group in groups if len(group) > 1):
        parts.append(
            f"Nothing says which of these columns is the trainer's and which the rollout engine's: {unordered}. In "
            "each pair of them the first was taken as the trainer's. The other way round kl and log_ppl_diff change "
            "their sign, and k3_kl and the numbers beside the limits change their value. --trainer NAME and "
            "--rollout NAME decide it."
        )
    return "\n\n".join(parts) + "\n"


def _by_bucket(metrics: Mapping[str, float], kept: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns some metrics of each bucket with tokens. The names of ``metrics`` are ``<label>/<name>``."""
    labels = dict.fromkeys(name.partition("/")[0] for name in metrics)
    filled = [label for label in labels if metrics[f"{label}/token_count"]]
    return {label: {name: metrics[f"{label}/{name}"] for name in kept} for label in filled}


def _tables(comparison: Comparison) -> Iterator[tuple[str, _Rows]]:
    """Yields the title and the rows of each table. The first row is the head.

    A matrix has the trainer in rows, the rollout engine in columns, and noise floors on the diagonal.
    """
    names, pairs, floors = list(comparison.columns), comparison.pairs, comparison.noise_floor
    rows = [["column", "role", "engine", "dtype", "weights", "temperature"]]
    for name, source in comparison.columns.items():
        temperature = "" if source.temperature is None else f"{source.temperature:g}"
        known = (source.role, source.engine, source.dtype, source.weights_hash[:19], temperature)
        rows.append([name, *(text or "?" for text in known)])
    yield "Columns", rows
    for metric in MATRIX_METRICS:
        cells = {(pair.trainer, pair.rollout): f"{pair.metrics[metric]:.3g}" for pair in pairs}
        cells |= {(name, name): f"({floor[metric]:.3g})" for name, floor in floors.items()}
        floor = "on the diagonal the floor: a scorer against its own second run, as mismatch_self/ of a run"
        rows = [[row, *(cells.get((row, name), "") for name in names)] for row in names]
        yield f"{metric} ({floor})", [["", *names], *rows]
    if comparison.other_floors:
        rows = [["column", *OTHER_RUNS]]
        for name, others in comparison.other_floors.items():
            found = {"shape": floors.get(name)} | others
            gaps = (found.get(cause) for cause in OTHER_RUNS)
            rows.append([name, *("" if gap is None else f"{gap[GAP]:.3g}" for gap in gaps)])
        yield f"{GAP} of a scorer to itself, by what differs (as in mismatch_self/ of a run)", rows
    labels = dict.fromkeys(label for pair in pairs for label in pair.growth)
    growth = [{k: f"{pair.growth[k][GAP]:.3g}" if k in pair.growth else "" for k in labels} for pair in pairs]
    slopes = ({"slope_per_1k": f"{pair.metrics['slope_per_1k']:.3g}"} for pair in pairs)
    yield f"{GAP} by position in the response", _by_pair(pairs, map(operator.or_, growth, slopes))
    for kind, what in TURN_TABLES.items() if any(pair.turns for pair in pairs) else ():
        turns = [{label: cell for label, cell in pair.turns.items() if label.startswith(kind)} for pair in pairs]
        texts = (
            {k.removeprefix(kind): f"{cell[GAP]:.3g} ({cell['extreme_rate']:.2%})" for k, cell in each.items()}
            for each in turns
        )
        yield f"{GAP} (and share of extreme tokens) by {what}", _by_pair(pairs, texts)
    ratios = ({name: f"{value:.4g}" for name, value in pair.ratios.items()} for pair in pairs)
    title = "Ratios of single tokens (bias: the mean of the log-ratio; noise: its standard error)"
    yield title, _by_pair(pairs, ratios)
    yield "Verdicts", _by_pair(pairs, (_verdict_cells(pair.verdict) for pair in pairs))
    numbers = ("kl", "kl_max", "reverse_kl", "total_variation", "top1_agreement", "rest_mass")
    if comparison.distributions:
        rows = [["pair", "outcomes", *numbers]]
        for each in comparison.distributions:
            known_to_both = "all tokens" if each.is_complete else "listed tokens and the rest"
            shown = (f"{each.metrics[name]:.3g}" for name in numbers)
            rows.append([f"{each.trainer} / {each.rollout}", known_to_both, *shown])
        yield "Whole distributions at each response token (kl: of the second against the first, nats)", rows


TURN_TABLES = {"turn_": "turn", "after_": "distance from the environment's last token (its next token is at 1)"}
"""The quantity by which each table of turns splits the mismatch, by the prefix of the table's labels."""


def _by_pair(pairs: Sequence[Pair], texts: Iterable[Mapping[str, str]]) -> _Rows:
    """Returns a table with a row for each pair and a column for each label among the texts."""
    listed = list(texts)
    labels = dict.fromkeys(label for each in listed for label in each)
    rows = ([str(pair), *(each.get(k, "") for k in labels)] for pair, each in zip(pairs, listed, strict=True))
    return [["pair", *labels], *rows]


def _verdict_cells(verdict: Verdict) -> dict[str, str]:
    left_out = f"{verdict.left_out} of {verdict.tokens}"
    cells = {"verdict": verdict.status.upper(), "cause": verdict.cause, "left_out": left_out}
    cells |= {f"{name} (limit {bar:g})": f"{value:.3g}" for name, (value, bar) in verdict.bars.items()}
    return cells | {"reason": verdict.reason}


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of cells as a Markdown table. The first row is the head."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])
