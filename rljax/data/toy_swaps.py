"""The second toy task, without arithmetic: letters trade places, and the order they end in is asked for.

Built as the addition task is (rljax/data/toy.py): a base fitted on direct answers, here orders drawn at random, and on
rare scratchpads, most of them right, so that reinforcement learning lengthens the responses. The task must be one that
a small model cannot do at sight; sorting letters, for one, it learns within 100 steps, and its responses stay short.

    acbdaebc=cdeab$                               a direct answer ($ is the end-of-sequence token)
    acbdaebc=>ac:cbade,bd:cdabe,ae:cdeba,bc:bdeca$  a scratchpad: the two letters:the order after they traded places
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rljax.data.tokenizer import Tokenizer
from rljax.data.toy import EOS, PAD, ToyBaseConfig, draw_batch
from rljax.data.toy import build_tokenizer as _build_tokenizer
from rljax.data.toy import policy_config as _addition_policy_config
from rljax.policy.config import PolicyConfig

LETTERS = "abcde"
SWAPS = 4
ALPHABET = LETTERS + "=>:," + EOS + PAD
HELD_OUT = 200
PROMPT_TOKENS = 2 * SWAPS + 1
MAX_RESPONSE_TOKENS = SWAPS * (len(LETTERS) + 4) + 3  # '>', a step with its comma, EOS, and a little to spare
_PAIRS = [one + other for one, other in itertools.combinations(LETTERS, 2)]


def policy_config() -> PolicyConfig:
    """That of the addition task, over this alphabet."""
    return dataclasses.replace(
        _addition_policy_config(),
        vocab_size=len(ALPHABET),
        eos_token_id=ALPHABET.index(EOS),
        pad_token_id=ALPHABET.index(PAD),
    )


def build_tokenizer() -> Tokenizer:
    """One token a character, as an ordinary ``tokenizers`` tokenizer."""
    return _build_tokenizer(ALPHABET)


class SwapProblems(Sequence[dict[str, str]]):
    """A fixed list of problems ``{"prompt": "acbdaebc=", "answer": "bdeca"}``; the splits of a seed never share one."""

    def __init__(self, split: str, size: int | None = None, seed: int = 0):
        """Draws the list.

        Args:
          split: "train" or "held".
          size: number of problems, all there are when None; "held" has ``HELD_OUT`` at most, "train" the other 9,800.
          seed: of the draw.

        Raises:
          ValueError: another split, or more problems than it has.
        """
        drawn = np.random.default_rng(seed).permutation(len(_PAIRS) ** SWAPS)
        splits = {"held": drawn[:HELD_OUT], "train": drawn[HELD_OUT:]}
        if split not in splits:
            raise ValueError(f"split must be 'train' or 'held', got {split!r}")
        size = len(splits[split]) if size is None else size
        if size > len(splits[split]):
            raise ValueError(f"the {split} split has {len(splits[split])} problems, got size = {size}")
        self._codes = splits[split][:size]

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, index: Any) -> Any:
        code = int(self._codes[index])
        pairs = [_PAIRS[code // len(_PAIRS) ** place % len(_PAIRS)] for place in range(SWAPS)]
        return {"prompt": "".join(pairs) + "=", "answer": orders(pairs)[-1]}


def orders(pairs: Sequence[str]) -> list[str]:
    """The order of the letters after each pair has traded places, starting from ``LETTERS``."""
    found, order = [], LETTERS
    for pair in pairs:
        one, other = pair[0], pair[1]
        order = order.translate(str.maketrans(one + other, other + one))
        found.append(order)
    return found


def scratchpad(pairs: Sequence[str], wrong_place: int | None = None, offset: int = 1) -> str:
    """The worked swaps; at ``wrong_place`` the pair ``offset`` further on in the list of pairs is written instead."""
    written = list(pairs)
    if wrong_place is not None:
        written[wrong_place] = _PAIRS[(_PAIRS.index(pairs[wrong_place]) + offset) % len(_PAIRS)]
    return ">" + ",".join(f"{pair}:{order}" for pair, order in zip(written, orders(written), strict=True))


def _demonstration(rng: np.random.Generator, config: ToyBaseConfig, scratchpad_rate: float) -> str:
    """A direct answer is an order drawn at random: right once in 120 times, whatever ``wrong_direct_rate`` says."""
    pairs = [_PAIRS[int(x)] for x in rng.integers(0, len(_PAIRS), SWAPS)]
    prompt = "".join(pairs) + "="
    if rng.random() < scratchpad_rate:
        wrong = int(rng.integers(SWAPS)) if rng.random() < config.wrong_digit_rate else None
        return prompt + scratchpad(pairs, wrong, int(rng.integers(1, len(_PAIRS)))) + EOS
    return prompt + "".join(rng.permutation(list(LETTERS))) + EOS


def demonstration_batch(
    rng: np.random.Generator, config: ToyBaseConfig, tokenizer: Tokenizer, *, settled: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32 [b, t] padded at the end, lengths int32 [b]) of fresh demonstrations of a fixed width."""
    return draw_batch(_demonstration, ALPHABET, PROMPT_TOKENS + MAX_RESPONSE_TOKENS, rng, config, tokenizer, settled)
