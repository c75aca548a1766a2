"""Names the cause of a mismatch or a collapse, the published limits that it crosses, and the remedies.

    rljax diagnose runs/my_run
    rljax diagnose trainer_state.json --json diagnosis.json
    rljax diagnose rollouts/step_000020.parquet

SOURCE is a run directory, a training log or a token dump. A log is a JSONL, JSON or CSV file, console output (.log,
.txt or .out), a TensorBoard event file, or a directory with JSONL, CSV, event files or trainer_state.json. The names
of the metrics of rljax, verl, TRL, prime-rl, NeMo-RL, slime, Miles, SkyRL, tunix, AReaL, OpenRLHF, open-instruct,
rLLM, torchtitan, tinker, ROLL, ms-swift and Marin are known. A dump is a file that ``rljax compare`` reads. Of a run
directory of rljax its configuration and its newest token dump are read, too.

The exit status is 0 if nothing is wrong. It is 1 if a cause is named, or the numbers do not show the cause. It is 2 if
SOURCE cannot be read.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from rljax.diagnose.course import read_course
from rljax.diagnose.evidence import Declared, Facts, cross
from rljax.diagnose.page import diagnose, to_text
from rljax.diagnose.signals import choose_signals, read_signals, split_runs
from rljax.errors import ConfigError, MissingPackageError, caller_errors, import_for, parse_json
from rljax.record.rows import finite_json, run_dumps
from rljax.record.training_logs import SUMMARY, Rows, flatten, foreign_kind, read_log
from rljax.run.options import Positional, parse_arguments

if TYPE_CHECKING:
    from rljax.diagnose.token_facts import TokenFacts
    from rljax.record.token_dumps import TokenDump
    from rljax.run.config import Config


@dataclass(frozen=True)
class DiagnoseArguments:
    """The arguments of the diagnosis."""

    source: Positional[Path]
    """The log, the run directory or the token dump."""
    tokens: Path | None = None
    """A token dump of the same run, which adds to the log."""
    trainer: str | None = None
    """The column of the dump that a trainer computed."""
    rollout: str | None = None
    """The column of the dump that a rollout engine computed. --engine is the same."""
    run: str | None = None
    """The run to diagnose, of a log that has several."""
    json: Path | None = None
    """The file for the diagnosis as JSON; - prints the JSON instead of the page."""


def needed(module: str, source: Path) -> ModuleType:
    """Imports the module that reads ``source``, a dump or a run. Raises MissingPackageError if a package is missing."""
    return import_for(f"{source}: a token file or a run directory", module, "train")


def read_tokens(path: Path) -> TokenDump:
    """Reads a token file. Raises ConfigError or ValueError if it cannot be read."""
    dump: TokenDump = needed("rljax.compare.importers", path).read_tokens(path)
    return dump


def declared_of(config: Config | None, dump: TokenDump | None, tokens: TokenFacts | None) -> Declared:
    """Returns the declared dtypes and 8-bit forms of trainer and engine, from a run's settings or a dump's header."""
    if config is not None:
        declared: Declared = needed("rljax.run.watch", Path(config.run.dir)).declared_by(config)
        return declared
    if dump is None or tokens is None:
        return Declared()
    sides = dump.sources[tokens.trainer], dump.sources[tokens.rollout]
    kinds = [str(dump.sampling.get(name, "")) for name in ("weight_quantization", "kv_cache_dtype")]
    return Declared(sides[0].dtype, sides[1].dtype, sides[1].form or ", ".join(filter(None, kinds)))


def facts_of(
    source: Path,
    tokens: Path | None = None,
    run: str | None = None,
    trainer: str | None = None,
    rollout: str | None = None,
) -> Facts:
    """Gathers the facts of the log, the token dump and the configuration that the arguments name.

    ``run`` names one of several runs in a log. ``trainer`` and ``rollout`` name columns of the dump.

    Raises ConfigError or ValueError if a given file cannot be read, or has no such run or column.
    """
    course, dump, config, runs, is_summary = None, None, None, dict[str, Rows](), False
    if not source.exists():
        raise ConfigError(f"{source}: no such file or directory")
    if tokens is not None:
        dump = read_tokens(tokens)
    elif source.is_dir() and (files := run_dumps(source)):
        dump = read_tokens(files[-1])
    if source.is_dir() and (source / "config.yaml").is_file() and (source / "metrics.jsonl").is_file():
        config = needed("rljax.run.directory", source).recorded_config(source)
    try:
        if source.is_file() and foreign_kind(source) == SUMMARY:
            rows, is_summary = [flatten(parse_json(source.read_bytes()))], True
        else:
            rows, _ = read_log(source, lambda columns: tuple(choose_signals(columns)[1].values()))
            runs = split_runs(rows)
            if run is not None:
                if run not in runs:
                    known = ", ".join(runs) or "one run without a name"
                    raise ConfigError(f"{source}: no run {run!r} in the log, which has {known}")
                rows, runs = runs[run], {}
        if not runs:
            course = read_course(read_signals(rows))
    except ConfigError as reason:
        if dump is not None or run is not None:
            raise
        try:
            dump = read_tokens(source)
        except MissingPackageError as missing:
            raise ConfigError(f"{reason}; or is it a token file? {missing}") from missing
        except ValueError as error:
            raise (error if source.suffix == ".parquet" else reason) from None
        if not dump.logprobs:
            hint = "rljax docs compare lists the names of columns that are known"
            raise ConfigError(f"{source} has token ids, but no log-probabilities: {hint}") from None
    temperature = config.rollout.temperature if config is not None else 1.0
    of_tokens: TokenFacts | None = None
    if dump is not None and (len(dump.logprobs) > 1 or trainer or rollout):
        read_facts = importlib.import_module("rljax.diagnose.token_facts").read_facts
        of_tokens = read_facts(dump, temperature, trainer, rollout)
    crossings = []
    if course is not None and course.gap_name:
        crossings = cross(course.log.signals, course.log.steps)
    elif of_tokens is not None:
        crossings = cross({name: np.array([value]) for name, value in of_tokens.metrics.items()}, np.array([0]))
    return Facts(course, of_tokens, crossings, declared_of(config, dump, of_tokens), tuple(runs), is_summary)


def main(argv: Sequence[str]) -> int:
    """Diagnoses the source, prints the page or the JSON, and returns the exit status."""
    given = parse_arguments(
        DiagnoseArguments, argv, prog="rljax diagnose", description=__doc__ or "", aliases={"--engine": "--rollout"}
    )
    source = given.source
    with caller_errors():
        found = diagnose(str(source), facts_of(source, given.tokens, given.run, given.trainer, given.rollout))
        text = finite_json(found)
        if given.json == Path("-"):
            print(text, end="")
        else:
            print(to_text(found), end="")
            if given.json is not None:
                given.json.write_text(text, encoding="utf-8")
    return 0 if found["cause"] == "healthy" else 1
