"""Makes the problems of the search for a subject with the package reasoning-gym.

    pip install '.[gym,train]'
    python experiments/subject_data.py runs/subject-data

OUT gets FAMILY.jsonl and FAMILY-held.jsonl for training and evaluation, and base-N.jsonl, on which base N is fitted.
The same version of the package makes the same files. experiments/subject_task.py describes the problems.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from subject_task import GYM_OPTIONS, short_problem

from rljax.data.gym_problems import make

HELD, TRAIN, BASE = 200, 5000, 20_000  # problems of one family in a file, repeats included
STRIDE = 10_000_000  # problem i of seed s is the library's problem of seed s + i, so seeds are far apart


def problems(family: str, options: Mapping[str, int], seed: int, size: int) -> dict[str, dict[str, str]]:
    """Returns different problems of a family by prompt, at most ``size``. ``options`` are the library's."""
    entries = make(family, dict(options), seed * STRIDE, size)
    short = [short_problem(family, entry["question"], entry["answer"]) for entry in entries]
    return {problem["prompt"]: problem for problem in short if problem}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for the files")
    parser.add_argument("--bases", type=int, default=3, help="the number of bases (3)")
    parser.add_argument("--min-terms", type=int, default=3, help="the least number of terms of a sum (3)")
    parser.add_argument("--max-digits", type=int, default=1, help="the largest number of digits of a term (1)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[dict[str, str]]] = {}
    chosen = {"chain_sum": {"min_terms": args.min_terms, "max_digits": args.max_digits}}
    for family, defaults in GYM_OPTIONS.items():
        options = {**defaults, **chosen.get(family, {})}
        held = problems(family, options, 1, HELD)
        files[f"{family}-held"] = list(held.values())
        for name, seed, size in [(family, 2, TRAIN), *((f"base-{n}", 10 + n, BASE) for n in range(args.bases))]:
            made = problems(family, options, seed, size)
            files.setdefault(name, []).extend(made[prompt] for prompt in made if prompt not in held)
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(text)
        print(f"{name}: {len(rows)} problems, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
