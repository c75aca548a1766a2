"""Tests of modelled times and operations by hand, and of attention kernels by formula."""

import dataclasses
from pathlib import Path

import pytest
from compile.count import Collective, Work
from compile.hlo import parse_module
from compile.kernels import KernelUse, causal_pairs, full_row, kernel_uses, model_flops
from compile.roofline import RATES, Rates, collective_seconds, crosses_nodes, times

from rljax.plan.budget import H100, TPUS
from rljax.policy.config import PolicyConfig
from rljax.policy.lora import LoraConfig

# A card does 1e12 operations in a second. It moves 1e9 bytes of memory, 1e8 between cards and 1e7 between nodes.
FLOPS = {("bfloat16", "default"): 1e12, ("float32", "default"): 5e11, ("float32", "highest"): 1e11}
CARD = Rates(flops=FLOPS, memory=1e9, link=1e8, network=1e7)
TWO_NODES = [0, 0, 0, 0, 1, 1, 1, 1]
ALL = (tuple(range(8)),)
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))
ONE = 10**8  # bytes


def exchange(kind, groups):
    return Collective(kind, "float32", groups, 1, ONE)


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        *(("all-gather", ROWS, 3 / 4), ("all-reduce", ROWS, 2 * 3 / 4)),  # 3/4 of the bytes go over links in a node
        ("reduce-scatter", COLUMNS, 10 / 2),  # half of the bytes go over one adapter
        *(("all-gather", ALL, 10 * 7 / 8 / 4), ("all-reduce", ALL, 2 * 10 * 7 / 8 / 4)),  # 7/8, over four adapters
        ("all-to-all", ALL, 10 * 4 / 8),  # each device sends half of its parts to the other node
        ("collective-permute", ((0, 1), (4, 5)), 1),
        ("collective-permute", ((0, 1), (3, 4)), 10),  # the slowest pair counts
        *(("collective-permute", ((2, 2),), 0), ("all-reduce", ((0,), (1,)), 0)),
    ],
)
def test_seconds_of_a_collective(kind, groups, seconds):
    assert collective_seconds(exchange(kind, groups), CARD, TWO_NODES) == pytest.approx(seconds)


def test_the_time_is_max_of_products_and_memory_plus_links():
    crossed = [crosses_nodes(exchange("all-gather", groups), TWO_NODES) for groups in (ROWS, COLUMNS, ALL)]
    assert crossed == [False, True, True]
    tpus = dataclasses.replace(CARD, network=None)
    assert collective_seconds(exchange("all-gather", ALL), tpus, [0] * 8) == pytest.approx(7 / 8)
    work = Work(memory_bytes=3 * 10**9, collectives=[exchange("all-gather", ROWS)])
    work.flops.update({("bfloat16", "default"): 10**12, ("float32", "default"): 10**12, ("float32", "highest"): 10**11})
    found = times(work, [KernelUse("k", 1, "bfloat16", 5 * 10**11)], CARD, TWO_NODES)
    assert (found.products, found.memory, found.links) == pytest.approx((1 + 2 + 1 + 0.5, 3.0, 0.75))
    assert found.total == pytest.approx(4.5 + 0.75)


def test_attention_kernels_by_formula():
    """There are 2 products forward and 5 backward. A TPU's gradients of keys and values take 4."""
    main = parse_module((Path(__file__).parent / "programs/calls.hlo").read_text()).computations["main"]
    calls = {"f": 3, "b": 1, "o": 7, "d": 1}
    work = Work(kernels=[(main, main.instructions[name], times) for name, times in calls.items()])
    a_product = 2 * 2 * 4 * 16 * 21  # two rows of 15 + 6 pairs, four heads, 16 wide
    assert kernel_uses(work, [5, 3]) == [
        KernelUse("__cudnn$fmhaSoftmax", 3, "bfloat16", 3 * 2 * a_product),
        KernelUse("__cudnn$fmhaSoftmaxBackward", 1, "bfloat16", 5 * a_product),
        KernelUse("Other", 7, "", None),
        KernelUse("tpu_custom_call", 1, "bfloat16", 4 * a_product),
    ]


def test_rates_of_dtypes():
    h100 = RATES[H100.name].of_products
    assert h100("bfloat16", "default") == h100("float16", "highest") == 989.4e12
    assert h100("bfloat16xfloat32", "default") == 494.7e12
    assert h100("float32", "highest") == 66.9e12
    assert RATES[TPUS["v5p"].name].of_products("float32", "highest") == pytest.approx(459e12 / 6)


def test_model_flops_by_hand():
    """Each of 5 rows has segments of 3 and 1 tokens. A table that is only looked up does not multiply."""
    assert [full_row(10, 4), full_row(8, 4), full_row(4, 9)] == [[4, 4, 2], [4, 4], [4]]
    assert (causal_pairs([3, 1]), causal_pairs([])) == (6 + 1, 0)
    tied = PolicyConfig(10, 8, 16, 2, 2, 1, 4, tie_word_embeddings=True)
    block = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8 + 2 * 4
    multiplying = 10 * 8 + 2 * block + 8
    attention = 3 * 4 * 2 * 2 * 4 * 7
    assert model_flops(tied, 5, [3, 1]) == 5 * (6 * multiplying * 4 + attention)
    assert model_flops(dataclasses.replace(tied, tie_word_embeddings=False), 5, [3, 1]) == model_flops(tied, 5, [3, 1])
    lora = LoraConfig(rank=2, targets=("q_proj", "gate_proj"))
    with_adapters = 4 * multiplying + 2 * 2 * (8 * 8 + 8 * 16)  # the other weights have no gradient
    assert model_flops(tied, 5, [3, 1], lora) == 5 * (with_adapters * 4 + attention)
