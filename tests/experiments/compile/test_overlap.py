"""Tests of exchanges behind work, in programs written by hand and with seconds worked out by hand."""

import dataclasses
from pathlib import Path

import pytest
from compile.hlo import parse_module
from compile.overlap import Timeline, read_overlap

from rljax.plan.machines import H100

# A card does 1e12 operations, moves 1e10 bytes of memory and sends 1e8 bytes to other cards, each in a second.
RATES = {("bfloat16", "default"): 1e12, ("float32", "highest"): 1e11}
CARD = dataclasses.replace(H100, flops=RATES, memory_rate=1e10, link_rate=1e8)
MS = 1e-3
# A gather of 800,000 bytes over 4 cards sends 3/4 of them over a link, which takes 6 ms. A product has 2e9 operations,
# which take 2 ms, and moves 6e6 bytes in less time. A copy reads and writes 1e7 bytes each, which takes 2 ms.
PIECES = {
    "gather": "((bf16[100,1000]{1,0}), bf16[400,1000]{1,0}) all-gather-start(%w), replica_groups={}, dimensions={0}",
    "product": "bf16[1000,1000]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "copy": "f32[2500000]{0} copy(%v)",
    "scatter": "((bf16[400,1000]{1,0}), bf16[100,1000]{1,0}) async-start(%g), calls=%scattered",
    "update": "((bf16[400,1000]{1,0}), bf16[100,1000]{1,0}) async-update(%b)",
    "move": "(f32[2500000]{0}, f32[2500000]{0}, u32[]) copy-start(%v)",
    "sum": "bf16[100,1000]{1,0} all-reduce(%w), replica_groups={{0,1,2,3}}, to_apply=%add",
}
PARAMETERS = """\
  %w = bf16[100,1000]{1,0} parameter(0)
  %x = bf16[1000,1000]{1,0} parameter(1)
  %v = f32[2500000]{0} parameter(2)
  %g = bf16[400,1000]{1,0} parameter(3)
"""
SCATTERED = """\
%scattered (p: bf16[400,1000]) -> bf16[100,1000] {
  %p = bf16[400,1000]{1,0} parameter(0)
  ROOT %out = bf16[100,1000]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}

"""


def step_of(*lines):
    """Returns the model of a program.

    An instruction is NAME=PIECE, or NAME-done for the end of the one that NAME started.
    """
    text = ""
    for line in lines:
        name, _, piece = line.partition("=")
        name, _, ends = name.partition("-")
        text += f"  %{name}.end = bf16[400,1000]{{1,0}} all-gather-done(%{name})\n" if ends else ""
        text += "" if ends else f"  %{name} = {PIECES[piece]}\n"
    body = f"{PARAMETERS}{text}  ROOT %root = () tuple()\n}}\n"
    return read_overlap(parse_module(f"{SCATTERED}ENTRY %main () -> () {{\n{body}"), CARD, [0] * 4, [8]).step


def test_a_gather_behind_a_product():
    step = step_of("a=gather", "p=product", "a-done", "c=copy")
    (gather,) = step.exchanges
    assert (gather.name, gather.kind, gather.count, gather.bytes) == ("a", "all-gather", 1, 800_000)
    assert (gather.covering_flops, gather.covering_bytes) == (2 * 10**9, 6 * 10**6)
    assert gather.link_s == pytest.approx(6 * MS)
    assert gather.covering_s == pytest.approx(2 * MS)
    assert gather.exposed_s == pytest.approx(4 * MS)
    assert (step.work_s, step.seconds) == (pytest.approx(4 * MS), pytest.approx(8 * MS))
    assert step.exposed_share == pytest.approx(0.5)


def test_enough_work_hides_a_gather():
    step = step_of("a=gather", "p=product", "c=copy", "q=product", "d=copy", "a-done")
    assert step.exposed_s == 0
    assert step.seconds == pytest.approx(8 * MS)


