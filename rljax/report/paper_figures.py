"""The panels of a run arranged as the figures of two papers.

Figures 1 to 13 are those of "Beyond Precision" (arXiv 2602.01826), the ones by length that of "Defeating the
Training-Inference Mismatch via FP16" (arXiv 2510.26788). What a figure of the first shows is known for some from its
text, captions and readers of it (``KNOWN``); the others stand here for the experiments that it reports, and both their
numbers and their panels are ours.
"""

from __future__ import annotations

import fnmatch
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rljax.report import lengths, panels

# A panel's name -> what draws it, and the metric it needs; a path is of files in the run directory.
PANELS: dict[str, tuple[panels.Panel, str]] = {
    "accuracy": (panels.accuracy, "eval/*/accuracy"),
    "reward": (panels.reward, "reward/mean"),
    "length": (panels.length, "response_length/mean"),
    "mismatch": (panels.mismatch, "mismatch/log_ppl_abs_diff"),
    "k3_kl": (panels.k3_kl, "mismatch/k3_kl"),
    "grad_norm": (panels.grad_norm, "optimizer/grad_norm"),
    "grad_noise": (panels.grad_noise, "optimizer/grad_noise"),
    "entropy": (panels.entropy, "policy/entropy"),
    "rate": (panels.learning_rate, "schedule/learning_rate"),
    "kl_by_position": (lengths.kl_by_position, "mismatch_position/*/k3_kl"),
    "ratio_by_length": (lengths.ratio_by_length, "rollouts/step_*.parquet"),
}


@dataclass(frozen=True)
class Arrangement:
    """A figure.

    Attributes:
      title: its heading.
      runs: the configurations in configs/paper whose runs it overlays; any others draw as well.
      panels: rows of keys of ``PANELS``.
      known: what is known of the original; empty: as far as known, an experiment of the paper in panels of ours.
    """

    title: str
    runs: tuple[str, ...]
    panels: tuple[tuple[str, ...], ...]
    known: str = ""

    @property
    def names(self) -> list[str]:
        """The panels, in the order of reading."""
        return [name for row in self.panels for name in row]


_CURVES = (("accuracy", "mismatch"), ("length", "rate"))

FIGURES: dict[str, Arrangement] = {
    "1": Arrangement(
        "Mismatch and validation, constant against decayed rate",
        ("qwen3_4b_constant_1e-6", "qwen3_4b_length_triggered"),
        (("mismatch", "accuracy"),),
        "(a) mismatch, (b) validation, (c) the algorithm; constant 1e-6 collapses near step 300",
    ),
    "2": Arrangement(
        "Gradient noise and mismatch grow together",
        ("qwen3_4b_constant_1e-6",),
        (("grad_norm", "mismatch"), ("grad_noise", "reward")),
    ),
    "3": Arrangement(
        "A smaller update keeps the mismatch small",
        ("qwen3_4b_constant_1e-6", "qwen3_4b_constant_1e-7"),
        (("mismatch", "grad_norm"), ("accuracy", "reward")),
    ),
    "4": Arrangement(
        "Response length at a small rate",
        ("qwen3_4b_constant_1e-7",),
        (("length", "mismatch"),),
        "response length at 1e-7, whose curve surges near step 1500",
    ),
    "5": Arrangement(
        "The collapse does not wait for an epoch",
        ("qwen3_4b_constant_1e-6", "qwen3_4b_data_25", "qwen3_4b_data_2.5"),
        (("accuracy", "mismatch"), ("reward", "length")),
    ),
    "6": Arrangement(
        "Response length holds, then surges",
        ("qwen3_4b_constant_1e-6", "qwen3_8b_constant_1e-6"),
        (("length",),),
        "response length: 1000 to 3000-4000 tokens around step 100, before the collapse near 300",
    ),
    "7": Arrangement("Length-triggered rate", ("qwen3_4b_constant_1e-6", "qwen3_4b_length_triggered"), _CURVES),
    "8": Arrangement(
        "Length-triggered rate, the larger model", ("qwen3_8b_constant_1e-6", "qwen3_8b_length_triggered"), _CURVES
    ),
    "9": Arrangement(
        "Decay periods",
        ("qwen3_4b_constant_1e-6", "qwen3_4b_period_125", "qwen3_4b_period_204", "qwen3_4b_period_250"),
        _CURVES,
    ),
    "10": Arrangement(
        "Decay periods, the larger model",
        ("qwen3_8b_constant_1e-6", "qwen3_8b_period_100", "qwen3_8b_period_160", "qwen3_8b_period_204"),
        _CURVES,
    ),
    "11": Arrangement(
        "Multipliers of the surge step",
        ("qwen3_4b_multiplier_1.5", "qwen3_4b_multiplier_1.8", "qwen3_4b_multiplier_2.0"),
        _CURVES,
    ),
    "12": Arrangement(
        "Importance sampling, alone and with the schedule",
        (
            "qwen3_4b_token_tis",
            "qwen3_4b_sequence_tis",
            "qwen3_4b_token_mis",
            "qwen3_4b_sequence_mis",
            "qwen3_4b_token_tis_schedule",
            "qwen3_4b_token_mis_schedule",
        ),
        (("accuracy", "mismatch"), ("grad_norm", "reward")),
    ),
    "13": Arrangement(
        "float16 with and without the schedule",
        ("qwen3_4b_constant_1e-6", "qwen3_4b_fp16", "qwen3_4b_fp16_schedule"),
        (("accuracy", "mismatch"),),
        "float16 collapses as bfloat16 does; the same decay period stabilises it (section 4.4)",
    ),
    "kl-by-length": Arrangement(
        "KL between engines by position in the response",
        ("qwen3_1.7b_sanity_bf16", "qwen3_1.7b_sanity_fp16"),
        (("kl_by_position",), ("k3_kl", "mismatch")),
        "arXiv 2510.26788, figure 2: the mismatch grows with length, KL 7.64 in bfloat16, 0.32 in float16; here from "
        "the rows, by position",
    ),
    "ratio-by-length": Arrangement(
        "Log-ratio of whole responses by their length",
        ("qwen3_1.7b_sanity_bf16", "qwen3_1.7b_sanity_fp16"),
        (("ratio_by_length",),),
        "arXiv 2510.26788, figure 2: slope of -1.01 per 1000 tokens in bfloat16, -0.07 in float16; here from the "
        "newest token dump of each run",
    ),
}
"""Name -> figure."""


