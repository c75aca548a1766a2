"""The toy tasks, which need no file: their problems, tokenizers and rewards.

The first one is three-digit addition, which a model may answer at once or work out digit by digit. The second one has
no arithmetic: letters are swapped, and the answer is their final order. The third one is addition with a tool that
adds, the environment ``rljax.rollout.episodes.calculator:Calculator``. ``tools/toy_texts.py`` has the texts on which
their base models are fitted.

    123+456=579$                                  addition: a direct answer ($ is the end-of-sequence token)
    123+456=>3+6+0=09,2+5+0=07,1+4+0=05,579$      a scratchpad: a+b+carry=two digits, units first, then the answer
    acbdaebc=>ac:cbade,bd:cdabe,ae:cdeba,bc:bdeca$  swaps: the two letters:the order after they changed places
    123+456=>123+456=$579,579$                    a call, which ends with its turn; the tool writes "579,"
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers

from rljax.data.tokenizer import Tokenizer

DIGITS = 3
PAD, EOS = "_", "$"
ALPHABET = "0123456789+=,>" + EOS + PAD
PROMPT_TOKENS = 2 * DIGITS + 2
MAX_RESPONSE_TOKENS = 10 * DIGITS + 6  # '>', 9 for each digit, an answer of DIGITS + 1, EOS, and some spare tokens
_CALL_TOKENS = 2 * DIGITS + 4  # '>', two numbers with '+' and '=', EOS
_RESULT_TOKENS = DIGITS + 2  # a sum and a comma
MAX_CALCULATOR_TOKENS = 2 * (_CALL_TOKENS + _RESULT_TOKENS) + DIGITS + 2  # two calls and an answer
LETTERS = "abcde"
SWAPS = 4
MAX_SWAPS_TOKENS = SWAPS * (len(LETTERS) + 4) + 3  # '>', each step with its comma, EOS, and some spare tokens
PAIRS = [one + other for one, other in itertools.combinations(LETTERS, 2)]
EVAL_PROBLEMS = 200  # size of the eval split of a toy task
_TRAIN_PROBLEMS = 20_000
_LOW, _HIGH = 10 ** (DIGITS - 1), 10**DIGITS


def build_tokenizer(alphabet: str = ALPHABET) -> Tokenizer:
    """Makes a tokenizer with one token for each character of ``alphabet``, which includes EOS and PAD."""
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(tokenizer, {"eos_token": EOS, "pad_token": PAD})


def _problems(
    make: Callable[[int], dict[str, str]], count: int, split: str, size: int | None, seed: int
) -> list[dict[str, str]]:
    """Returns ``size`` problems of a split, "train" or "eval"; None: all. The splits of one seed share no problem.

    ``make`` returns the problem of a number in 0 .. ``count`` - 1. The split "eval" has ``EVAL_PROBLEMS`` problems.

    Raises:
      ValueError: The split is unknown, or has fewer problems.
    """
    order = np.random.default_rng(seed).permutation(count)
    splits = {"eval": order[:EVAL_PROBLEMS], "train": order[EVAL_PROBLEMS:]}
    if split not in splits:
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    numbers = splits[split]
    if size is not None and size > len(numbers):
        raise ValueError(f"the {split} split has {len(numbers)} problems, got size = {size}")
    return [make(int(number)) for number in numbers[:size]]


def addition_problems(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, str]]:
    """Returns problems ``{"prompt": "123+456=", "answer": "579"}``; "train" has 20,000 by default."""
    if size is None and split == "train":
        size = _TRAIN_PROBLEMS
    return _problems(_addition_problem, (_HIGH - _LOW) ** 2, split, size, seed)


def _addition_problem(number: int) -> dict[str, str]:
    a, b = (_LOW + part for part in divmod(number, _HIGH - _LOW))
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def swap_problems(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, str]]:
    """Returns problems ``{"prompt": "acbdaebc=", "answer": "bdeca"}``; "train" has 9,800."""
    return _problems(_swap_problem, len(PAIRS) ** SWAPS, split, size, seed)


def _swap_problem(number: int) -> dict[str, str]:
    pairs = [PAIRS[number // len(PAIRS) ** place % len(PAIRS)] for place in range(SWAPS)]
    return {"prompt": "".join(pairs) + "=", "answer": orders(pairs)[-1]}


def orders(pairs: Sequence[str]) -> list[str]:
    """Returns the order of the letters after each swap, starting from ``LETTERS``."""

    def swap(order: str, pair: str) -> str:
        return order.translate(str.maketrans(pair, pair[::-1]))

    return list(itertools.accumulate(pairs, swap, initial=LETTERS))[1:]


def add(*numbers: int) -> str:
    """Returns the answer of the calculator's tool to a call: the sum and a comma."""
    return f"{sum(numbers)},"


def addition_reward(problem: dict[str, str], response: str, truncated: bool) -> float:
    """Returns 1.0 if the number after the last comma, or the whole response without a comma, is right, else 0.0.

    The response is decoded text without special tokens. A truncated one has no final answer.
    """
    return _final_part_reward(problem, response, truncated, ",")


def swaps_reward(problem: dict[str, str], response: str, truncated: bool) -> float:
    """Returns 1.0 if the order of the letters after the last colon of the response is right, else 0.0."""
    return _final_part_reward(problem, response, truncated, ":")


def _final_part_reward(problem: dict[str, str], response: str, truncated: bool, separator: str) -> float:
    return float(not truncated and response.rsplit(separator, 1)[-1] == problem["answer"])
