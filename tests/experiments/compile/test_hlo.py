"""The parser of compiled programs reads lines as XLA writes them, and replica groups by their definition."""

from pathlib import Path

import pytest
from compile.hlo import Array, parse_arrays, parse_module, replica_groups

PROGRAMS = Path(__file__).parent / "programs"


def test_a_program_by_hand():
    module = parse_module((PROGRAMS / "fusion.hlo").read_text())
    assert module.entry == "main"
    assert set(module.computations) == {"fused", "main"}
    main = module.computations["main"]
    opcodes = [one.opcode for one in main.instructions.values()]
    assert opcodes == ["parameter", "parameter", "fusion", "constant", "tuple"]
    assert main.root.arrays == (Array("float32", (4, 16)), Array("int32", ()))
    assert main.root.operands == ("f", "c")
    assert main.instructions["w"].arrays == (Array("bfloat16", (8, 16), memory_space=1),)
    assert main.instructions["c"].literal == "7"
    assert main.instructions["f"].called == {"calls": "fused"}
    dot = module.computations["fused"].root
    assert dot.integers("lhs_contracting_dims") == (1,)
    assert dot.attribute("no_such") is None
    arrays = [(Array("bfloat16", (4, 8)),), (Array("bfloat16", (8, 16)),)]
    assert module.computations["fused"].operand_arrays(dot) == arrays
    # An instruction may go on over lines.
    module = parse_module((PROGRAMS / "broken_lines.hlo").read_text())
    assert {name: len(each.instructions) for name, each in module.computations.items()} == {"body": 2, "main": 2}
    assert "splash_mha_dq" in module.computations["body"].root.attributes


def test_bytes_of_types():
    sizes = {"bf16[3,5]{1,0}": 30, "pred[7]": 7, "f8e4m3fn[2,2]{1,0}": 4, "s4[6]{0}": 3, "f32[]": 4, "token[]": 0}
    sizes |= {"(f32[2]{0:T(128)S(5)}, c64[3])": 8 + 24}
    assert {text: sum(array.bytes for array in parse_arrays(text)) for text in sizes} == sizes


def instruction(attributes):
    line = f"  ROOT %c = f32[8]{{0}} all-reduce(%x), {attributes}, to_apply=%add"
    module = parse_module(f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n{line}\n}}")
    return module.computations["main"].root


EVEN_AND_ODD, NEIGHBOURS, ALL = [[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]], [[*range(8)]]
GROUPS = {
    **{"{{0,1},{2,3}}": [[0, 1], [2, 3]], "{}": ALL, "[2,4]<=[8]": [[0, 1, 2, 3], [4, 5, 6, 7]]},
    # 0..7 as [4, 2] is transposed: first the even ones, then the odd ones.
    "[2,4]<=[4,2]T(1,0)": EVEN_AND_ODD,
    "[4,2]<=[2,2,2]T(2,1,0)": [[0, 4], [2, 6], [1, 5], [3, 7]],
    **{"mesh['fsdp'=4,'tp'=2] {'tp'}": NEIGHBOURS, "mesh['fsdp'=4,'tp'=2] {'fsdp'}": EVEN_AND_ODD},
    "mesh['fsdp'=4,'tp'=2] {'fsdp','tp'}": ALL,
    "mesh['fsdp'=4,'tp'=2] {'tp','fsdp'}": [[0, 2, 4, 6, 1, 3, 5, 7]],
    # The part of size 2 that follows the first two of an axis of eight is bit 1 of the index.
    "mesh['a'=8] {'a':(2)2}": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}": [[0, 2], [1, 3]],
    "mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'b'}": [[3, 1], [0, 2]],
}


def test_groups_in_every_form():
    assert {form: replica_groups(instruction(f"replica_groups={form}"), 8) for form in GROUPS} == GROUPS
    assert replica_groups(instruction("source_target_pairs={{0,1},{1,0}}"), 8) == [[0, 1], [1, 0]]


def test_what_is_not_readable_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        parse_module("HloModule empty")
    with pytest.raises(ValueError, match="its replica groups are not readable"):
        replica_groups(instruction("replica_groups=@somewhere"), 8)
