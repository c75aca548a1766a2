"""Panels of the papers' figures alone: the mismatch by position and by response length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from rljax.record.panels import PANELS, Panel, Run, head, log_axis, note
from rljax.record.rows import Row
from rljax.record.token_dumps import TokenDump, read_dump

_EDGE_SHARE = 10  # one in so many rows is the beginning of a run, and one in so many its end
_BUCKET_KEY = re.compile(r"mismatch_position/((lt_|ge_)?([^/_]+)(?:_to_[^/]+)?)/k3_kl")  # name, kind, first edge


def slope_of_ratio(lengths: np.ndarray, ratios: np.ndarray) -> float:
    """Returns the least-squares slope through the origin of log-ratios [n] (nats) over lengths [n], per 1000 tokens."""
    return float(1000 * (lengths * ratios).sum() / (lengths * lengths).sum())


def plot_kl_by_position(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """Plots k3_kl of each bucket of positions: thick for the last tenth of a run's rows, thin for the first."""
    del smooth
    head(axis, "KL by position in the response", "k3_kl, nats per token")
    axis.set_xlabel("position, tokens from 1; thick: last tenth of the steps, thin: first")
    found = [(run, bucket_means(run.rows, last=False), bucket_means(run.rows, last=True)) for run in runs]
    buckets = sorted({bucket for _, *both in found for means in both for bucket in means})
    values = np.asarray([value for _, *both in found for means in both for value in means.values()], np.float64)
    if not buckets or not (values > 0).any():
        note(axis, "no mismatch_position/*/k3_kl above 0 in the record")
        return
    for run, first, last in found:
        for means, width, alpha in ((first, 0.9, 0.5), (last, 1.9, 1.0)):
            heights = [means.get(bucket, np.nan) or np.nan for bucket in buckets]
            style = {"color": run.color, "linestyle": run.line, "marker": "o", "markersize": 3 * width**0.5}
            axis.plot(range(len(buckets)), heights, linewidth=width, alpha=alpha, **style)
    axis.set_xlim(-0.4, len(buckets) - 0.6)
    axis.set_xticks(range(len(buckets)), [name for _, _, name in buckets], rotation=20 if len(buckets) > 6 else 0)
    log_axis(axis, values)


def bucket_means(rows: Sequence[Row], *, last: bool) -> dict[tuple[float, bool, str], float]:
    """Computes the mean k3_kl of the tokens of each bucket over the first or last tenth of the rows, at least one row.

    Returns:
      The means, by (edge, whether it is a lower edge, name). Sorted keys go up the response.
    """
    count = max(1, len(rows) // _EDGE_SHARE)
    totals: dict[tuple[float, bool, str], list[float]] = {}
    for row in rows[-count:] if last else rows[:count]:
        for key, value in row.items():
            match = _BUCKET_KEY.fullmatch(key)
            if match is None or value is None:
                continue
            name, kind, edge = match.groups()
            shown = name.replace("lt_", "below ").replace("ge_", "from ").replace("_to_", " to ")
            tokens = row[key.removesuffix("k3_kl") + "token_count"]
            total = totals.setdefault((float(edge), kind != "lt_", shown), [0.0, 0.0])
            total[0] += tokens * value
            total[1] += tokens
    return {bucket: total / tokens for bucket, (total, tokens) in totals.items()}


def plot_ratio_by_length(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """Plots the log of trainer / rollout probability of whole responses by length, from each run's newest dump."""
    del smooth
    head(axis, "Sequence log-ratio by length", "sum of trainer - rollout, nats")
    axis.set_xlabel("response length, tokens")
    longest = 1.0
    for run in runs:
        paths = sorted(run.directory.glob("rollouts/step_*.parquet"))
        if not paths:
            continue
        lengths, ratios = sequence_ratios(read_dump(paths[-1]))
        slope = slope_of_ratio(lengths, ratios)
        longest = max(longest, lengths.max())
        label = f"{run.label}: {slope:.3g} per 1000 tokens"
        axis.scatter(lengths, ratios, s=9, color=run.color, alpha=0.5, linewidths=0, label=label)
        axis.plot([0, lengths.max()], [0, slope * lengths.max() / 1000], color=run.color, linestyle=run.line)
    if not axis.collections:
        note(axis, "no rollouts/step_*.parquet in the run")
        return
    axis.axhline(0, color="black", linewidth=0.9, linestyle="--")
    axis.set_xlim(0, 1.03 * longest)
    axis.legend(frameon=False, fontsize=8.5, loc="best")


def sequence_ratios(dump: TokenDump) -> tuple[np.ndarray, np.ndarray]:
    """Returns the response tokens, and the sum of trainer - rollout over them (nats), of each sequence [n] of a dump.

    Tokens that are not finite on either side are left out of both.
    """
    lengths, ratios = [], []
    for mask, trainer, rollout in zip(
        dump.response_mask, dump.logprobs["trainer"], dump.logprobs["rollout"], strict=True
    ):
        ratio = (trainer.astype(np.float64) - rollout)[mask]
        lengths.append(np.isfinite(ratio).sum())
        ratios.append(ratio[np.isfinite(ratio)].sum())
    return np.asarray(lengths, np.float64), np.asarray(ratios)


ALL_PANELS: Mapping[str, Panel] = {
    **PANELS,
    "kl_by_position": Panel(plot_kl_by_position, "mismatch_position/*/k3_kl"),
    "ratio_by_length": Panel(plot_ratio_by_length, "rollouts/step_*.parquet"),
}
"""The panels by name, with those of the report."""
