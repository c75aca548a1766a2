"""A check of the problems before a run: it counts them, and scores their right answers as if they were responses."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import wait
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from rljax.data.files import Problem, Tally, right_answers
from rljax.data.gym_problems import REWARD as _GYM
from rljax.data.prompts import prompt_key
from rljax.record.rows import text_table
from rljax.rewards.pool import RewardPool
from rljax.rewards.resolve import CHEAP, SHIPPED

LONGEST_S = 30.0
"""The longest time in which the right answers of one data set are scored (seconds)."""
TOLERATED = 0.01
"""The share of failing right answers above which the table has a warning. Clean sets of mathematics are below it."""

_EXAMPLES = 3
_TRIALS = 8
_CONTROLS = 64  # the most problems to which the right answer of another problem is given
_MARGIN = 0.05  # a share of the controls; a reward that prefers the own answers in fewer does not tell them apart
_SAME = 1e-6  # two rewards that differ by no more, relative to the larger one, are equal but for rounding
# Texts that mean "no answer is known", in lower case.
_PLACEHOLDERS = frozenset(
    ("n/a", "n.a.", "na", "#n/a", "<na>", "none", "nan", "null", "nil", "tbd", "unknown", "?", "-", "--", "[]", "{}")
)
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
    """The result of scoring right answers of a data set as responses to their own problems."""

    checked: int = 0  # the number of right answers scored
    failed: Sequence[Problem] = ()  # the problems whose right answer gets no reward
    reason: str = ""  # the reason why the answers could not be checked; "" if they were, or need not be
    placeholders: int = 0  # the number of all right answers that are placeholders, such as N/A
    control: str = ""  # a sentence if the reward cannot tell right answers from those of other problems; "" if it can


def check_answers(
    sets: Sequence[Sequence[Problem]], reward: str, *, count: int, seed: int, workers: int | None, timeout_s: float
) -> list[AnswerCheck]:
    """Scores ``count`` right answers of each data set as responses; ``seed`` chooses them.

    They are scored in worker processes, at least one, unless ``reward`` belongs to a toy task. ``timeout_s`` is the
    longest time for one answer (seconds). After ``LONGEST_S`` seconds no further answer of a set is scored.

    Raises:
      ValueError: There is no such reward.
    """
    found = [0 if reward.startswith(_GYM) else sum(map(is_placeholder, problems)) for problems in sets]
    if not count:
        return [AnswerCheck(placeholders=number) for number in found]
    workers = 0 if reward in CHEAP else None if workers is None else max(1, workers)
    with RewardPool(reward, workers, timeout_s) as pool:
        checks = [_check(pool, problems, reward, count, seed) for problems in sets]
    return [check._replace(placeholders=number) for check, number in zip(checks, found, strict=True)]


def is_placeholder(problem: Problem) -> bool:
    """Returns whether the right answer of a problem is only a text for an unknown answer, such as N/A."""
    answers = right_answers(problem)
    each = [answers] if isinstance(answers, str) else answers
    return all(answer.strip().lower() in _PLACEHOLDERS for answer in each)


def refuse_placeholders(problems: Sequence[Problem], reward: str, name: str) -> None:
    """Raises ValueError if ``reward`` is shipped and all right answers of data set ``name`` are placeholders."""
    if reward in SHIPPED and len(problems) and all(map(is_placeholder, problems)):
        raise ValueError(
            f"{name}: no row has a right answer; all {len(problems)} hold a placeholder, such as "
            f"{short(problems[0]['answer'])}: name the key of the answers as answer_key, or give a reward of your own"
        )


def _check(pool: RewardPool, problems: Sequence[Problem], reward: str, count: int, seed: int) -> AnswerCheck:
    """Checks one data set. A few answers are written in every way, the others in the way that got the most reward."""
    order = np.random.default_rng(seed).permutation(len(problems))[:count]
    chosen = [problem for problem in (problems[int(i)] for i in order) if problem["answer"]]
    if not chosen:
        return AnswerCheck(reason="no right answer is known")
    deadline = time.monotonic() + LONGEST_S
    try:
        ways = _WRITTEN.get(reward, _ANY_WAY)
        trials = {way: _score(pool, chosen[:_TRIALS], way, deadline) for way in ways}
        is_asked = any(map(any, trials.values()))
        tried = {way: _control(pool, chosen[:_TRIALS], trials[way], way, deadline) if is_asked else [] for way in ways}
        best = max(ways, key=lambda way: (_margin(tried[way])[0], sum(trials[way])))
        rewards = trials[best] + _score(pool, chosen[_TRIALS:], best, deadline)
        pairs = _control(pool, chosen[:_CONTROLS], rewards, best, deadline) if is_asked else []
    except RuntimeError as error:  # no worker can be started
        return AnswerCheck(reason=str(error))
    raised = pool.pop_metrics()["reward/errors"]
    if not rewards:
        return AnswerCheck(reason=f"no answer was scored within {LONGEST_S:g} s")
    control = _blindness(reward, pairs)
    floor = statistics.median(other for _, other in pairs) if pairs and not control else 0.0
    failed = [problem for problem, value in zip(chosen, rewards, strict=False) if value <= floor]
    if len(failed) == len(rewards) and reward not in SHIPPED:
        errors = f"; it failed {raised} times" if raised else ""
        return AnswerCheck(reason=f"{reward} rewards no right answer in any tried form{errors}")
    return AnswerCheck(len(rewards), failed, control=control)


def _control(
    pool: RewardPool, problems: Sequence[Problem], own: Sequence[float], way: str, deadline: float
) -> list[tuple[float, float]]:
    """Returns pairs of rewards for a problem: of its own right answer (``own``), and of another problem's answer.

    The other answers are the same answers in another order. So a reward that ignores the problem has equal means. A
    problem that would get an answer equal to its own has no pair.
    """
    texts = [" ".join(problem["answer"].split()).lower() for problem in problems[: len(own)]]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    shift = max([*Counter(texts).values(), len(texts) // 2])
    turned = [(i, order[(place + shift) % len(order)]) for place, i in enumerate(order)]
    chosen = [(i, j) for i, j in turned if texts[i] != texts[j]]
    answers = [problems[j]["answer"] for _, j in chosen]
    others = _score(pool, [problems[i] for i, _ in chosen], way, deadline, answers)
    return [(own[i], other) for (i, _), other in zip(chosen, others, strict=False)]


def _margin(pairs: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Returns the number of pairs whose own answer wins minus those it loses, and the number of pairs without a tie."""
    signs = [1 if a > b else -1 for a, b in pairs if abs(a - b) > _SAME * max(abs(a), abs(b))]
    return sum(signs), len(signs)


