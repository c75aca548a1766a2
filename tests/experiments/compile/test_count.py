"""Small programs are counted by hand. XLA's own compilations are compared with closed forms and its own analysis."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compile.count import Collective, by_dtype, count_program
from compile.hlo import parse_module

PROGRAMS = Path(__file__).parent / "programs"
EVERY = ((0, 1, 2, 3),)


def test_a_gpu_step_by_hand():
    program = count_program(parse_module((PROGRAMS / "gpu_step.hlo").read_text()), 4)
    assert program.open_loops == 1
    assert program.micro_batch.flops == {
        ("bfloat16", "default"): 3 * 2 * 32 * 64 * 16,
        ("float32", "highest"): 3 * 2 * 64 * 32 * 16,
    }
    assert program.step.flops == {("float32", "default"): 2 * 8 * 8 * 8}
    assert program.micro_batch.merged_collectives() == [
        Collective("all-gather", "bfloat16", EVERY, 3, 3 * 64 * 16 * 2),
        Collective("reduce-scatter", "float32", ((0, 2), (1, 3)), 1, 64 * 16 * 4),
        Collective("all-gather", "float32", EVERY, 3, 3 * 4 * 8 * 4),
    ]
    assert program.step.merged_collectives() == [Collective("all-reduce", "float32", EVERY, 1, 8 * 8 * 4)]
    assert program.micro_batch.memory_bytes == 3 * 41_648 + 6_144 + 4_100 + 12
    assert program.step.memory_bytes == 768 + 512 + 512


def test_a_tpu_step_by_hand():
    program = count_program(parse_module((PROGRAMS / "tpu_step.hlo").read_text()), 4)
    assert program.open_loops == 0
    # The product is the einsum "bpi,pihf->bhf" with p = 2, i = 8, h = 4, f = 16.
    assert program.step.flops == {("bfloat16", "default"): 2 * 32 * (2 * 8) * (4 * 16)}
    pairs = ((0, 1), (1, 2), (2, 3), (3, 0))
    assert program.step.collectives == [Collective("collective-permute", "bfloat16", pairs, 3, 3 * 2 * 8 * 4 * 16 * 2)]
    assert program.step.memory_bytes == 2_048 + 144 + 1_024 + 8_192 + 4 + 3 * 8
    assert program.step.kernels == []


BRANCHES = """\
%kernel (p: bf16[1,8,2,4]) -> bf16[1,8,2,4] {
  %p = bf16[1,8,2,4]{3,2,1,0} parameter(0)
  ROOT %attention = bf16[1,8,2,4]{3,2,1,0} custom-call(%p, %p, %p), custom_call_target="__cudnn$fmhaSoftmax"
}

%blocks (q: bf16[1,8,2,4]) -> bf16[1,8,2,4] {
  %q = bf16[1,8,2,4]{3,2,1,0} parameter(0)
  %scores = f32[64,64]{1,0} broadcast(%q), dimensions={}
  %product = f32[64,64]{1,0} dot(%scores, %scores), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = bf16[1,8,2,4]{3,2,1,0} copy(%q)
}

ENTRY %main (which: s32[], x: bf16[1,8,2,4]) -> bf16[1,8,2,4] {
  %which = s32[] parameter(0)
  %x = bf16[1,8,2,4]{3,2,1,0} parameter(1)
  ROOT %y = bf16[1,8,2,4]{3,2,1,0} conditional(%which, %x, %x), branch_computations={%kernel, %blocks}
}
"""


def test_of_two_branches_the_attention_kernel_counts():
    step = count_program(parse_module(BRANCHES), 1).step
    assert [call.name for _, call, _ in step.kernels] == ["attention"]
    assert not step.flops
    assert by_dtype(step.untaken_flops) == {"float32": 2 * 64**3}
    assert step.memory_bytes == 4 * 1 * 8 * 2 * 4 * 2


NESTED = """\
%take (t0: s32[], t1: bf16[36,8,4]) -> bf16[8,4] {
  %t1 = bf16[36,8,4]{2,1,0} parameter(1)
  %t0 = s32[] parameter(0)
  %layer = bf16[1,8,4]{2,1,0} dynamic-slice(%t1, %t0, %t0, %t0), dynamic_slice_sizes={1,8,4}
  ROOT %weight = bf16[8,4]{1,0} bitcast(%layer)
}

%keep (k0: f32[36,16,4], k1: f32[1,16,4], k2: s32[]) -> f32[36,16,4] {
  %k0 = f32[36,16,4]{2,1,0} parameter(0)
  %k1 = f32[1,16,4]{2,1,0} parameter(1)
  %k2 = s32[] parameter(2)
  ROOT %kept = f32[36,16,4]{2,1,0} dynamic-update-slice(%k0, %k1, %k2, %k2, %k2)
}

