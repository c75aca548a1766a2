"""The first toy task: three-digit addition. A model may answer at once or work the sum out digit by digit.

The base model is fitted on direct answers, most of them slightly wrong on purpose, and on rare scratchpads, most of
them right. Reinforcement learning then finds that the scratchpad pays, so responses lengthen as the reward rises. This
is the response-length surge of arXiv 2602.01826 (figure 6), in minutes on a CPU.

    123+456=579$                             a direct answer ($ is the end-of-sequence token)
    123+456=>3+6+0=09,2+5+0=07,1+4+0=05,579$  a scratchpad: a+b+carry=two digits, units first, then the answer
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from rljax.data.tokenizer import Tokenizer

DIGITS = 3
PAD, EOS = "_", "$"
ALPHABET = "0123456789+=,>" + EOS + PAD
PROMPT_TOKENS = 2 * DIGITS + 2
MAX_RESPONSE_TOKENS = 10 * DIGITS + 6  # '>', 9 for each digit, an answer of DIGITS + 1, EOS, and some spare tokens
EVAL_PROBLEMS = 200  # size of the eval split of a toy task
_TRAIN_PROBLEMS = 20_000
_LOW, _HIGH = 10 ** (DIGITS - 1), 10**DIGITS


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


def build_tokenizer(alphabet: str = ALPHABET) -> Tokenizer:
    """Makes a tokenizer with one token for each character of ``alphabet``, which includes EOS and PAD."""
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(tokenizer, {"eos_token": EOS, "pad_token": PAD})


class ToyProblems(Sequence[dict[str, str]]):
    """A fixed list of numbered problems of a toy task; the splits of one seed share no problem."""

    def __init__(self, make: Callable[[int], dict[str, str]], count: int, split: str, size: int | None, seed: int):
        """Chooses ``size`` problems of a split, "train" or "eval"; None means the whole split.

        ``make`` returns the problem of a number in 0 .. ``count`` - 1. The split "eval" has ``EVAL_PROBLEMS`` problems.

        Raises:
          ValueError: The split is unknown, or has fewer problems.
        """
        order = np.random.default_rng(seed).permutation(count)
        splits = {"eval": order[:EVAL_PROBLEMS], "train": order[EVAL_PROBLEMS:]}
        if split not in splits:
            raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
        if size is not None and size > len(splits[split]):
            raise ValueError(f"the {split} split has {len(splits[split])} problems, got size = {size}")
        self._numbers, self._make = splits[split][:size], make

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._make(int(self._numbers[index]))


def addition_problems(split: str, size: int | None = None, seed: int = 0) -> ToyProblems:
    """Returns problems ``{"prompt": "123+456=", "answer": "579"}``; "train" has 20,000 by default."""
    if size is None and split == "train":
        size = _TRAIN_PROBLEMS
    return ToyProblems(_addition_problem, (_HIGH - _LOW) ** 2, split, size, seed)


def _addition_problem(number: int) -> dict[str, str]:
    a, b = (_LOW + part for part in divmod(number, _HIGH - _LOW))
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def addition_reward(problem: dict[str, str], response: str, truncated: bool) -> float:
    """Returns 1.0 if the number after the last comma, or the whole response without a comma, is right, else 0.0.

    The response is decoded text without special tokens. A truncated one has no final answer.
    """
    return final_part_reward(problem, response, truncated, ",")


def final_part_reward(problem: dict[str, str], response: str, truncated: bool, separator: str) -> float:
    """Returns 1.0 if the text after the last separator, or the whole response without one, is right, else 0.0."""
    return float(not truncated and response.rsplit(separator, 1)[-1] == problem["answer"])


def scratchpad(a: int, b: int, wrong_digit: int | None = None, offset: int = 1) -> str:
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


def _demonstration(rng: np.random.Generator, config: ToyBaseConfig, scratchpad_rate: float) -> str:
    a, b = (int(x) for x in rng.integers(_LOW, _HIGH, 2))
    if rng.random() < scratchpad_rate:
        wrong = int(rng.integers(DIGITS)) if rng.random() < config.wrong_digit_rate else None
        return f"{a}+{b}=" + scratchpad(a, b, wrong, int(rng.integers(1, 10))) + EOS
    return direct_answer(rng, config, a, b)


def direct_answer(rng: np.random.Generator, config: ToyBaseConfig, a: int, b: int) -> str:
    """Writes an addition with its direct answer, which is wrong by a small amount at ``wrong_direct_rate``."""
    error = int(rng.integers(1, 20)) * int(rng.choice([-1, 1])) if rng.random() < config.wrong_direct_rate else 0
    return f"{a}+{b}={a + b + error}{EOS}"


def sample_batch(
    demonstrate: Callable[[np.random.Generator, ToyBaseConfig, float], str],
    alphabet: str,
    width: int,
    rng: np.random.Generator,
    config: ToyBaseConfig,
    *,
    settled: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Samples a batch of b demonstrations with one token for each character.

    Args:
      demonstrate: A function that writes one demonstration with a given share of scratchpads.
      alphabet: The characters of the vocabulary.
      width: The length t of a padded sequence, in tokens.
      settled: Whether the share of scratchpads is ``scratchpad_rate`` instead of ``practice_rate``.

    Returns:
      The tokens, int32 [b, t] padded at the end, and the lengths, int32 [b].
    """
    rate = config.scratchpad_rate if settled else config.practice_rate
    tokens = np.full((config.batch_size, width), alphabet.index(PAD), np.int32)
    lengths = np.zeros(config.batch_size, np.int32)
    for i in range(config.batch_size):
        ids = [alphabet.index(c) for c in demonstrate(rng, config, rate)]
        tokens[i, : len(ids)] = ids
        lengths[i] = len(ids)
    return tokens, lengths


demonstration_batch = functools.partial(sample_batch, _demonstration, ALPHABET, PROMPT_TOKENS + MAX_RESPONSE_TOKENS)
"""A function ``demonstration_batch(rng, config, settled=...)`` that samples demonstrations of this task."""
