"""The third toy task: three-digit addition with a tool that adds, which the policy may call or not.

The base model is fitted on direct answers, most of them slightly wrong on purpose, and on rare calls. Reinforcement
learning then finds that the call pays. The environment is ``rljax.rollout.episodes.calculator:Calculator``.

    123+456=579$                a direct answer ($ is the end-of-sequence token)
    123+456=>123+456=$579,579$  a call, which ends with its turn; the tool writes "579,", and the second turn is 579$
"""

from __future__ import annotations

import functools

import numpy as np

from rljax.data.toy import (
    ALPHABET,
    DIGITS,
    EOS,
    PROMPT_TOKENS,
    ToyBaseConfig,
    build_tokenizer,
    direct_answer,
    sample_batch,
)

__all__ = ["ALPHABET", "MAX_RESPONSE_TOKENS", "PROMPT_TOKENS", "add", "build_tokenizer"]

_CALL_TOKENS = 2 * DIGITS + 4  # '>', two numbers with '+' and '=', EOS
_RESULT_TOKENS = DIGITS + 2  # a sum and a comma
MAX_RESPONSE_TOKENS = 2 * (_CALL_TOKENS + _RESULT_TOKENS) + DIGITS + 2  # two calls and an answer


def add(*numbers: int) -> str:
    """Returns the tool's answer to a call: the sum and a comma."""
    return f"{sum(numbers)},"


def _demonstration(rng: np.random.Generator, config: ToyBaseConfig, call_rate: float) -> str:
    a, b = (int(x) for x in rng.integers(10 ** (DIGITS - 1), 10**DIGITS, 2))
    if rng.random() < call_rate:
        wrong = int(rng.integers(1, 10)) if rng.random() < config.wrong_digit_rate else 0
        called = (a, b - wrong)
        return f"{a}+{b}=>{called[0]}+{called[1]}={EOS}{add(*called)}{sum(called)}{EOS}"
    return direct_answer(rng, config, a, b)


demonstration_batch = functools.partial(sample_batch, _demonstration, ALPHABET, PROMPT_TOKENS + MAX_RESPONSE_TOKENS)
"""A function ``demonstration_batch(rng, config, settled=...)`` that samples demonstrations of this task."""
