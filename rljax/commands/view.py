"""Makes one HTML page of a token dump or of a run: tokens coloured by log-ratio, the largest contributions first.

    rljax view comparison/tokens.parquet -o report.html
    rljax view runs/my_run

DUMP_OR_RUN is a token dump, any other file of tokens that ``rljax compare`` reads, or a run directory. The page is one
static file that needs no network. Sequences are sorted by their contribution to the mismatch. Hover over a token, or
tap it, to see both log-probabilities and its other values in the dump. The filters and the charts select tokens.

The page of a run also has the curves of report.png and the dumps in rollouts/. It knows the run's tokenizer and shows
the weight of each token under the run's correction. A dump in the rollouts/ of a run is shown in the same way.

The page of a run is written to report.html in the run's directory, any other page to the current directory, unless
--out names another file. An older page there is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.compare.importers import read_tokens
from rljax.data.tokenizer import Tokenizer, load_tokenizer
from rljax.distributed.files import write_whole
from rljax.errors import ConfigError, caller_errors
from rljax.policy.hub import model_directory
from rljax.record.dump_facts import choose_pair
from rljax.record.rows import run_dumps
from rljax.run.config import Config
from rljax.run.directory import recorded_config
from rljax.run.options import Positional, parse_arguments
from rljax.view.page import Page, measure

CURVES = (("mismatch",), ("length", "learning_rate", "reward"), ("accuracy", "grad_norm", "entropy"))
"""The panels of report.png in fewer rows."""
TOKENIZER_FILES = ("tokenizer*", "*.jinja", "config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class ViewArguments:
    """The arguments of ``rljax view``."""

    dump_or_run: Positional[Path]
    """The token dump, another file of tokens, or the run directory."""
    out: Path | None = None
    """The HTML file to write. None: report.html, in the run's directory if DUMP_OR_RUN is a run."""
    trainer: str | None = None
    """The column of the trainer. None: the roles of the columns decide."""
    rollout: str | None = None
    """The column of the rollout engine. None: the roles of the columns decide."""
    model: str | None = None
    """The Hugging Face directory, or OWNER/NAME, whose tokenizer gives the text of the tokens. None: the run's own;
    without one the page shows token ids."""
    max_tokens: int = 300_000
    """The most tokens that the page shows one by one. The sequences that contribute most are shown."""
    dumps: int = 6
    """The most dumps of a run on the page, evenly spread up to the newest one."""
    alternatives: int = 5
    """The number of likeliest tokens that are shown at each token."""

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("dumps", 1), ("alternatives", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")


def is_run(path: Path) -> bool:
    """Returns whether a path is a run directory: it has metrics.jsonl or config.yaml."""
    return (path / "metrics.jsonl").is_file() or (path / "config.yaml").is_file()


def find_run(source: Path) -> Path | None:
    """Returns the run of DUMP_OR_RUN: the directory itself, or the run in whose rollouts/ the file lies; else None."""
    if source.is_dir():
        return source if is_run(source) else None
    above = source.absolute().parent
    return above.parent if above.name == "rollouts" and is_run(above.parent) else None


def dump_files(run: Path, most: int) -> tuple[list[Path], int]:
    """Returns at most ``most`` dumps of a run, evenly spread up to the newest one, and the number of all its dumps."""
    files = run_dumps(run)
    chosen = np.unique(np.linspace(len(files) - 1, 0, min(most, len(files))).round().astype(int))
    return [files[place] for place in chosen], len(files)


def read_config(run: Path | None, facts: list[str]) -> Config | None:
    """Reads the configuration of a run, or returns None if there is none.

    If it cannot be read, a sentence about this is added to ``facts``, and None is returned.
    """
    if run is None or not (run / "config.yaml").is_file():
        return None
    try:
        with caller_errors():
            return recorded_config(run)
    except ConfigError as error:
        facts.append(f"The run's configuration cannot be read, so tokenizer and weights are unknown: {error}")
        return None


def read_tokenizer(name: str | None, config: Config | None, facts: list[str]) -> Tokenizer | None:
    """Returns the tokenizer of --model or of the run, or None if there is none.

    If the run's tokenizer cannot be read, a sentence about this is added to ``facts``. Raises ValueError or OSError if
    the tokenizer of --model cannot be read.
    """
    try:
        if name or config is not None:
            return load_tokenizer(model_directory(name or config.model.path, TOKENIZER_FILES))  # type: ignore[union-attr]
    except (ValueError, OSError) as error:
        if name:
            raise
        facts.append(f"Tokens are shown by their ids: {error}")
    return None


def run_facts(run: Path) -> tuple[list[str], str]:
    """Returns sentences about a run, and its curves as SVG, which is empty if the run has no rows."""
    from rljax.record.figure import SMOOTH, plot_grid, read_runs, svg_text  # matplotlib, only for runs

    if not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").stat().st_size:
        return ["The run has no rows yet."], ""
    runs = read_runs([run])
    surge, period = runs[0].last("schedule/surge_step"), runs[0].last("schedule/decay_period")
    called = f"The surge was called at step {surge}." if surge else "No surge was called."
    facts = [f"{len(runs[0].rows)} steps. {called}" + (f" The decay period is {period}." if period else "")]
    return facts, svg_text(plot_grid(CURVES, runs, SMOOTH, title=" "))


def add_dumps(
    page: Page, files: Sequence[Path], given: ViewArguments, correction: CorrectionConfig | None
) -> list[str]:
    """Adds the dumps to the page. Returns a line for each dump that cannot be shown.

    If the page has no curves, and its only dump cannot be shown, this raises ValueError or OSError instead.
    """
    failed: list[str] = []
    for path in tqdm(files, desc="reading", unit="dump", delay=1, disable=len(files) < 2):
        try:
            dump = read_tokens(path)
            columns = choose_pair(dump, given.trainer, given.rollout)
            measured = measure(dump, columns, correction)
            limit = given.max_tokens // len(files)
            page.add(path.name, measured, tokens=limit, alternatives=given.alternatives)
        except (ValueError, OSError) as error:
            if len(files) == 1 and not page.curves:
                raise
            failed.append(f"{path.name} is left out: {error}")
    return failed


def main(argv: Sequence[str]) -> int:
    """Writes the page, prints its path, and returns the exit status."""
    given = parse_arguments(ViewArguments, argv, prog="rljax view", description=__doc__ or "", aliases={"-o": "--out"})
    if not given.dump_or_run.exists():
        raise ConfigError(f"{given.dump_or_run}: no such file or directory")
    run = find_run(given.dump_or_run)
    shown_run = run if run == given.dump_or_run else None  # None: one dump alone is shown
    out = given.out or (shown_run or Path()) / "report.html"
    if out.exists() and (out.is_dir() or out.samefile(given.dump_or_run)):
        raise ConfigError(f"--out: expected a file to write, other than DUMP_OR_RUN, got {out}")
    with caller_errors(RuntimeError):  # a damaged record
        facts, curves = run_facts(shown_run) if shown_run else ([], "")
        files, count = dump_files(shown_run, given.dumps) if shown_run else ([given.dump_or_run], 1)
        config = read_config(run, facts)
        page = Page(given.dump_or_run.resolve().name, read_tokenizer(given.model, config, facts), facts, curves)
        if count > len(files):
            facts.append(f"{len(files)} of its {count} token dumps are here.")
        if not files:
            facts.append("The run has no token dumps. Its configuration writes them with rollout.dump_every.")
        failed = add_dumps(page, files, given, config.correction if config is not None else None)
        if not page.dumps and not curves:
            raise ConfigError(failed[0] if failed else f"{given.dump_or_run} has neither rows nor token dumps to show")
        facts += failed
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page.text())
    for line in failed:
        print(line, file=sys.stderr)
    print(out)
    return 0