def _blindness(reward: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Returns a sentence about a reward that hardly prefers right answers to answers of other problems, or "".

    A reward that never prefers the other answer is blind only if it prefers the own answer in very few pairs. Otherwise
    the margin is compared with its spread by chance, the square root of the number of pairs without a tie.
    """
    margin, differing = _margin(pairs)
    chance = 2.0 * math.sqrt(differing) if margin < differing else 0.0
    if not pairs or margin > max(_MARGIN * len(pairs), chance):
        return ""
    own, other = (f"{statistics.fmean(values):.3g}" for values in zip(*pairs, strict=True))
    return (
        f"{reward} gives right answers {own} on average and the right answers of other problems {other}: it does not "
        "tell them apart, which is right only for a reward that needs no answer"
    )


def _score(
    pool: RewardPool, problems: Sequence[Problem], way: str, deadline: float, answers: Sequence[str] | None = None
) -> list[float]:
    """Returns the rewards of ``answers`` to problems, up to the first one that misses the deadline.

    ``answers`` None: the right answers of the problems.
    """
    given = [problem["answer"] for problem in problems] if answers is None else answers
    pairs = zip(problems, given, strict=False)
    futures = [pool.submit(problem, way.format(answer), False) for problem, answer in pairs]
    rewards = []
    for future in tqdm(futures, desc="checking answers", unit="answer", delay=2.0, leave=False, disable=None):
        if not wait([future], deadline - time.monotonic()).done:
            break
        rewards.append(future.result())
    return rewards


def table(tallies: Sequence[tuple[Tally, AnswerCheck]], limit: int | None) -> str:
    """Returns the counts of data sets as a short table, with up to three failing right answers of each.

    ``limit`` is the longest prompt (tokens); None: lengths were not counted.
    """
    over = "over length" if limit is None else f"over {limit} tokens"
    lines = [["data", "rows", "no answer", over, "repeated prompts", "answers that fail"]]
    notes: list[str] = []
    for tally, check in tallies:
        distinct = {prompt_key(problem["prompt"]) for problem in tally.problems}
        repeats = len(tally.problems) - len(distinct) if tally.repeats is None else tally.repeats
        too_long = "-" if tally.too_long is None else tally.too_long
        fails = f"{len(check.failed)} of {check.checked}" if check.checked else "not checked"
        lines.append([str(cell) for cell in (tally.name, tally.rows, tally.unanswered, too_long, repeats, fails)])
        if check.placeholders:
            shown = short(next(problem["answer"] for problem in tally.problems if is_placeholder(problem)))
            notes.append(
                f"{tally.name}: {check.placeholders} of {len(tally.problems)} right answers are placeholders, such as "
                f"{shown}, and are used as they are"
            )
        if check.reason:
            notes.append(f"{tally.name}: the right answers could not be checked: {check.reason}")
        notes += [
            f"fails: {short(problem['answer'])} to {short(problem['prompt'], 60)}"
            for problem in check.failed[:_EXAMPLES]
        ]
        if tally.unread:
            notes.append(f"keys not read: {', '.join(key for key, _ in tally.unread.most_common(12))}")
    warnings = [f"warning: {tally.name}: {check.control}" for tally, check in tallies if check.control]
    if any(len(check.failed) > TOLERATED * check.checked for _, check in tallies):
        warnings.insert(0, "warning: right answers get no reward when they are given as the response")
    return "\n".join([*warnings, text_table(lines), *notes])


def short(text: object, longest: int = 40) -> str:
    """Returns a text in quotes and in one line. The middle of a text over ``longest`` characters is left out."""
    line = repr(" ".join(str(text).split()))
    return line if len(line) <= longest else f"{line[: longest // 2]} ... {line[-longest // 2 :]}"
