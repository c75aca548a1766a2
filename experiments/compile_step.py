"""Compiles a run's step for a machine that is not here, and reports what the step takes and does.

    .venv-compile/bin/python experiments/compile_step.py CONFIG.yaml h100:1x8 [--json FILE] [--a.b value ...]

The report is that of ``--dry-run --compile`` with the counted work and the modelled times of docs/compile.md beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from compile.work import describe_work, work_report

from rljax.errors import caller_errors, run_cli
from rljax.plan.compile import compile_step, describe, parse_machine, report
from rljax.run.config import Config
from rljax.run.config_file import load_config


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="configuration of a run")
    parser.add_argument("machine", help="machine to compile for, as in --compile")
    parser.add_argument("--json", type=Path, default=None, help="JSON file for the report")
    options, words = parser.parse_known_args(argv)
    config = load_config(Config, [options.config, *words], prog=parser.prog, description="")
    with caller_errors():
        compiled = compile_step(config, parse_machine(options.machine))
        found = report(compiled) | work_report(compiled)
    print(f"{describe(found)}\n{describe_work(found)}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
