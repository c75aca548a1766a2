"""Makes and judges six runs whose causes and seeds did not influence the limits of ``rljax diagnose``.

    python -m experiments.diagnose_check runs/check benchmarks/diagnose_check.json

Seeds, settings and strengths of the causes differ from those of ``planted_logs.py``. An existing run is not made again.
The JSON has the cause found in the log with its last token dump, in the log alone and in the dump alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from experiments.planted_logs import Plant, run
from rljax.commands import diagnose
from rljax.diagnose.page import diagnose as diagnosis

STEPS = 30
SETTINGS = f"--run.steps {STEPS} --rollout.dump-every {STEPS // 2} --data.batch-size 10 --rollout.group-size 6"
CHECKS: dict[str, tuple[str, int, Plant, str]] = {
    "four versions old": ("staleness", 21, Plant(), "--rollout.inject.staleness 4"),
    "sampled at temperature 1.2": ("temperature", 22, Plant(temperature=1.2), ""),
    "a cache in fp8_e5m2": ("eight_bits", 23, Plant(), "--rollout.kv-cache-dtype fp8_e5m2"),
    "layer 0 never loaded again": ("other_weights", 24, Plant(stale_layer=0), ""),
    "one token of 500 wrong": ("extreme_tokens", 25, Plant(extreme_share=0.002), ""),
    "nothing": ("healthy", 26, Plant(), "--optimizer.learning-rate 5e-5"),
}
"""The cause that a diagnosis must name, the seed, the plant and the options, by the name of what was planted."""


def told(source: Path, tokens: Path | None = None) -> dict[str, str | None]:
    """Returns the cause and the confidence of a diagnosis."""
    found = diagnosis(source.name, diagnose.facts_of(source, tokens))
    return {"cause": found["cause"], "confidence": found["confidence"]}


def main() -> None:
    """Makes the missing runs, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("table", type=Path)
    arguments = parser.parse_args()
    rows = []
    for number, (planted, (cause, seed, plant, options)) in enumerate(CHECKS.items()):
        where = arguments.out / str(number)
        tokens = where / f"rollouts/step_{STEPS:06d}.parquet"
        if not tokens.is_file():
            shutil.rmtree(where, ignore_errors=True)
            run(planted, plant, f"{SETTINGS} {options}", where, seed)
        log = arguments.out / f"{number}.jsonl"
        shutil.copy(where / "metrics.jsonl", log)
        said = {"both": told(log, tokens), "log": told(log), "dump": told(tokens)}
        rows.append({"planted": planted, "cause": cause, "seed": seed} | said)
        print(json.dumps(rows[-1]), flush=True)
    arguments.table.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
