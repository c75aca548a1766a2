"""Runs the arms of a study and reports their outcomes: ``python experiments/study.py configs/study/toy.yaml``.

A study is a YAML file with a run's YAML (``config``), ``settings`` for every arm, ``seeds``, and ``arms``. An arm has a
name and its own settings (``{schedule.kind: constant}``); ``seeds_of`` gives an arm its own seeds. Each arm and seed is
one run of ``python -m rljax.train`` in OUT/ARM-SEED. ``like`` names another study in the same directory, whose
``config`` and ``settings`` hold unless this file has its own.

The same command resumes a study: it skips complete runs and continues stopped ones. On a machine without the
directories, --rows names the rows.parquet of the earlier runs. Runs are ordered by seed, so that an unfinished study
has all arms of its first seeds.

``comparisons`` are pairs of arms, and ``trend`` is a list of arms by size of a cause, for experiments/study_area.py.
``outcome`` is the metric of a step that they compare, from the surge on or after step ``after``. ``claims`` are figures
for experiments/study_figures.py, each a name with ``title``, ``arms`` and ``metrics``.

``forks`` maps an arm to another one that differs from it only in settings of the schedule, and not in what calls a
surge. With the same seed both are one run until their rates differ, so the first starts from the other's last
checkpoint before that step (``run.fork``).
``checkpoint.every`` and ``checkpoint.keep`` decide which checkpoints exist. ``drawn`` maps an arm to another one whose
runs give it ``schedule.decay_period``. Each seed takes the period of the next seed in the list that called a surge; the
runs of the other arm must be complete.

The report (OUT/outcomes.json, rows.parquet, a figure for each group of arms and seed) needs only the run
directories; --report-only makes it again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from study_forks import check_forks, drawn_period, fork_checkpoint, recorded_fork
from study_outcome import Outcome, outcome_of
from study_rows import Runs, read_table, write_table
from tqdm import tqdm

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record.figure import COLORS, plot_report
from rljax.record.rows import Row, read_rows
from rljax.run.options import Positional, parse_arguments
from rljax.run.rate import ScheduleConfig


@dataclass(frozen=True)
class Arguments:
    """The options of the program."""

    study: Positional[Path]
    """The YAML file of the study."""
    out: Path | None = None
    """The directory of the runs and the report; by default runs/study-<name of the file>."""
    arms: tuple[str, ...] = ()
    """The arms to run; by default all."""
    seeds: tuple[int, ...] = ()
    """The seeds to run; by default all. A seed that the study does not have repeats the study."""
    jobs: int = 1
    """The number of runs at a time, each with a share of the cores. Several runs give more runs per hour."""
    rows: Path | None = None
    """A rows.parquet of this study with complete runs, which the report includes."""
    report_only: bool = False
    """Whether to write only the report."""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ConfigError(f"--jobs must be at least 1, got {self.jobs}")


@dataclass(frozen=True)
class Study:
    """The content of the YAML file; settings are dotted keys of a run's configuration."""

    config: str
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    figures: dict[str, list[str]]
    forks: dict[str, str]
    drawn: dict[str, str]
    comparisons: list[list[str]]
    claims: dict[str, dict[str, Any]]
    seeds_of: dict[str, tuple[int, ...]]
    outcome: str
    after: int | None
    trend: list[str]

    def runs(self, arms: Collection[str] = (), seeds: Collection[int] = ()) -> list[tuple[str, int]]:
        """Returns each (arm, seed) in the order of the runs; ``arms`` and ``seeds`` select some, and all by default.

        A seed that the study does not have comes after the others, with every arm.
        """
        every = dict.fromkeys([*self.seeds, *(seed for own in self.seeds_of.values() for seed in own)])
        return [
            (arm, seed)
            for seed in dict.fromkeys([*every, *seeds])
            for arm in self.arms
            if (seed in self.seeds_of.get(arm, self.seeds) or seed not in every)
            and (not arms or arm in arms)
            and (not seeds or seed in seeds)
        ]


