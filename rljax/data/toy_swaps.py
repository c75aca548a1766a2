"""The second toy task, without arithmetic: letters change places, and the answer is their last order.

The base model is fitted on direct answers, here random orders, and on rare scratchpads, most of them right. So
reinforcement learning lengthens the responses, as in the addition task. A small model must be unable to do the task
without a scratchpad. Sorting letters, for example, is too easy: it is learnt within 100 steps without longer responses.

    acbdaebc=cdeab$                               a direct answer ($ is the end-of-sequence token)
    acbdaebc=>ac:cbade,bd:cdabe,ae:cdeba,bc:bdeca$  a scratchpad: the two letters:the order after they changed places
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from rljax.data import toy
from rljax.data.toy import EOS, PAD, ToyBaseConfig, ToyProblems, final_part_reward, sample_batch

LETTERS = "abcde"
SWAPS = 4
ALPHABET = LETTERS + "=>:," + EOS + PAD
PROMPT_TOKENS = 2 * SWAPS + 1
MAX_RESPONSE_TOKENS = SWAPS * (len(LETTERS) + 4) + 3  # '>', each step with its comma, EOS, and some spare tokens
_PAIRS = [one + other for one, other in itertools.combinations(LETTERS, 2)]

build_tokenizer = functools.partial(toy.build_tokenizer, ALPHABET)
"""A function that makes a tokenizer with one token for each character of this alphabet."""


def swap_problems(split: str, size: int | None = None, seed: int = 0) -> ToyProblems:
    """Returns problems ``{"prompt": "acbdaebc=", "answer": "bdeca"}``; "train" has 9,800."""
    return ToyProblems(_swap_problem, len(_PAIRS) ** SWAPS, split, size, seed)


def _swap_problem(number: int) -> dict[str, str]:
    pairs = [_PAIRS[number // len(_PAIRS) ** place % len(_PAIRS)] for place in range(SWAPS)]
    return {"prompt": "".join(pairs) + "=", "answer": orders(pairs)[-1]}


def swaps_reward(problem: dict[str, str], response: str, truncated: bool) -> float:
    """Returns 1.0 if the order after the last colon, or the whole response without a colon, is right, else 0.0.

    The response is decoded text without special tokens. A truncated one has no final answer.
    """
    return final_part_reward(problem, response, truncated, ":")


def orders(pairs: Sequence[str]) -> list[str]:
    """Returns the order of the letters after each swap, starting from ``LETTERS``."""

    def swap(order: str, pair: str) -> str:
        return order.translate(str.maketrans(pair, pair[::-1]))

    return list(itertools.accumulate(pairs, swap, initial=LETTERS))[1:]


def scratchpad(pairs: Sequence[str], wrong_place: int | None = None, offset: int = 1) -> str:
    """Writes the worked swaps; the pair at ``wrong_place`` is replaced by the one ``offset`` later in the list."""
    written = list(pairs)
    if wrong_place is not None:
        written[wrong_place] = _PAIRS[(_PAIRS.index(pairs[wrong_place]) + offset) % len(_PAIRS)]
    return ">" + ",".join(f"{pair}:{order}" for pair, order in zip(written, orders(written), strict=True))


def _demonstration(rng: np.random.Generator, config: ToyBaseConfig, scratchpad_rate: float) -> str:
    """Writes a scratchpad or a direct answer, which is a random order: 1 in 120 is right by chance."""
    pairs = [_PAIRS[int(x)] for x in rng.integers(0, len(_PAIRS), SWAPS)]
    prompt = "".join(pairs) + "="
    if rng.random() < scratchpad_rate:
        wrong = int(rng.integers(SWAPS)) if rng.random() < config.wrong_digit_rate else None
        return prompt + scratchpad(pairs, wrong, int(rng.integers(1, len(_PAIRS)))) + EOS
    return prompt + "".join(rng.permutation(list(LETTERS))) + EOS


demonstration_batch = functools.partial(sample_batch, _demonstration, ALPHABET, PROMPT_TOKENS + MAX_RESPONSE_TOKENS)
"""A function ``demonstration_batch(rng, config, settled=...)`` that samples demonstrations of this task."""
