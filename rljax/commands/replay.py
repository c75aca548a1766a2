"""Shows what the length-triggered schedule would have done on training logs, under several rules that call a surge.

    rljax replay runs/my_run/metrics.jsonl --picture surge.png
    rljax replay one.csv two.jsonl tb_of_a_third_run --json -

For one log it prints the step at which the surge of the response length is called, and the decay period. It also prints
every change of the learning rate, and a table of the calls of neighbour rules. Several logs become one table with a row
for each. LOG is a JSONL, JSON or CSV file, console output (.log, .txt or .out), a TensorBoard event file, or a
directory that contains one of them. The event files of a run that was resumed are read as one log. The program knows
the name of the length column in the logs of verl, TRL, prime-rl, NeMo-RL, slime, Miles, SkyRL, tunix and rljax. With
--column you choose any other column of positive numbers. A step that is missing in the log counts as a step without a
length.

A log that cannot be read is one line on stderr. The other logs are replayed, and the exit status is 2.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljax.errors import ConfigError, caller_errors, import_for, print_end
from rljax.record.lengths import LengthLog, read_lengths
from rljax.record.rows import cell, finite_json, text_table
from rljax.run.options import Positional, parse_arguments
from rljax.schedule import LengthTriggeredLR, SurgeConfig
from rljax.schedule.neighbours import RateLaw, RuleOutcome, neighbours_of, replay_rule

SWEEP = {"ratio": (2.0, 2.5, 3.0, 3.5, 4.0), "window": (60, 80, 100, 150, 200), "persistence": (1, 3, 6, 9, 12)}
FORMAT = 1  # the version of the JSON document
_MOST_CHANGES = 12  # the most changes of the rate in the printed report


@dataclass(frozen=True)
class ReplayArguments(SurgeConfig):
    """The options of the replay. The options of ``SurgeConfig`` are the *rule in use*."""

    logs: Positional[tuple[Path, ...]] = dataclasses.field(kw_only=True)
    """The training logs."""
    column: str | None = None
    """The name of the length column. None: a column with a known name."""
    truncated_column: str | None = None
    """The column with the share of truncated responses. None: the one that goes with a known length column, if any."""
    picture: Path | None = None
    """The file for one picture of all logs, .png or .svg. It needs matplotlib."""
    json: Path | None = None
    """The file for all numbers as JSON; - prints them to standard output, in place of the report."""
    sweep: bool = False
    """Add rules with other values of ratio, window and persistence."""
    learning_rate: float = 1e-6
    """The initial learning rate."""
    multiplier: float = 1.8
    """The decay period divided by the step of the surge."""
    decay_factor: float = 0.5
    """The factor by which each decay multiplies the learning rate."""
    floor_ratio: float = 0.1
    """The lowest learning rate divided by the initial one."""

    def rule(self) -> SurgeConfig:
        """Returns the rule in use: the configuration of a surge that the options give."""
        return SurgeConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(SurgeConfig)})

    def law(self) -> RateLaw:
        """Returns the options that fix the learning rate after a surge is called."""
        return RateLaw(self.learning_rate, self.multiplier, self.decay_factor, self.floor_ratio)


@dataclass(frozen=True)
class Replay:
    """A log and the outcome of each rule on it."""

    path: Path  # the path of the log, as it was given
    log: LengthLog  # the lengths of the log
    outcomes: list[RuleOutcome]  # the outcome of each rule; the rule in use comes first

    @property
    def in_use(self) -> RuleOutcome:
        """The outcome of the rule in use."""
        return self.outcomes[0]


def replay_log(path: Path, options: ReplayArguments) -> Replay:
    """Reads a log and replays it under each rule. Raises ConfigError, which names the log, if it cannot be read."""
    try:
        with caller_errors():
            log = read_lengths(path, options.column, options.truncated_column)
            rules = neighbours_of(options.rule(), SWEEP if options.sweep else None)
            outcomes = [replay_rule(rule, log.lengths, log.truncated, options.law()) for rule in rules]
    except ConfigError as error:
        named = str(error).startswith(str(path))
        raise ConfigError(error if named else f"{path}: {error}") from error
    return Replay(path, log, outcomes)


def verdict(outcome: RuleOutcome) -> str:
    """Returns one line that says at which step the rule calls a surge, or that it calls none."""
    if outcome.surge_step is None:
        return f"no surge in {len(outcome.rates)} steps"
    how = "by max_wait" if outcome.crossing_step is None else f"crossing since step {outcome.crossing_step}"
    return f"surge called at step {outcome.surge_step} ({how}), decay period {outcome.decay_period}"


def run_note(result: Replay) -> str:
    """Returns the line that says which of several runs in one file is replayed; empty if the file has one run."""
    if not result.log.other_runs:
        return ""
    others = " or ".join(f"--column {shlex.quote(name)}" for name in result.log.other_runs)
    count = len(result.log.other_runs) + 1
    return f"{result.path} has {count} runs: {result.log.column!r} is replayed; choose another with {others}"


def report(result: Replay) -> list[str]:
    """Returns the report of one log: the columns, the unused steps, the call, the changes of the rate, the rules."""
    log, outcome = result.log, result.in_use
    also = f", truncated fraction {log.truncated_column!r}" if log.truncated_column else ""
    steps = "each row with a length is a step" if log.step_column is None else f"steps by {log.step_column!r}"
    lines = [f"{len(log.lengths)} steps of {log.column!r}{also}, {steps}"]
    if outcome.ignored:
        lack = f"{outcome.ignored} of them have no finite, positive length"
        lines.append(f"{lack}: they count as steps, but are not used")
    if outcome.held_out:
        lines.append(f"{outcome.held_out} of them have a truncated fraction above max_truncated: not used")
    lines.append(verdict(outcome))
    if outcome.crossing_step is None:
        lines += near_misses(result)
    for step, rate in outcome.changes[:_MOST_CHANGES]:
        after = " (after the end of the log)" if step > len(log.lengths) else ""
        lines.append(f"  from step {step:>5}: learning rate {rate:.6g}{after}")
    if len(outcome.changes) > _MOST_CHANGES:
        step, rate = outcome.changes[-1]
        lines.append(f"  and so on, down to {rate:.6g} at step {step}")
    return [*lines, "", text_table(rules_table(result))]


def near_misses(result: Replay) -> list[str]:
    """Returns lines about the step that came nearest to a call, and about the other rules that call."""
    outcome, config = result.in_use, result.in_use.rule.config
    assert config is not None  # the rule in use has one
    if outcome.nearest is None:
        used = len(outcome.rates) - outcome.ignored - outcome.held_out
        lines = [f"nearest: none, because {used} usable steps are fewer than the warm-up of {config.warmup}"]
    else:
        step, ratio = outcome.nearest
        lines = [f"nearest: {ratio:.3g} times the baseline at step {step}; a call needs {config.ratio:g}"]
        if ratio >= config.ratio:
            lines[0] += f" with the newest {config.persistence} lengths at {config.held_ratio:g} or more"
    calls = [f"{one.rule.name} at step {one.surge_step}" for one in result.outcomes if one.crossing_step is not None]
    return [*lines, f"neighbour rules that would have called: {', '.join(calls) or 'none'}"]


def rules_table(result: Replay) -> list[list[str]]:
    """Returns the table of one log, a row for each rule; * marks the rules that equal the rule in use."""
    rows = [["rule", "called", "crossing since", "decay period", "first decay", "last rate", "nearest ratio"]]
    for one in result.outcomes:
        mark = "* " if one.rule.config == result.in_use.rule.config else "  "
        first = one.changes[1][0] if len(one.changes) > 1 else None
        cells = [cell(value) for value in (one.surge_step, one.crossing_step, one.decay_period, first)]
        nearest = cell(one.nearest[1] if one.nearest else None, ".3g")
        rows.append([f"{mark}{one.rule.name}", *cells, f"{one.rates[-1]:.3g}", nearest])
    return rows


def logs_table(results: Sequence[Replay]) -> list[list[str]]:
    """Returns the table of several logs, a row for each: the rule in use, and the steps at which other rules call."""
    names = [outcome.rule.name for outcome in results[0].outcomes[1:]]
    rows = [["log", "steps", "called", "decay period", "first decay", "last rate", "nearest ratio", *names]]
    for result in results:
        _, called, _, *cells = rules_table(result)[1]
        others = [cell(outcome.surge_step) for outcome in result.outcomes[1:]]
        rows.append([str(result.path), str(len(result.log.lengths)), called, *cells, *others])
    return rows


def outcome_numbers(outcome: RuleOutcome) -> dict[str, Any]:
    """Returns the entry of one rule's outcome in the JSON document."""
    config, nearest = outcome.rule.config, outcome.nearest
    return {
        "rule": outcome.rule.name,
        "config": None if config is None else dataclasses.asdict(config),
        "surge_step": outcome.surge_step,
        "crossing_step": outcome.crossing_step,
        "decay_period": outcome.decay_period,
        "rates": [{"step": step, "learning_rate": rate} for step, rate in outcome.changes],
        "nearest": None if nearest is None else {"step": nearest[0], "ratio": nearest[1]},
        "ignored": outcome.ignored,
        "held_out": outcome.held_out,
    }