def test_copies_beside_a_product_take_the_memory():
    """Three copies move 2e7 bytes each, 6 ms, and the product moves 6e6, 0.6 ms.

    A gather of 6 ms waits for none of them.
    """
    step = step_of("a=gather", "m=move", "n=move", "p=product", "o=move", "a-done")
    gathered = 800_000 + 200_000
    assert step.traffic_s == pytest.approx(6.6 * MS + gathered / 1e10)
    assert (step.work_s, step.exposed_s) == (pytest.approx(2 * MS), pytest.approx(4 * MS))
    assert step.seconds == step.traffic_s
    assert step.exposed_share == pytest.approx(4 * MS / step.traffic_s)


def test_exchanges_wait_for_each_other():
    """The links carry the first exchange until 6 ms and the second until 12 ms."""
    step = step_of("a=gather", "b=gather", "c=copy", "a-done", "b-done")
    assert [one.exposed_s for one in step.exchanges] == [pytest.approx(4 * MS), pytest.approx(6 * MS)]
    assert step.exposed_s == pytest.approx(step.link_s - 2 * MS)


def test_a_collective_without_a_start_is_exposed():
    """An all-reduce of 200,000 bytes sends 3/2 of them over a link in 3 ms. It moves 4e5 bytes of memory in 0.04 ms."""
    step = step_of("p=product", "s=sum")
    assert step.exposed_s == pytest.approx(3 * MS)
    assert step.work_s == pytest.approx(2.04 * MS)


def test_a_wrapped_collective_and_its_update():
    step = step_of("b=scatter", "p=product", "u=update", "c=copy", "u-done")
    (scatter,) = step.exchanges
    assert (scatter.name, scatter.kind, scatter.bytes) == ("b", "reduce-scatter", 800_000)
    assert scatter.covering_s == pytest.approx(4 * MS)
    assert scatter.exposed_s == pytest.approx(2 * MS)


def test_loops_of_a_whole_step():
    """In the program of tests/plan/test_count.py 3 gathers have nothing beside them.

    It has a scatter, and a sum once a step.
    """
    text = (Path(__file__).parent / "programs/gpu_step.hlo").read_text()
    overlap = read_overlap(parse_module(text), H100, [0] * 4, [8])
    gather, scatter = overlap.micro_batch.exchanges
    assert (gather.name, gather.count, gather.bytes) == ("gather", 3, 2_048 + 128)
    assert gather.exposed_s == pytest.approx(2_176 * 3 / 4 / 450e9)
    assert (scatter.kind, scatter.count, scatter.bytes) == ("reduce-scatter", 1, 4_096)
    assert overlap.micro_batch.exposed_s == pytest.approx((3 * 2_176 * 3 / 4 + 4_096 / 2) / 450e9)
    assert overlap.forward == Timeline()
    assert [one.kind for one in overlap.step.exchanges] == ["all-reduce"]


def test_the_branch_with_the_attention_kernel_counts():
    text = """\
%kernel (p: bf16[1,8,2,4]) -> bf16[1,8,2,4] {
  %p = bf16[1,8,2,4]{3,2,1,0} parameter(0)
  ROOT %attention = bf16[1,8,2,4]{3,2,1,0} custom-call(%p, %p, %p), custom_call_target="__cudnn$fmhaSoftmax"
}

%blocks (q: bf16[1,8,2,4]) -> bf16[1,8,2,4] {
  %q = bf16[1,8,2,4]{3,2,1,0} parameter(0)
  ROOT %out = bf16[1,8,2,4]{3,2,1,0} all-reduce(%q), replica_groups={{0,1,2,3}}, to_apply=%add
}

ENTRY %main (which: s32[], x: bf16[1,8,2,4]) -> bf16[1,8,2,4] {
  %which = s32[] parameter(0)
  %x = bf16[1,8,2,4]{3,2,1,0} parameter(1)
  ROOT %y = bf16[1,8,2,4]{3,2,1,0} conditional(%which, %x, %x), branch_computations={%blocks, %kernel}
}
"""
    step = read_overlap(parse_module(text), CARD, [0] * 4, [8]).step
    assert step.exchanges == []
    assert step.flops == 2 * 2 * 36 * (1 * 2 * 4)
