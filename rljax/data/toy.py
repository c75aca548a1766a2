"""The embedded toy task: three-digit addition that a model may answer at once or work out digit by digit.

A base model is fitted on direct answers, most of them deliberately a little wrong, and on rare scratchpads, most of
them right. Reinforcement learning then finds that working it out pays, so responses lengthen as reward rises: the
response-length surge of arXiv 2602.01826 (figure 6), in minutes on a CPU.

    123+456=579$                             a direct answer ($ is the end-of-sequence token)
    123+456=>3+6+0=09,2+5+0=07,1+4+0=05,579$  a scratchpad: a+b+carry=two digits, units first, then the answer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from rljax.data.tokenizer import Tokenizer, wrap_tokenizer
from rljax.policy.config import PolicyConfig

DIGITS = 3
PAD, EOS = "_", "$"
ALPHABET = "0123456789+=,>" + EOS + PAD
HELD_OUT = 200
PROMPT_TOKENS = 2 * DIGITS + 2
MAX_RESPONSE_TOKENS = 10 * DIGITS + 6  # '>', 9 a digit, an answer of DIGITS + 1, EOS, and a little to spare
_LOW, _HIGH = 10 ** (DIGITS - 1), 10**DIGITS


@dataclass(frozen=True)
class ToyBaseConfig:
    """What the base model is fitted on.

    Attributes:
      scratchpad_rate: share of scratchpads at the end of fitting; sets how long the mean length holds under RL.
      practice_rate: share of scratchpads until the last ``settle_steps``, so that they are learnt well though rare.
      wrong_direct_rate: share of direct answers that are off by a small amount (addition only).
      wrong_digit_rate: share of scratchpads with one wrong digit sum, or pair of letters, carried on consistently.
      steps: AdamW steps in all.
      settle_steps: last steps, at ``scratchpad_rate``.
      batch_size: sequences a step.
      learning_rate: peak, with warm-up and cosine decay.
      seed: of the weights and the data.
    """

    scratchpad_rate: float = 0.0125
    practice_rate: float = 0.5
    wrong_direct_rate: float = 0.85
    wrong_digit_rate: float = 0.1
    steps: int = 900
    settle_steps: int = 250
    batch_size: int = 128
    learning_rate: float = 2e-3
    seed: int = 0


def policy_config() -> PolicyConfig:
    """124k parameters: 2 layers, width 64, 4 query and 2 key-value heads of 32 (on a CPU vLLM takes none narrower)."""
    return PolicyConfig(
        vocab_size=len(ALPHABET),
        hidden_size=64,
        intermediate_size=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.05,
        max_position_embeddings=1024,
        eos_token_id=ALPHABET.index(EOS),
        pad_token_id=ALPHABET.index(PAD),
    )


def build_tokenizer(alphabet: str = ALPHABET) -> Tokenizer:
    """One token a character of ``alphabet`` (with EOS and PAD in it), as an ordinary ``tokenizers`` tokenizer."""
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return wrap_tokenizer(tokenizer, eos_token=EOS, pad_token=PAD)


class AdditionProblems(Sequence[dict[str, str]]):
    """A fixed list of problems ``{"prompt": "123+456=", "answer": "579"}``; the splits of a seed never share one."""

    def __init__(self, split: str, size: int = 20_000, seed: int = 0):
        """Draws the list.

        Args:
          split: "train" or "held".
          size: number of problems; "held" has ``HELD_OUT`` at most.
          seed: of the draw.

        Raises:
          ValueError: another split, or more held problems than there are.
        """
        if split not in ("train", "held"):
            raise ValueError(f"split must be 'train' or 'held', got {split!r}")
        if split == "held" and size > HELD_OUT:
            raise ValueError(f"the held split has {HELD_OUT} problems, got size = {size}")
        span = _HIGH - _LOW
        drawn = np.random.default_rng(seed).permutation(span * span)
        chosen = (drawn[:HELD_OUT] if split == "held" else drawn[HELD_OUT:])[:size]
        self._pairs = np.stack([_LOW + chosen // span, _LOW + chosen % span], axis=1)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> Any:
        a, b = (int(x) for x in self._pairs[index])
        return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def scratchpad(a: int, b: int, wrong_digit: int | None = None, offset: int = 1) -> str:
    """The worked addition; at place ``wrong_digit`` the sum is off by ``offset``, and carried on as written."""
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
    error = int(rng.integers(1, 20)) * int(rng.choice([-1, 1])) if rng.random() < config.wrong_direct_rate else 0
    return f"{a}+{b}={a + b + error}{EOS}"


def demonstration_batch(
    rng: np.random.Generator, config: ToyBaseConfig, tokenizer: Tokenizer, *, settled: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32 [b, t] padded at the end, lengths int32 [b]) of fresh demonstrations of a fixed width."""
    return draw_batch(_demonstration, ALPHABET, PROMPT_TOKENS + MAX_RESPONSE_TOKENS, rng, config, tokenizer, settled)


def draw_batch(
    demonstrate: Callable[[np.random.Generator, ToyBaseConfig, float], str],
    alphabet: str,
    width: int,
    rng: np.random.Generator,
    config: ToyBaseConfig,
    tokenizer: Tokenizer,
    settled: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """A batch of what ``demonstrate`` writes at the scratchpad rate of the time, one token a character."""
    rate = config.scratchpad_rate if settled else config.practice_rate
    tokens = np.full((config.batch_size, width), tokenizer.pad_token_id, np.int32)
    lengths = np.zeros(config.batch_size, np.int32)
    for i in range(config.batch_size):
        ids = [alphabet.index(c) for c in demonstrate(rng, config, rate)]
        tokens[i, : len(ids)] = ids
        lengths[i] = len(ids)
    return tokens, lengths
