"""The policy of the toy tasks, and the texts on which it is fitted: worked solutions, direct answers, and calls.

The base model of the addition is fitted on direct answers, most of them slightly wrong on purpose, and on rare
scratchpads, most of them right. Reinforcement learning then finds that the scratchpad pays, so responses lengthen as
the reward rises. This is the response-length surge of arXiv 2602.01826 (figure 6), in minutes on a CPU. The direct
answers of the swaps are random orders. A small model must be unable to do the task without a scratchpad. Sorting
letters, for example, is too easy: it is learnt within 100 steps without longer responses. The calculator has rare
calls instead of scratchpads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljax.data import toy
from rljax.data.toy import DIGITS, EOS, LETTERS, PAD, PAIRS, SWAPS, add, orders
from rljax.policy.config import PolicyConfig


def toy_config(vocab_size: int = 16) -> PolicyConfig:
    """Returns the policy of the toy tasks: 124k parameters, 2 layers of width 64, 4 query heads and 2 key-value heads.

    The heads have size 32, the smallest that vLLM supports on a CPU. The last two of the ``vocab_size`` tokens are the
    end-of-sequence token and the padding token.
    """
    sizes = (vocab_size, 64, 192, 2, 4, 2, 32)  # in the order of SIZES
    more: dict[str, Any] = {"tie_word_embeddings": True, "initializer_range": 0.05, "max_position_embeddings": 1024}
    return PolicyConfig(*sizes, **more, eos_token_id=vocab_size - 2, pad_token_id=vocab_size - 1)


@dataclass(frozen=True)
class ToyBaseConfig:
    """The settings of the base model's fit."""

    # The share of scratchpads in the last ``settle_steps``. A smaller share delays the surge in RL.
    scratchpad_rate: float = 0.0125
    practice_rate: float = 0.5  # the share of scratchpads before that, high enough to learn them well
    wrong_direct_rate: float = 0.85  # the share of direct answers that are off by a small amount (addition only)
    # The share of scratchpads with one wrong digit sum, or pair of letters, used consistently.
    wrong_digit_rate: float = 0.1
    steps: int = 900  # the total number of AdamW steps
    settle_steps: int = 250  # the number of last steps with ``scratchpad_rate``
    batch_size: int = 128  # the number of sequences per step
    learning_rate: float = 2e-3  # the peak learning rate, with warm-up and cosine decay
    seed: int = 0  # the seed of the weights and the data


@dataclass(frozen=True)
class ToyTexts:
    """The texts of one task, with one token for each character."""

    alphabet: str  # the characters of the vocabulary
    prompt_tokens: int  # the length of a prompt
    response_tokens: int  # the longest response
    # A function that writes one demonstration with a given share of scratchpads.
    demonstrate: Callable[[np.random.Generator, ToyBaseConfig, float], str]

    def sample_batch(
        self, rng: np.random.Generator, config: ToyBaseConfig, *, settled: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Samples the tokens of b demonstrations, int32 [b, t] padded at the end, and their lengths, int32 [b].

        ``settled``: Whether the share of scratchpads is ``scratchpad_rate`` instead of ``practice_rate``.
        """
        rate = config.scratchpad_rate if settled else config.practice_rate
        width = self.prompt_tokens + self.response_tokens
        tokens = np.full((config.batch_size, width), self.alphabet.index(PAD), np.int32)
        lengths = np.zeros(config.batch_size, np.int32)
        for i in range(config.batch_size):
            ids = [self.alphabet.index(c) for c in self.demonstrate(rng, config, rate)]
            tokens[i, : len(ids)] = ids
            lengths[i] = len(ids)
        return tokens, lengths


def worked_addition(a: int, b: int, wrong_digit: int | None = None, offset: int = 1) -> str:
    """Writes the worked addition; the sum at place ``wrong_digit`` is off by ``offset`` and used as written."""
    steps, total, carry = [], 0, 0
    for place in range(DIGITS):
        x, y = a // 10**place % 10, b // 10**place % 10
        value = x + y + carry
        if place == wrong_digit:
            value = (value + offset) % 20
        steps.append(f"{x}+{y}+{carry}={value:02d},")
        total += value % 10 * 10**place
        carry = value // 10
    return ">" + "".join(steps) + str(total + carry * 10**DIGITS)


def worked_swaps(pairs: Sequence[str], wrong_place: int | None = None, offset: int = 1) -> str:
    """Writes the worked swaps; the pair at ``wrong_place`` is replaced by the one ``offset`` later in the list."""
    written = list(pairs)
    if wrong_place is not None:
        written[wrong_place] = PAIRS[(PAIRS.index(pairs[wrong_place]) + offset) % len(PAIRS)]
    return ">" + ",".join(f"{pair}:{order}" for pair, order in zip(written, orders(written), strict=True))


def _two_numbers(rng: np.random.Generator) -> list[int]:
    return [int(x) for x in rng.integers(10 ** (DIGITS - 1), 10**DIGITS, 2)]


def _direct_answer(rng: np.random.Generator, config: ToyBaseConfig, a: int, b: int) -> str:
    """Writes an addition with its direct answer, which is wrong by a small amount at ``wrong_direct_rate``."""
    error = int(rng.integers(1, 20)) * int(rng.choice([-1, 1])) if rng.random() < config.wrong_direct_rate else 0
    return f"{a}+{b}={a + b + error}{EOS}"


def _addition(rng: np.random.Generator, config: ToyBaseConfig, scratchpad_rate: float) -> str:
    a, b = _two_numbers(rng)
    if rng.random() < scratchpad_rate:
        wrong = int(rng.integers(DIGITS)) if rng.random() < config.wrong_digit_rate else None
        return f"{a}+{b}=" + worked_addition(a, b, wrong, int(rng.integers(1, 10))) + EOS
    return _direct_answer(rng, config, a, b)


def _calculation(rng: np.random.Generator, config: ToyBaseConfig, call_rate: float) -> str:
    a, b = _two_numbers(rng)
    if rng.random() < call_rate:
        wrong = int(rng.integers(1, 10)) if rng.random() < config.wrong_digit_rate else 0
        called = (a, b - wrong)
        return f"{a}+{b}=>{called[0]}+{called[1]}={EOS}{add(*called)}{sum(called)}{EOS}"
    return _direct_answer(rng, config, a, b)


def _swaps(rng: np.random.Generator, config: ToyBaseConfig, scratchpad_rate: float) -> str:
    """Writes a scratchpad or a direct answer, which is a random order: 1 in 120 is right by chance."""
    pairs = [PAIRS[int(x)] for x in rng.integers(0, len(PAIRS), SWAPS)]
    prompt = "".join(pairs) + "="
    if rng.random() < scratchpad_rate:
        wrong = int(rng.integers(SWAPS)) if rng.random() < config.wrong_digit_rate else None
        return prompt + worked_swaps(pairs, wrong, int(rng.integers(1, len(PAIRS)))) + EOS
    return prompt + "".join(rng.permutation(list(LETTERS))) + EOS


TASKS = {
    "addition": ToyTexts(toy.ALPHABET, toy.PROMPT_TOKENS, toy.MAX_RESPONSE_TOKENS, _addition),
    "swaps": ToyTexts(LETTERS + "=>:," + EOS + PAD, 2 * SWAPS + 1, toy.MAX_SWAPS_TOKENS, _swaps),
    "calculator": ToyTexts(toy.ALPHABET, toy.PROMPT_TOKENS, toy.MAX_CALCULATOR_TOKENS, _calculation),
}
