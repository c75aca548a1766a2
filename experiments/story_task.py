"""A task that a real model of 135M parameters can learn: a text about a subject in at least some number of words.

    python experiments/story_task.py runs/stories.jsonl

The reward is the share of these words that a text has, and 0 for a text that the length limit cuts off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path
from typing import Any

SUBJECTS = (
    *("the sea", "a cat", "bread", "the moon", "trains", "winter", "a garden", "music", "rivers", "birds", "a bicycle"),
    *("tea", "a lighthouse", "rain", "an old house", "the desert", "a clock", "apples", "a long road", "snow", "bees"),
    *("a market", "the forest", "a letter"),
)
LEAST = range(20, 61, 5)  # the least numbers of words


def problems() -> list[dict[str, str]]:
    """Returns every subject with every least number of words."""
    return [
        {"prompt": f"Write about {subject} in at least {least} words.", "answer": str(least)}
        for subject, least in itertools.product(SUBJECTS, LEAST)
    ]


def reward(problem: dict[str, Any], response: str, truncated: bool) -> float:
    """Returns the share of the words that the problem asks for, at most 1.0; 0.0 if the limit cut the response off."""
    words = len(re.findall(r"[A-Za-z']+", response))
    return 0.0 if truncated else min(1.0, words / int(problem["answer"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file for the problems")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(problem) + "\n" for problem in problems()), encoding="utf-8")


if __name__ == "__main__":
    main()
