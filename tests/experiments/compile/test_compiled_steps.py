"""The counter on a written program, and on steps compiled for machines that are not here (marker compilers)."""

import dataclasses
import json
from pathlib import Path

import pytest
from compile.work import PARTS, describe_work, work_report
from compile_step import main

from rljax.errors import run_cli
from rljax.plan.compile import CompiledStep, parse_machine
from rljax.policy.families import config_to_hf, read_config
from rljax.policy.hub import KNOWN_SHAPES
from rljax.run.config import Config
from rljax.sharding import MeshConfig, make_mesh

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
GPU_STEP = (Path(__file__).parent / "programs/gpu_step.hlo").read_text()


@pytest.mark.mesh
def test_a_report_of_a_written_program():
    """The program is that of test_count.py. Its 4 partitions stand for one node of a GPU machine."""
    config = Config(mesh=MeshConfig(4, 1))
    memory = {"argument": 2000, "output": 900, "alias": 800, "temporary": 100, "peak": 2150, "total": 2200}
    mesh = make_mesh(config.mesh)
    found = work_report(CompiledStep(config, parse_machine("h100:1x4"), mesh, 1.25, GPU_STEP, memory, {}))
    assert json.loads(json.dumps(found)) == found
    assert found["collectives"][0] == {
        **{"per": "micro_batch", "kind": "all-gather", "dtype": "bfloat16", "count": 3, "bytes": 6144},
        **{"group_size": 4, "across_nodes": False},
    }
    products = 3 * 65_536 * (1 / 989.4e12 + 1 / 66.9e12)
    memory_s, links = 135_200 / 3.35e12, (6144 * 3 / 4 + 4096 / 2 + 384 * 3 / 4) / 450e9
    modelled = found["roofline"]["micro_batch_s"]
    assert modelled["total"] == pytest.approx(max(products, memory_s) + links, abs=1e-6)
    assert "float32 1.024e+03 once a step" in describe_work(found)


# --- with the compilers -----------------------------------------------------------------------------------------------

TOY = ["--precision.compute_dtype", "float32", "--packing.rows_per_micro_batch", "16", "--packing.row_tokens", "128"]


def compile_toy(tmp_path, machine, *words):
    out = tmp_path / "report.json"
    assert run_cli(main, [QUICKSTART, machine, "--json", str(out), *TOY, *words]) == 0
    return json.loads(out.read_text())


def toy_flops(devices, head_products):
    """Returns the FLOPs of a device: three times those of the forward's layers, and those of the head's one chunk."""
    c = read_config(ROOT / "configs/toy-base")
    rows, tokens = 16 // devices, 128
    widths = c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * c.intermediate_size
    attention = 2 * tokens * tokens * c.num_heads * c.head_dim
    layer = 2 * rows * (tokens * c.hidden_size * widths + attention)
    head = 2 * rows * (tokens - 1) * c.hidden_size * c.vocab_size
    return 3 * c.num_layers * layer + head_products * head


@pytest.mark.compilers
@pytest.mark.parametrize(("machine", "across"), [("h100:1x2", False), ("h100:2x1", True), ("tpu:v5e:2x2", False)])
def test_a_step_for_a_machine_that_is_not_here(machine, across, tmp_path):
    found = compile_toy(tmp_path, machine, "--mesh.fsdp", "2")
    assert found["mesh"] == {"replica": 1, "fsdp": 2, "expert": 1, "context": 1, "tp": 1}
    assert found["open_loops"] == 2  # one with loss, and one without
    is_gpu = machine.startswith("h100")
    # A GPU's compiler computes the logits again, and may split a product over 1,016 places into 16 of 64.
    assert found["flops_per_micro_batch"] == {"float32": pytest.approx(toy_flops(2, 4 if is_gpu else 3), rel=2e-5)}
    assert found["flops_per_step"] == {}
    assert {one["across_nodes"] for one in found["collectives"]} == {across}
    assert found["bytes"]["fits"]
    assert not is_gpu or found["bytes"]["needed"] >= found["bytes"]["planned"]
    assert 0 < found["roofline"]["model_flops_utilisation"] < 1


