"""The pairs of attention and the operations of a gradient are worked out by hand."""

import dataclasses

from compile.kernels import causal_pairs, model_flops

from rljax.policy.config import PolicyConfig
from rljax.policy.lora import LoraConfig


def test_pairs_by_hand():
    assert causal_pairs([3, 1]) == 6 + 1
    assert causal_pairs([]) == 0


def test_model_flops_by_hand():
    """Each of 5 rows has segments of 3 and 1 tokens. A table that is only looked up does not multiply."""
    tied = PolicyConfig(10, 8, 16, 2, 2, 1, 4, tie_word_embeddings=True)
    block = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8 + 2 * 4
    multiplying = 10 * 8 + 2 * block + 8
    attention = 3 * 4 * 2 * 2 * 4 * 7
    assert model_flops(tied, 5, [3, 1]) == 5 * (6 * multiplying * 4 + attention)
    assert model_flops(dataclasses.replace(tied, tie_word_embeddings=False), 5, [3, 1]) == model_flops(tied, 5, [3, 1])
    lora = LoraConfig(rank=2, targets=("q_proj", "gate_proj"))
    with_adapters = 4 * multiplying + 2 * 2 * (8 * 8 + 8 * 16)  # the other weights have no gradient
    assert model_flops(tied, 5, [3, 1], lora) == 5 * (with_adapters * 4 + attention)
