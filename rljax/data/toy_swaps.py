"""The second toy task, without arithmetic: letters change places, and the order they end in is asked for.

Built as the addition task is (rljax/data/toy.py): a base fitted on direct answers, here random orders, and on rare
scratchpads, most of them right, so that reinforcement learning lengthens the responses. The task must be one that a
small model cannot do without a scratchpad; sorting letters, for example, it learns within 100 steps, and its responses
stay short.

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
MAX_RESPONSE_TOKENS = SWAPS * (len(LETTERS) + 4) + 3  # '>', a step with its comma, EOS, and a little to spare
_PAIRS = [one + other for one, other in itertools.combinations(LETTERS, 2)]


"""The policy of the addition task, over this alphabet."""
build_tokenizer = functools.partial(toy.build_tokenizer, ALPHABET)
"""One token a character of this alphabet."""


def swap_problems(split: str, size: int | None = None, seed: int = 0) -> ToyProblems:
    """Problems ``{"prompt": "acbdaebc=", "answer": "bdeca"}``; "train" has 9,800."""
    return ToyProblems(_swap_problem, len(_PAIRS) ** SWAPS, split, size, seed)


def _swap_problem(number: int) -> dict[str, str]:
    pairs = [_PAIRS[number // len(_PAIRS) ** place % len(_PAIRS)] for place in range(SWAPS)]
    return {"prompt": "".join(pairs) + "=", "answer": orders(pairs)[-1]}


def swaps_reward(problem: dict[str, str], response: str, truncated: bool) -> float:
    """1.0 when the order after the last colon of a response, or all of it, is the right one, else 0.0.

    The arguments are those of ``rljax.data.toy.addition_reward``.
    """
    return final_part_reward(problem, response, truncated, ":")


def orders(pairs: Sequence[str]) -> list[str]:
    """The order of the letters after each pair has changed places, starting from ``LETTERS``."""

    def swap(order: str, pair: str) -> str:
        return order.translate(str.maketrans(pair, pair[::-1]))

    return list(itertools.accumulate(pairs, swap, initial=LETTERS))[1:]


def scratchpad(pairs: Sequence[str], wrong_place: int | None = None, offset: int = 1) -> str:
    """The worked swaps; at ``wrong_place`` the pair ``offset`` further on in the list of pairs is written instead."""
    written = list(pairs)
    if wrong_place is not None:
        written[wrong_place] = _PAIRS[(_PAIRS.index(pairs[wrong_place]) + offset) % len(_PAIRS)]
    return ">" + ",".join(f"{pair}:{order}" for pair, order in zip(written, orders(written), strict=True))


def _demonstration(rng: np.random.Generator, config: ToyBaseConfig, scratchpad_rate: float) -> str:
    """A direct answer is a random order: right once in 120 times, whatever ``wrong_direct_rate`` says."""
    pairs = [_PAIRS[int(x)] for x in rng.integers(0, len(_PAIRS), SWAPS)]
    prompt = "".join(pairs) + "="
    if rng.random() < scratchpad_rate:
        wrong = int(rng.integers(SWAPS)) if rng.random() < config.wrong_digit_rate else None
        return prompt + scratchpad(pairs, wrong, int(rng.integers(1, len(_PAIRS)))) + EOS
    return prompt + "".join(rng.permutation(list(LETTERS))) + EOS


demonstration_batch = functools.partial(sample_batch, _demonstration, ALPHABET, PROMPT_TOKENS + MAX_RESPONSE_TOKENS)
"""``demonstration_batch(rng, config, settled=...)``: as ``rljax.data.toy.sample_batch`` gives it."""