@pytest.mark.compilers
def test_with_replicas_only_the_gradient_sum_crosses_nodes(tmp_path):
    found = compile_toy(tmp_path, "h100:2x2", "--mesh.replica", "2", "--mesh.fsdp", "2")
    across = [one for one in found["collectives"] if one["across_nodes"]]
    assert {one["per"] for one in across} == {"step"}
    gradients = 4 * 124_352 // 2  # a device has half of the toy policy's parameters
    assert gradients <= max(one["bytes"] for one in across) < 1.01 * gradients


# The weights of three layers and the head's table of 151,936 rows.
WEIGHTS = 3 * (2560 * 128 * (32 + 8 + 8 + 32) + 3 * 2560 * 9728) + 151_936 * 2560


def compile_three_layers(tmp_path, machine, *words):
    """Returns the report of a compiled step of Qwen3-4B with three layers and separate rows of 9,216 tokens."""
    policy = dataclasses.replace(KNOWN_SHAPES["Qwen/Qwen3-4B-Base"], num_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(policy, "bfloat16")))
    out = tmp_path / "report.json"
    mesh = ["--mesh.fsdp", "2", "--mesh.keep_gathered", "false", "--packing.rows_per_micro_batch", "2"]
    mesh += ["--packing.share_prefixes", "false"]
    words = ["--model.path", str(tmp_path), *mesh, "--precision.remat", "blocks", *words]
    argv = [str(ROOT / "configs/paper/qwen3_4b_length_triggered.yaml"), machine, *words]
    assert run_cli(main, [*argv, "--json", str(out)]) == 0
    return json.loads(out.read_text())


@pytest.mark.compilers
def test_the_plan_of_dots_is_near_the_compiler(tmp_path):
    found = compile_three_layers(tmp_path, "h100:1x2", "--precision.remat", "dots")
    assert found["bytes"]["planned"] == pytest.approx(found["bytes"]["needed"], rel=0.1)
    kernels = {kernel["target"]: kernel["count"] for kernel in found["kernels"]}
    assert kernels["__cudnn$fmhaSoftmaxBackward"] == 3


@pytest.mark.compilers
@pytest.mark.parametrize(
    ("machine", "calls"),
    [
        # Two levels in three layers. The blocks' forward is computed twice.
        ("h100:1x1", {"__cudnn$fmhaSoftmax": 2 * 3 * 2, "__cudnn$fmhaSoftmaxBackward": 2 * 3}),
        # The backward pass of splash has a kernel for queries, and one for keys and values. A device has two rows.
        ("tpu:v5p:2x2x1", {"tpu_custom_call": 2 * 3 * (2 + 2) * 2}),
    ],
)
def test_rows_of_trees_take_a_call_for_each_level(machine, calls, tmp_path):
    devices = "4" if machine.startswith("tpu") else "1"
    words = ["--mesh.fsdp", devices, "--packing.rows_per_micro_batch", devices, "--packing.share_prefixes", "true"]
    words += ["--data.max_prompt_tokens", "2048", "--rollout.max_response_tokens", "256", "--rollout.group_size", "8"]
    found = compile_three_layers(tmp_path, machine, *words, "--packing.row_tokens", "4096")
    kernels = {each["target"]: each["count"] for each in found["kernels"] if each["per"] == "micro_batch"}
    assert {target: kernels[target] for target in calls} == calls
    assert found["bytes"]["planned"] == pytest.approx(found["bytes"]["needed"], rel=0.1)


@pytest.mark.compilers
def test_gradients_that_are_added_up_in_16_bits_send_half(tmp_path):
    """The sums are of all weights of three layers and the head's table. Those of norms stay in float32."""
    sent = {}
    for dtype in ("float32", "compute"):
        found = compile_three_layers(tmp_path, "h100:1x2", "--precision.reduce_dtype", dtype)
        sums = [one for one in found["collectives"] if one["per"] == "micro_batch" and one["kind"] == "reduce-scatter"]
        sent[dtype] = {one["dtype"]: one["bytes"] for one in sums}
    assert sent == {"float32": {"float32": 4 * WEIGHTS}, "compute": {"bfloat16": 2 * WEIGHTS}}