def draw_paper_figure(
    name: str,
    run_dirs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    smooth: float = 0.9,
    labels: Sequence[str] | None = None,
) -> Path:
    """Draws a figure of ``FIGURES`` from run directories into a PNG and returns its path.

    The arguments are those of ``draw_report``.

    Raises:
      ValueError: no such figure, a run that lacks a metric the figure needs, or arguments out of range.
      FileNotFoundError: a run without metrics.jsonl.
      RuntimeError: a damaged metrics.jsonl.
    """
    if name not in FIGURES:
        raise ValueError(f"no figure {name!r}; there are {', '.join(FIGURES)}")
    panels.check_smooth(smooth)
    figure, runs = FIGURES[name], panels.read_runs(run_dirs, labels)
    if lacks := [text for panel in figure.names if (text := _lack(PANELS[panel][1], runs))]:
        raise ValueError(f"figure {name} needs {'; '.join(lacks)}")
    grid = [[PANELS[panel][0] for panel in row] for row in figure.panels]
    return panels.save_figure(panels.draw_grid(grid, runs, smooth, title=f"{figure.title} (as figure {name})"), out)


def _lack(pattern: str, runs: Sequence[panels.Run]) -> str:
    """Which runs lack what the pattern names; empty if none does."""
    missing = [str(run.directory) for run in runs if not _has(run, pattern)]
    return f"{pattern}, which is not in {', '.join(missing)}" if missing else ""


def _has(run: panels.Run, pattern: str) -> bool:
    if pattern.endswith(".parquet"):
        return any(run.directory.glob(pattern))
    found = {key for row in run.rows for key, value in row.items() if value is not None}
    return bool(fnmatch.filter(found, pattern))


def figures_table(width: int = 100) -> str:
    """What each figure needs and shows, for people."""
    lines = []
    for name, figure in FIGURES.items():
        metrics = ", ".join(PANELS[panel][1] for panel in figure.names)
        lines.append(f"{name}: {figure.title}")
        known = figure.known or "as far as known: an experiment of the paper; its number and panels are ours"
        for head, text in (("runs", ", ".join(figure.runs)), ("metrics", metrics), ("shows", known)):
            lines += textwrap.wrap(f"{head + ':':9}{text}", width, initial_indent="    ", subsequent_indent=" " * 13)
    return "\n".join(lines)