def read_study(path: Path, readers: Sequence[Path] = ()) -> Study:
    """Reads the file of a study. Raises ConfigError if it is not a study.

    ``readers`` are the absolute paths of the files whose ``like`` led to this one.
    """
    with caller_errors():
        text = path.read_text(encoding="utf-8")
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    keys = {field.name for field in dataclasses.fields(Study)}
    if isinstance(document, dict) and "like" in document:
        like = path.parent / document.pop("like")
        readers = [*readers, path.resolve()]
        if like.resolve() in readers:
            raise ConfigError(f"{path}: like leads back to {like.name}")
        other = read_study(like, readers)
        document = {"config": other.config} | document
        document["settings"] = other.settings | document.get("settings", {})
    if not isinstance(document, dict) or set(document) - keys or not {"config", "arms", "seeds"} <= set(document):
        others = ", ".join(sorted(keys - {"config", "seeds", "arms"}))
        raise ConfigError(f"{path}: a study has config, seeds, arms, and may have {others}")
    arms = {name: dict(settings or {}) for name, settings in document["arms"].items()}
    comparisons, claims = document.get("comparisons", []), document.get("claims", {})
    trend = document.get("trend", [])
    if wrong := [name for name, claim in claims.items() if set(claim) != {"title", "arms", "metrics"}]:
        raise ConfigError(f"{path}: a claim has title, arms and metrics, and {', '.join(wrong)} has others")
    if wrong := [name for name, claim in claims.items() if len(claim["arms"]) > len(COLORS)]:
        raise ConfigError(f"{path}: a claim's figure has at most {len(COLORS)} arms, and {', '.join(wrong)} has more")
    seeds_of = {arm: tuple(seeds) for arm, seeds in document.get("seeds_of", {}).items()}
    of_claims = [claim["arms"] for claim in claims.values()]
    named = {
        name
        for names in [*document.get("figures", {}).values(), *comparisons, *of_claims, seeds_of, trend]
        for name in names
    }
    if unknown := named - set(arms):
        places = "figures, comparisons, claims, seeds_of and trend"
        raise ConfigError(f"{path}: {places} name arms that are not there: {', '.join(sorted(unknown))}")
    if not isinstance(after := document.get("after"), int | None):
        raise ConfigError(f"{path}: after must be a step, got {after!r}")
    forks, drawn = document.get("forks", {}), document.get("drawn", {})
    check_forks(path, arms, forks)
    if unknown := {*drawn, *drawn.values()} - set(arms):
        raise ConfigError(f"{path}: drawn names arms that are not there: {', '.join(sorted(unknown))}")
    return Study(
        document["config"],
        tuple(document["seeds"]),
        document.get("settings", {}),
        arms,
        document.get("figures", {"all": list(arms)}),
        forks,
        drawn,
        comparisons,
        claims,
        seeds_of,
        document.get("outcome", "reward/mean"),
        after,
        trend,
    )


def run_command(study: Study, arm: str, seed: int, run_dir: Path, period: int | None = None) -> list[str]:
    """Returns the command line of a run.

    Args:
      study: The study. In its settings ``{seed}`` becomes the seed, and ``{third}`` the seed modulo 3.
      arm: The name of the arm.
      seed: The seed of the run.
      run_dir: The directory of the run.
      period: The drawn ``schedule.decay_period``. None: the arm's own settings hold.
    """
    settings = study.settings | study.arms[arm] | {"run.seed": seed, "run.dir": str(run_dir)}
    if period is not None:
        settings["schedule.decay_period"] = period
    words = [sys.executable, "-m", "rljax.train", study.config]
    for key, value in settings.items():
        values = value if isinstance(value, list) else [value]
        words += ["--" + key.replace("_", "-"), *(str(item).format(seed=seed, third=seed % 3) for item in values)]
    return words


def is_complete(run_dir: Path) -> bool:
    """Whether the run exists and has finished."""
    if not (run_dir / "summary.json").exists() or not (run_dir / "report.png").exists():
        return False
    steps = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["run"]["steps"]
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["steps"] >= steps


def drawn_periods(study: Study, out: Path, runs: Sequence[tuple[str, int]], kept: Runs) -> dict[tuple[str, int], int]:
    """Returns the period of each run whose arm is in ``drawn``. Raises ConfigError if it cannot be known yet."""
    periods = {}
    for arm in dict.fromkeys(arm for arm, _ in runs if arm in study.drawn):
        source = study.drawn[arm]
        seeds = [seed for _, seed in study.runs([source])]
        done = [(source, seed) for seed in seeds if (source, seed) in kept or is_complete(out / f"{source}-{seed}")]
        rows = {seed: rows for (_, seed), rows in read_runs(out, done, kept).items()}
        multiplier = float(study.settings.get("schedule.multiplier", ScheduleConfig().multiplier))
        for seed in (seed for other, seed in runs if other == arm):
            periods[arm, seed] = drawn_period(source, rows, list(dict.fromkeys([*seeds, seed])), seed, multiplier)
    return periods