@pytest.mark.compilers
def test_a_tpu_gathers_weights_before_their_products(tmp_path):
    """Every weight travels once in a forward, and twice in an update, in 16 bits. None is passed on in pieces."""
    found = compile_three_layers(tmp_path, "tpu:v5p:2x2x4", "--mesh.fsdp", "16", "--packing.rows_per_micro_batch", "16")
    of_forward = [one for one in found["collectives"] if one["per"] == "forward"]
    assert "collective-permute" not in {one["kind"] for one in of_forward}
    gathered = dict.fromkeys(PARTS, 0)
    for one in found["collectives"]:
        if (one["kind"], one["dtype"]) == ("all-gather", "bfloat16"):
            gathered[one["per"]] += one["bytes"]
    assert (gathered["forward"], gathered["micro_batch"]) == (2 * WEIGHTS, 4 * WEIGHTS)


@pytest.mark.compilers
def test_between_products_each_device_holds_half_the_tokens(tmp_path):
    """[tokens, width] of a row is gathered and parted over tp, in 16 bits. It is never added up whole."""
    words = ["--mesh.fsdp", "4", "--mesh.tp", "2", "--packing.rows_per_micro_batch", "4"]
    found = compile_three_layers(tmp_path, "h100:1x8", *words)
    assert found["bytes"]["planned"] == pytest.approx(found["bytes"]["needed"], rel=0.1)
    of_width = 9216 * 2560 * 2
    over_tp = [one for one in found["collectives"] if one["per"] == "micro_batch" and one["group_size"] == 2]
    whole = {(one["kind"], one["dtype"]): one for one in over_tp if one["bytes"] >= of_width}
    # A layer has two of each in the forward and two in the backward pass. The second forward has both gathers and one
    # parted sum. The embedding parts one sum, and the head and its backward pass gather one each.
    assert whole["reduce-scatter", "bfloat16"]["bytes"] == (3 * 5 + 1) * of_width
    assert whole["all-gather", "bfloat16"]["bytes"] == (3 * 6 + 2) * of_width
    # The head's gradient of the hidden states is added up in float32.
    assert whole["all-reduce", "float32"]["bytes"] < 2.1 * of_width
    assert len(whole) == 3


@pytest.mark.compilers
def test_devices_that_share_a_row_have_even_parts_of_attention(tmp_path):
    """A row of 32,768 tokens lies on 4 devices. On each, cuDNN computes a quarter of the heads of whole rows."""
    mesh = ["--mesh.fsdp", "1", "--mesh.context", "4", "--packing.tokens_per_device", "8192"]
    found = compile_three_layers(tmp_path, "h100:1x4", *mesh, "--rollout.max_response_tokens", "31744")
    assert found["batch"]["rows"] == 1
    assert found["bytes"]["planned"] == pytest.approx(found["bytes"]["needed"], rel=0.1)
    kernels = {kernel["target"]: kernel for kernel in found["kernels"] if kernel["per"] == "micro_batch"}
    pairs = 32_768 * 32_769 // 2
    assert kernels["__cudnn$fmhaSoftmaxBackward"]["flops"] == 3 * 2 * 5 * pairs * 128 * 32 // 4
    exchanged = [one for one in found["collectives"] if one["kind"] == "all-to-all" and one["bytes"] >= 2**20]
    # A block exchanges its own part of queries, keys, values and output, twice forward and once backward, in 16 bits.
    # The embedding exchanges rows once forward and once backward.
    of_block, of_embedding = 8192 * 128 * (32 + 8 + 8 + 32) * 2, 8192 * 2560 * 2
    of_micro_batch = sum(one["bytes"] for one in exchanged if one["per"] == "micro_batch")
    assert of_micro_batch == 3 * 3 * of_block + 2 * of_embedding
