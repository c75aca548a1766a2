"""A check of the problems before a run: the table of their counts, and right answers scored as responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from rljax.data.files import Problem, Tally
from rljax.data.prompts import distinct_prompts
from rljax.rewards.pool import RewardPool
from rljax.rewards.resolve import CHEAP, SHIPPED

LONGEST_S = 30.0
"""The longest time in which the right answers of one data set are scored (seconds)."""
TOLERATED = 0.01
"""The share of failing right answers above which the table is a warning. Clean sets of mathematics are below it."""

_EXAMPLES = 3
_TRIALS = 8
# The ways to write an answer as a response. A reward of the user's own may read any of them.
_WRITTEN = {
    "math": ("Answer: {}",),
    "addition": ("{}",),
    "swaps": ("{}",),
    "reasoning_gym": ("<answer>{}</answer>",),
    "reasoning_gym_library": ("<answer>{}</answer>",),
}
_ANY_WAY = ("{}", "\\boxed{{{}}}", "Answer: {}", "<answer>{}</answer>", "#### {}")


class AnswerCheck(NamedTuple):
    """The right answers of a data set, scored as responses to their own problems."""

    checked: int = 0  # the number of right answers scored
    failed: Sequence[Problem] = ()  # the problems whose right answer gets no reward
    reason: str = ""  # the reason why the answers could not be checked; "" if they were, or need not be


def check_answers(
    sets: Sequence[Sequence[Problem]],
    reward: str,
    *,
    count: int,
    seed: int,
    workers: int | None,
    timeout_s: float,
) -> list[AnswerCheck]:
    """Scores ``count`` right answers of each data set as responses; ``seed`` chooses them.

    They are scored in worker processes, at least one, unless the reward is one of the toy tasks. ``timeout_s`` is the
    longest time for one answer (seconds). After ``LONGEST_S`` seconds no further answer is scored.

    Raises:
      ValueError: There is no such reward.
    """
    if not count:
        return [AnswerCheck() for _ in sets]
    deadline = time.monotonic() + LONGEST_S
    workers = 0 if reward in CHEAP else None if workers is None else max(1, workers)
    with RewardPool(reward, workers, timeout_s) as pool:
        return [_check(pool, problems, reward, count, seed, deadline) for problems in sets]


def _check(
    pool: RewardPool, problems: Sequence[Problem], reward: str, count: int, seed: int, deadline: float
) -> AnswerCheck:
    """Checks one data set: a few answers in every way of writing, and the rest in the way with the most rewards."""
    order = np.random.default_rng(seed).permutation(len(problems))[:count]
    chosen = [problem for problem in (problems[int(i)] for i in order) if problem["answer"]]
    if not chosen:
        return AnswerCheck(reason="no right answer is known")
    try:
        ways = _WRITTEN.get(reward, _ANY_WAY)
        trials = {way: _score(pool, chosen[:_TRIALS], way, deadline) for way in ways}
        best = max(ways, key=lambda way: sum(value > 0.0 for value in trials[way]))
        rewards = trials[best] + _score(pool, chosen[_TRIALS:], best, deadline)
    except RuntimeError as error:  # no worker can be started
        return AnswerCheck(reason=str(error))
    raised = pool.pop_metrics()["reward/errors"]
    if not rewards:
        return AnswerCheck(reason=f"no answer was scored within {LONGEST_S:g} s")
    failed = [problem for problem, value in zip(chosen, rewards, strict=False) if value <= 0.0]
    if len(failed) == len(rewards) and reward not in SHIPPED:
        errors = f"; it failed {raised} times" if raised else ""
        return AnswerCheck(reason=f"{reward} rewards no right answer in any tried form{errors}")
    return AnswerCheck(len(rewards), failed)


def _score(pool: RewardPool, problems: Sequence[Problem], way: str, deadline: float) -> list[float]:
    """Returns the rewards of the right answers of problems, up to the first one that misses the deadline."""
    futures = [pool.submit(problem, way.format(problem["answer"]), False) for problem in problems]
    rewards = []
    for future in tqdm(futures, desc="checking answers", unit="answer", delay=2.0, leave=False, disable=None):
        if not wait([future], deadline - time.monotonic()).done:
            break
        rewards.append(future.result())
    return rewards


def table(tallies: Sequence[tuple[Tally, AnswerCheck]], limit: int | None) -> str:
    """Returns the counts of data sets as a short table, with three of the right answers that fail.

    ``limit`` is the longest prompt (tokens); None: lengths were not counted.
    """
    over = "over length" if limit is None else f"over {limit} tokens"
    lines = [["data", "rows", "no answer", over, "repeated prompts", "answers that fail"]]
    notes: list[str] = []
    for tally, check in tallies:
        repeats = len(tally.problems) - distinct_prompts(tally.problems) if tally.repeats is None else tally.repeats
        too_long = "-" if tally.too_long is None else tally.too_long
        fails = f"{len(check.failed)} of {check.checked}" if check.checked else "not checked"
        lines.append([str(cell) for cell in (tally.name, tally.rows, tally.unanswered, too_long, repeats, fails)])
        if check.reason:
            notes.append(f"{tally.name}: the right answers could not be checked: {check.reason}")
        notes += [
            f"fails: {short(problem['answer'])} to {short(problem['prompt'], 60)}"
            for problem in check.failed[:_EXAMPLES]
        ]
        if tally.unread:
            notes.append(f"keys not read: {', '.join(key for key, _ in tally.unread.most_common(12))}")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        rows.append("  ".join([first.ljust(widths[0]), *cells]))
    if any(len(check.failed) > TOLERATED * check.checked for _, check in tallies):
        rows.insert(0, "warning: right answers get no reward when they are given as the response")
    return "\n".join([*rows, *notes])


def short(text: object, longest: int = 40) -> str:
    """Returns a text in quotes and in one line. The middle of a text over ``longest`` characters is left out."""
    line = repr(" ".join(str(text).split()))
    return line if len(line) <= longest else f"{line[: longest // 2]} ... {line[-longest // 2 :]}"