def log_numbers(result: Replay) -> dict[str, Any]:
    """Returns the entry of one log in the JSON document."""
    log = result.log
    return {
        "log": str(result.path),
        "error": None,
        "length_column": log.column,
        "other_runs": log.other_runs,
        "truncated_column": log.truncated_column,
        "step_column": log.step_column,
        "steps": len(log.lengths),
        "lengths": log.lengths,
        "truncated_fractions": log.truncated,
        "ratios": result.in_use.ratios,
        "learning_rates": list(result.in_use.rates),
        "rules": [outcome_numbers(outcome) for outcome in result.outcomes],
    }


def numbers(found: dict[Path, Replay | str], options: ReplayArguments) -> dict[str, Any]:
    """Returns the whole JSON document. The entry of a log that cannot be read has only its path and its error."""
    given = dataclasses.asdict(options)
    rate = {name: given[name] for name in ("learning_rate", "multiplier", "decay_factor", "floor_ratio")}
    logs = [
        {"log": str(path), "error": result} if isinstance(result, str) else log_numbers(result)
        for path, result in found.items()
    ]
    return {"format": FORMAT, **rate, "logs": logs}


def draw(results: Sequence[Replay], path: Path, figure: Any) -> None:
    """Writes one picture of all logs: their lengths, and the call and the rates of the rule in use. Raises OSError.

    ``figure`` is the module ``record.figure``, which needs matplotlib.
    """
    runs, names = [], figure.short_names([result.path for result in results])
    for result, name, (line, color) in zip(results, names, itertools.cycle(figure.LINES), strict=False):
        used = result.in_use
        call = {"schedule/surge_step": used.surge_step, "schedule/decay_period": used.decay_period}
        rows = [
            {"step": step, "response_length/mean": length, "schedule/learning_rate": rate} | call
            for step, (length, rate) in enumerate(zip(result.log.lengths, used.rates, strict=True), 1)
        ]
        runs.append(figure.Run(name, rows, color, line))
    title = verdict(results[0].in_use) if len(results) == 1 else ""
    figure.save_figure(figure.plot_grid((("length",), ("learning_rate",)), runs, 0.0, title=title), path)


