"""Two families of reasoning-gym for a character-level policy of about 1M parameters: problems and written solutions.

The problems are those of the library's ``chain_sum`` and ``spell_backward``, with a shorter prompt. A solution is a
direct answer or a worked one. The reward is the toy task's: the text after the last comma must be the right answer.

    84-97+45=32$                          a direct answer ($ is the end-of-sequence token)
    84-97+45=>84-97=-13,-13+45=32,32$      worked: one operation at a time, then the answer
    stone:enots$                          a direct answer
    stone:>0s1t2o3n4e,enots$               worked: each letter with its place, then the answer

Most direct answers of the base's text are wrong on purpose, so that worked solutions pay.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rljax.data.toy import EOS, PAD

ALPHABET = string.digits + string.ascii_lowercase + "+-=>,:" + EOS + PAD
MAX_PROMPT_TOKENS = 12  # four terms of two digits, three operators and "="
MAX_RESPONSE_TOKENS = 40  # four worked terms take at most 36 tokens, ten letters 33, EOS included
GYM_OPTIONS: Mapping[str, Mapping[str, int]] = {
    "chain_sum": {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    "spell_backward": {"min_word_len": 4, "max_word_len": 10},
}
"""The settings of each family in the library."""


@dataclass(frozen=True)
class Mistakes:
    """The shares of solutions in the base's text that are wrong, and that are worked.

    Attributes:
      worked: The share of worked solutions.
      wrong_direct: The share of direct answers that are wrong.
      wrong_step: The share of worked solutions with one wrong step, which the rest uses as written.
      wrong_letters: The share of a word's letters in a wrong direct answer.
    """

    worked: float
    wrong_direct: float
    wrong_step: float
    wrong_letters: float = 1.0


def short_problem(family: str, question: str, answer: str) -> dict[str, str] | None:
    """Returns a problem with a short prompt; None if it has characters that ``ALPHABET`` has not.

    Args:
      family: The name of the family.
      question: The library's question.
      answer: The library's answer.
    """
    text = question.rpartition(": ")[2].replace(" ", "")
    prompt = text if family == "chain_sum" else text.lower() + ":"
    problem = {"prompt": prompt, "answer": answer.lower()}
    return problem if set(prompt + answer.lower()) <= set(ALPHABET) else None


def worked_sum(expression: str, wrong: int | None = None, offset: int = 1) -> str:
    """Writes a sum one operation at a time; the result of step ``wrong`` is off by ``offset`` and used as written."""
    first, *rest = re.findall(r"[+-]?\d+", expression)
    total, steps = int(first), []
    for place, term in enumerate(rest):
        result = total + int(term) + (offset if place == wrong else 0)
        steps.append(f"{total}{term}={result},")
        total = result
    return ">" + "".join(steps) + str(total)


def worked_word(word: str, wrong: int | None = None, offset: int = 1) -> str:
    """Writes a word with places, then backward; letter ``wrong`` becomes the one ``offset`` later in the word."""
    letters = list(word)
    if wrong is not None:
        letters[wrong] = word[(wrong + offset) % len(word)]
    return ">" + "".join(f"{place}{letter}" for place, letter in enumerate(letters)) + "," + "".join(letters[::-1])


def wrong_sum(rng: np.random.Generator, answer: str, _: float) -> str:
    """Returns a number that is off by 1 to 19."""
    return str(int(answer) + int(rng.integers(1, 20)) * int(rng.choice([-1, 1])))


def wrong_word(rng: np.random.Generator, answer: str, share: float) -> str:
    """Returns this share of the letters, in a random order."""
    return "".join(rng.permutation(list(answer))[: int(len(answer) * share)])


_WRITERS: Mapping[str, tuple[Callable[..., str], Callable[[np.random.Generator, str, float], str]]] = {
    "=": (worked_sum, wrong_sum),
    ":": (worked_word, wrong_word),
}


def solution(rng: np.random.Generator, problem: Mapping[str, str], mistakes: Mistakes) -> str:
    """Writes one solution of a problem, without EOS. The last character of the prompt tells the family."""
    text, mark = problem["prompt"][:-1], problem["prompt"][-1]
    worked, wrong_answer = _WRITERS[mark]
    if rng.random() >= mistakes.worked:
        wrong = rng.random() < mistakes.wrong_direct
        return wrong_answer(rng, problem["answer"], mistakes.wrong_letters) if wrong else problem["answer"]
    steps = len(re.findall(r"\d+", text)) - 1 if mark == "=" else len(text)
    place = int(rng.integers(steps)) if rng.random() < mistakes.wrong_step else None
    return worked(text, place, int(rng.integers(1, 10)))
