"""The token ids of rendered prompts, and what the tokenizer puts before plain texts."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np

from rljax.data.files import Problem
from rljax.data.tokenizer import Tokenizer

RAW_PROMPT = "raw_prompt"  # the key of a prompt as it was before its text was rendered
TEMPLATED = "templated"  # the key of problems whose prompt a chat template wrote; its value is true


def prompt_ids(problem: Problem, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the token ids of a problem's rendered prompt, int32 [s].

    The special tokens that the tokenizer puts before a text are before it, unless the chat template wrote the prompt.
    """
    text = problem["prompt"]
    return tokenizer.encode(text) if problem.get(TEMPLATED) else tokenizer.encode_prompt(text)


def say_prefix(problems: Iterable[Problem], tokenizer: Tokenizer) -> None:
    """Says in one line on stderr which special tokens begin the prompts that are plain texts, if there are any."""
    texts = [problem["prompt"] for problem in problems if not problem.get(TEMPLATED)] if tokenizer.prefix else []
    if not texts:
        return
    named = " ".join(tokenizer.pieces(tokenizer.prefix))
    twice = sum(text.startswith(tokenizer.pieces(tokenizer.prefix[:1])[0]) for text in texts)
    also = f"; {twice} of {len(texts)} texts begin with it themselves, and have it twice" if twice else ""
    line = f"prompts that are plain texts begin with {named}, which the tokenizer puts before a text{also}"
    print(line, file=sys.stderr)
