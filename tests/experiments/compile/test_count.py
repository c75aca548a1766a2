"""Small programs are counted by hand. XLA's own compilations are compared with closed forms and its own analysis."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compile.count import Collective, by_dtype, count_program
from compile.hlo import parse_module

PROGRAMS = Path(__file__).parent / "programs"
EVERY = ((0, 1, 2, 3),)


def count(name, partitions=1):
    return count_program(parse_module((PROGRAMS / f"{name}.hlo").read_text()), partitions)


def test_a_gpu_step_by_hand():
    program = count("gpu_step", 4)
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
    program = count("tpu_step", 4)
    assert program.open_loops == 0
    # The product is the einsum "bpi,pihf->bhf" with p = 2, i = 8, h = 4, f = 16.
    assert program.step.flops == {("bfloat16", "default"): 2 * 32 * (2 * 8) * (4 * 16)}
    pairs = ((0, 1), (1, 2), (2, 3), (3, 0))
    assert program.step.collectives == [Collective("collective-permute", "bfloat16", pairs, 3, 3 * 2 * 8 * 4 * 16 * 2)]
    assert program.step.memory_bytes == 2_048 + 144 + 1_024 + 8_192 + 4 + 3 * 8
    assert program.step.kernels == []


def test_bytes_of_branches_stacks_and_slices():
    step = count("branches").step  # of two branches the attention kernel counts
    assert [call.name for _, call, _ in step.kernels] == ["attention"]
    assert not step.flops
    assert by_dtype(step.untaken_flops) == {"float32": 2 * 64**3}
    assert step.memory_bytes == 4 * 1 * 8 * 2 * 4 * 2
    # The input, one layer of the weights, the index, and one layer of the sums, which is written in place.
    step = count("nested").step
    assert step.memory_bytes == 16 * 8 * 2 + 8 * 4 * 2 + 4 + 16 * 4 * 4
    assert by_dtype(step.flops) == {"bfloat16": 2 * 16 * 8 * 4}
    # The first slice is read into the chip's own memory. The second is read and written in the main memory.
    assert count("sliced").step.memory_bytes == 1024 + 2 * 1024


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