def main(argv: Sequence[str]) -> int:
    """Replays the logs, prints the report, and writes the picture and the JSON; returns the exit status."""
    options = parse_arguments(ReplayArguments, argv, prog="rljax replay", description=__doc__ or "")
    figure = import_for("--picture", "rljax.record.figure", "replay") if options.picture else None
    with caller_errors():
        LengthTriggeredLR(**options.law()._asdict())  # checks the rates
    found: dict[Path, Replay | str] = {}
    for path in options.logs:
        try:
            found[path] = result = replay_log(path, options)
            if note := run_note(result):
                print(note, file=sys.stderr)
        except ConfigError as error:
            print_end(error)
            found[path] = str(error)
    results = [result for result in found.values() if isinstance(result, Replay)]
    prints_json = options.json == Path("-")
    with caller_errors():
        if options.picture and results:
            draw(results, options.picture, figure)
        if options.json:
            text = finite_json(numbers(found, options), indent=None)
            if prints_json:
                print(text, end="")
            else:
                options.json.write_text(text, encoding="utf-8")
    if results and not prints_json:
        print("\n".join(report(results[0])) if len(found) == 1 else text_table(logs_table(results)))
        if options.picture:
            print(f"picture: {options.picture}")
    return 0 if len(results) == len(found) else ConfigError.exit_status
