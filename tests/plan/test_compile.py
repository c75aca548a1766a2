"""Tests of ``--compile``: machines, the words of the command line, and the report of a step (marker compilers)."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from rljax.errors import run_cli
from rljax.plan.budget import H100, TPUS
from rljax.plan.compile import INSTALL, cost_by_kind, needed_bytes, parse_machine
from rljax.train import Options, main, own_options

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")


def test_machines_by_name():
    two, pod = parse_machine("h100:2x8"), parse_machine("tpu:v6e:4x8")
    assert (two.platform, two.topology, two.card) == ("cuda", "2x1x8", H100)
    assert (pod.platform, pod.topology, pod.card) == ("tpu", "v6e:4x8", TPUS["v6e"])
    for name in ("", "h100", "h100:8", "h100:0x8", "h100:1x8x2", "tpu:v9:2x2", "tpu:v5p", "cpu:4"):
        with pytest.raises(ValueError, match=r"--compile: no machine .* give h100:NODESxCARDS"):
            parse_machine(name)


def test_options_are_told_from_configuration_keys():
    words = ["C.yaml", "--dry-run", "--compile", "h100:1x8", "--mesh.fsdp", "8", "--json=out.json", "--hlo", "out.hlo"]
    expected = Options(dry_run=True, compile="h100:1x8", json="out.json", hlo="out.hlo")
    assert own_options(words) == (["C.yaml", "--mesh.fsdp", "8"], expected)
    assert own_options(["C.yaml", "--run.steps=3"]) == (["C.yaml", "--run.steps=3"], Options())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dry-run --compile", "--compile needs a value"),
        ("--compile --dry-run", "--compile needs a value"),
        ("--compile h100:1x8", "--compile goes with --dry-run"),
        ("--dry-run --json FILE", "--json and --hlo go with --compile"),
        ("--dry-run --compile h200:1x8", "error: --compile: no machine 'h200:1x8'; give h100:NODESxCARDS"),
        ("--dry-run --compile h100:1x8 --rollout.engine exact", "engine = exact has an executable of its own"),
    ],
)
def test_options_that_do_not_fit_are_one_line(words, message, capfd):
    assert run_cli(main, [QUICKSTART, *words.split()]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="the compilers are here")
@pytest.mark.parametrize("machine", ["h100:1x1", "tpu:v5e:2x2"])
def test_without_the_compilers_it_says_what_to_install(machine, capfd):
    assert run_cli(main, [QUICKSTART, "--dry-run", "--compile", machine]) == 2
    error = capfd.readouterr().err
    assert f"error: --compile {machine}: JAX has no compiler for it here" in error
    assert INSTALL[parse_machine(machine).platform] in error
    assert error.count("\n") == 1


def test_bytes_and_counts_of_a_compiler():
    """A TPU needs its peak, and a GPU all that is allocated."""
    given = {"flops": 8.0, "bytes accessed": 3, "utilization": 1.0}
    assert cost_by_kind(given) == {"flops": 8.0, "bytes_accessed": 3.0}
    assert [cost_by_kind({"flops": 8.0}), cost_by_kind(None)] == [{"flops": 8.0}, {}]
    memory = {"peak": 14, "total": 19}
    assert needed_bytes(parse_machine("tpu:v5e:4x4"), memory) == 14
    assert needed_bytes(parse_machine("h100:1x8"), memory) == 19
    assert needed_bytes(parse_machine("h100:1x8"), {"peak": 20, "total": 19}) == 20


# --- with the compilers -----------------------------------------------------------------------------------------------

TOY = ["--precision.compute_dtype", "float32", "--packing.rows_per_micro_batch", "16", "--packing.row_tokens", "128"]


def compile_toy(tmp_path, machine, *words):
    out = tmp_path / "report.json"
    assert run_cli(main, [QUICKSTART, "--dry-run", "--compile", machine, "--json", str(out), *TOY, *words]) == 0
    return json.loads(out.read_text())


@pytest.mark.compilers
@pytest.mark.parametrize("machine", ["h100:1x2", "tpu:v5e:2x2"])
def test_a_step_is_described_with_its_memory_and_cost(machine, tmp_path, capfd):
    found = compile_toy(tmp_path, machine, "--mesh.fsdp", "2")
    sizes = found["bytes"]
    assert sizes["fits"]
    assert sizes["total"] == sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temporary"]
    assert found["cost"].get("flops", 0) > 0 or machine.startswith("h100")  # the compiler for GPUs counts nothing here
    assert re.search("^fits +yes$", capfd.readouterr().out, re.MULTILINE)


@pytest.mark.compilers
def test_the_mesh_takes_all_devices_unless_told(tmp_path, capfd):
    found = compile_toy(tmp_path, "h100:1x4", "--mesh.tp", "2")
    assert found["mesh"] == {"replica": 1, "fsdp": 2, "expert": 1, "context": 1, "tp": 2}
    assert run_cli(main, [QUICKSTART, "--dry-run", "--compile", "h100:1x2", "--mesh.fsdp", "4"]) == 2
    assert "needs more than the 2 devices" in capfd.readouterr().err


@pytest.mark.compilers
@pytest.mark.parametrize("mesh", ["--mesh.fsdp 8", "--mesh.fsdp 4 --mesh.tp 2", "--mesh.fsdp 2 --mesh.context 4"])
def test_the_plan_of_a_hybrid_is_near_the_compiler(mesh, tmp_path):
    """Each device has 9,216 tokens of Qwen3.5-4B."""
    out, lean = tmp_path / "report.json", ["--precision.remat", "blocks", "--mesh.keep_gathered", "false"]
    words = ["--model.path", "Qwen/Qwen3.5-4B", *lean, *mesh.split(), "--json", str(out)]
    config = str(ROOT / "configs/paper/qwen3_4b_length_triggered.yaml")
    assert run_cli(main, [config, "--dry-run", "--compile", "h100:1x8", *words]) == 0
    found = json.loads(out.read_text())["bytes"]
    assert found["planned"] == pytest.approx(found["needed"], rel=0.1)