%layers (x: bf16[16,8], weights: bf16[36,8,4], sums: f32[36,16,4], i: s32[]) -> f32[36,16,4] {
  %x = bf16[16,8]{1,0} parameter(0)
  %weights = bf16[36,8,4]{2,1,0} parameter(1)
  %sums = f32[36,16,4]{2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %one = bf16[8,4]{1,0} fusion(%i, %weights), kind=kLoop, calls=%take
  %product = f32[16,4]{1,0} convolution(%x, %one), dim_labels=bf_io->bf
  %wide = f32[1,16,4]{2,1,0} bitcast(%product)
  ROOT %into = f32[36,16,4]{2,1,0} fusion(%sums, %wide, %i), kind=kLoop, calls=%keep
}

ENTRY %main (x: bf16[16,8], weights: bf16[36,8,4], sums: f32[36,16,4], i: s32[]) -> f32[36,16,4] {
  %x.1 = bf16[16,8]{1,0} parameter(0)
  %weights.1 = bf16[36,8,4]{2,1,0} parameter(1)
  %sums.1 = f32[36,16,4]{2,1,0} parameter(2)
  %i.1 = s32[] parameter(3)
  ROOT %y = f32[36,16,4]{2,1,0} fusion(%x.1, %weights.1, %sums.1, %i.1), kind=kOutput, calls=%layers
}
"""


def test_of_a_stack_a_fusion_inside_a_fusion_takes_one_layer():
    """The bytes are the input, one layer of the weights, the index, and one layer of the sums, written in place."""
    step = count_program(parse_module(NESTED), 1).step
    assert step.memory_bytes == 16 * 8 * 2 + 8 * 4 * 2 + 4 + 16 * 4 * 4
    assert by_dtype(step.flops) == {"bfloat16": 2 * 16 * 8 * 4}


SLICED = """\
HloModule sliced, is_scheduled=true

ENTRY %main (x: s8[4096]) -> s8[1024] {
  %x = s8[4096]{0} parameter(0)
  %start = ((s8[4096]{0}), s8[1024]{0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[1024:2048]}
  %first = s8[1024]{0:S(1)} slice-done(%start)
  %other = ((s8[4096]{0}), s8[1024]{0}, s32[]{:S(2)}) slice-start(%x), slice={[2048:3072]}
  ROOT %second = s8[1024]{0} slice-done(%other)
}
"""


def test_a_slice_that_starts_early_moves_only_its_part():
    """The first slice is read into the chip's own memory. The second is read and written in the main memory."""
    assert count_program(parse_module(SLICED), 1).step.memory_bytes == 1024 + 2 * 1024


def compiled(f, *shapes, numbers=0):
    """Compiles a function of some whole numbers, and of arrays of these shapes."""
    given = [jax.ShapeDtypeStruct((), jnp.int32)] * numbers
    return jax.jit(f).lower(*given, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def test_products_in_loops_that_xla_compiles_here():
    """Five rows go through 7 layers, forward and backward, with 3 products a layer."""

    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(jnp.einsum("bd,de->be", x, w, precision="highest")), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    program = count_program(parse_module(compiled(jax.grad(loss), (7, 16, 16), (5, 16)).as_text()), 1)
    assert program.open_loops == 0
    assert sum(program.step.flops.values()) == 7 * 3 * 2 * 5 * 16 * 16


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (lambda x, y: jnp.tanh(x) * y + 1.0, [(64, 32), (64, 32)]),
        (lambda x, y: x @ y, [(64, 32), (32, 48)]),
        (lambda x, y: jnp.sum(x * y, axis=0), [(64, 32), (64, 32)]),
    ],
)
def test_memory_is_what_xla_says_of_one_kernel(f, shapes):
    program = compiled(f, *shapes)
    mine = count_program(parse_module(program.as_text()), 1).step.memory_bytes
    assert mine == program.cost_analysis()["bytes accessed"]


def test_a_loop_whose_end_is_an_input_counts_once_each_time():
    """A mixture's experts have such rounds in each of five layers, inside of another such loop."""

    def f(n, rounds, x):
        def layer(x, _):
            return jax.lax.fori_loop(0, rounds, lambda _, x: x @ x, x @ x @ x), None

        return jax.lax.fori_loop(0, n, lambda _, x: jax.lax.scan(layer, x, length=5)[0], x)

    program = count_program(parse_module(compiled(f, (8, 8), numbers=2).as_text()), 1)
    assert (program.open_loops, program.inner_open_loops) == (1, 1)
    assert sum(program.micro_batch.flops.values()) == 5 * 3 * 2 * 8**3
    assert not program.forward.flops
    assert not program.step.flops


def test_of_two_such_loops_the_smaller_is_the_forward():
    def f(n, x):
        with_loss = jax.lax.fori_loop(0, n, lambda _, x: x @ x @ x, x)
        return jax.lax.fori_loop(n, 9, lambda _, x: x @ x, with_loss)

    program = count_program(parse_module(compiled(f, (8, 8), numbers=1).as_text()), 1)
    assert program.open_loops == 2
    assert [sum(work.flops.values()) for work in (program.micro_batch, program.forward)] == [4 * 8**3, 2 * 8**3]