def run_arms(
    study: Study, out: Path, runs: Sequence[tuple[str, int]], jobs: int, periods: Mapping[tuple[str, int], int]
) -> list[str]:
    """Runs the incomplete runs, ``jobs`` at a time with a share of the cores each; returns the failed ones."""
    waiting = [(arm, seed) for arm, seed in runs if not is_complete(out / f"{arm}-{seed}")]
    total, failed = len(runs), []
    cores = sorted(os.sched_getaffinity(0))
    free = [cores[i::jobs] or cores for i in range(jobs)]

    def command(arm: str, seed: int, run_dir: Path) -> list[str]:
        words, fork = run_command(study, arm, seed, run_dir, periods.get((arm, seed))), recorded_fork(run_dir)
        source = out / f"{study.forks.get(arm)}-{seed}"
        if fork is None and is_complete(source):
            fork = str(fork_checkpoint(source, words[3:]) or "")
        return [*words, *(["--run.fork", fork] if fork else [])]

    def run_one(words: list[str], run_dir: Path, share: list[int]) -> str | None:
        with (run_dir / "log.txt").open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
            os.sched_setaffinity(process.pid, share)
            status = process.wait()
        return f"{run_dir.name} (exit {status}, see {run_dir / 'log.txt'})" if status else None

    under_way: dict[Future[str | None], tuple[str, int, list[int]]] = {}
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=total, initial=total - len(waiting), unit="run") as bar:
        while waiting or under_way:
            unfinished = {*waiting, *((arm, seed) for arm, seed, _ in under_way.values())}
            ready = [job for job in waiting if (study.forks.get(job[0]), job[1]) not in unfinished]
            for job in ready[: len(free)]:
                waiting.remove(job)
                share, run_dir = free.pop(), out / "{}-{}".format(*job)
                run_dir.mkdir(parents=True, exist_ok=True)
                # The configuration is read here, so that a mistake ends the study at once.
                under_way[pool.submit(run_one, command(*job, run_dir), run_dir, share)] = (*job, share)
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                arm, seed, share = under_way.pop(done)
                free.append(share)
                bar.set_postfix_str(f"{arm}-{seed}")
                bar.update()
                failed += [line for line in [done.result()] if line]
    return failed


def read_runs(out: Path, runs: Sequence[tuple[str, int]], kept: Runs) -> dict[tuple[str, int], Sequence[Row]]:
    """Returns the rows of all runs that have any, from ``kept`` or from the run directories."""
    rows_of: dict[tuple[str, int], Sequence[Row]] = {}
    for arm, seed in runs:
        path = out / f"{arm}-{seed}" / "metrics.jsonl"
        rows = kept[arm, seed] if (arm, seed) in kept else read_rows(path) if path.exists() else []
        if rows:
            rows_of[arm, seed] = rows
    return rows_of


def write_report(study: Study, out: Path, rows: Runs, command: str) -> str:
    """Writes outcomes.json, rows.parquet and the figures; returns a line about the runs.

    Only runs with a directory are in the figures.

    Raises:
      ConfigError: There are no rows.
    """
    if not rows:
        raise ConfigError(f"{out} holds no runs of this study")
    out.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, dict[int, Outcome]] = {}
    for arm, seed in sorted(rows, key=lambda run: list(study.arms).index(run[0])):
        outcomes.setdefault(arm, {})[seed] = outcome_of(rows[arm, seed])
    for name, members in study.figures.items():
        for seed in dict.fromkeys(seed for _, seed in rows):
            there = [arm for arm in members if (out / f"{arm}-{seed}" / "metrics.jsonl").exists()]
            if there:
                plot_report([out / f"{arm}-{seed}" for arm in there], out / f"{name}-{seed}.png")
    tables = {arm: {str(seed): dataclasses.asdict(o) for seed, o in runs.items()} for arm, runs in outcomes.items()}
    (out / "outcomes.json").write_text(json.dumps({"command": command, "arms": tables}, indent=1) + "\n")
    write_table(out / "rows.parquet", rows)
    seconds = sum(outcome.wall_seconds for by_seed in outcomes.values() for outcome in by_seed.values())
    return f"{len(rows)} runs, {seconds / 3600:.1f} hours of training time: {out / 'outcomes.json'}"


def main(argv: Sequence[str]) -> int:
    """Runs a study; the exit status is 1 if a run failed."""
    arguments = parse_arguments(Arguments, argv, prog="python experiments/study.py", description=__doc__ or "")
    study = read_study(arguments.study)
    out = arguments.out or Path("runs") / f"study-{arguments.study.stem}"
    if unknown := set(arguments.arms) - set(study.arms):
        raise ConfigError(f"{arguments.study} has no arm {', '.join(sorted(unknown))}; it has {', '.join(study.arms)}")
    runs, kept = study.runs(arguments.arms, arguments.seeds), {}
    if arguments.rows is not None:
        with caller_errors():
            kept = read_table(arguments.rows)
    missing = [run for run in runs if run not in kept]
    failed: list[str] = []
    if not arguments.report_only:
        failed = run_arms(study, out, missing, arguments.jobs, drawn_periods(study, out, missing, kept))
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    print(write_report(study, out, read_runs(out, runs, kept), f"python experiments/study.py {arguments.study}"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
