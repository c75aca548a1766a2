"""Checks of imports beside import-linter's: which modules may import a third party, and what loads without jax."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import rljax

ROOT = Path(__file__).parents[2]

# The only modules that may import each third party.
DOOR_LINES = """
httpx: rollout.servers.http weights.source
starlette: rollout.external.receiver rollout.servers.vllm.endpoint weights.http_limits weights.outlets
uvicorn h11: weights.http_limits
msgspec: distributed.acts distributed.answering distributed.child distributed.messages distributed.ownership
msgspec: rollout.episodes.outcomes rollout.external.receiver rollout.external.rows rollout.servers.http
msgspec: rollout.servers.kind rollout.servers.replies rollout.servers.sglang.client rollout.servers.vllm.client
msgspec: rollout.servers.vllm.endpoint weights.format weights.worker weights.writer
zstandard: weights.delta
xxhash: weights.format
numba: weights.sums
orbax: run.checkpoint
fsspec: weights.source
grain: data.prompts
pyarrow: data.files record.token_dumps
safetensors: compare.layers.vllm_tracer policy.hf policy.peft rollout.servers.vllm.plugin rollout.servers.vllm.taps
wandb trackio: record.trackers
vllm: rollout.servers.vllm.description rollout.servers.vllm.endpoint rollout.servers.vllm.plugin
sglang: rollout.servers.sglang.plugin
tpu_inference: rollout.servers.vllm.plugin rollout.servers.vllm.tpu
torch: compare.scorers rollout.servers.sglang.server rollout.servers.vllm.hooks rollout.servers.vllm.plugin
torch: rollout.servers.vllm.taps schedule.torch weights.sums
huggingface_hub: commands.prepare policy.hub
transformers: compare.scorers data.tokenizer rollout.servers.vllm.plugin schedule.torch
tensorboardX: record.event_files record.writers
tqdm: commands.accept commands.check commands.compare commands.prepare commands.view compare.bench data.gym_problems
tqdm: evaluate record.trackers record.writers run.data_check
jinja2: data.tokenizer
pydantic yaml: run.config_file
matplotlib: compare.picture record.figure
math_verify latex2sympy2_extended: rewards.math_answer
reasoning_gym: data.gym_problems rewards.gym_answer
"""
DOORS: dict[str, set[str]] = {}
for line in DOOR_LINES.split("\n")[1:-1]:
    third_parties, _, doors = line.partition(": ")
    for third_party in third_parties.split():
        DOORS.setdefault(third_party, set()).update(doors.split())
# Packages that the start of a command must not import. It answers within two seconds, and prints nothing of theirs.
LATE = {
    *("transformers", "torch", "grain", "orbax", "matplotlib", "tensorboardX", "huggingface_hub", "math_verify"),
    *("reasoning_gym", "fsspec"),
}
LEVEL_0 = ("errors", "schedule", "mismatch")
# The names of rljax.mismatch that other packages may use besides those of its __init__.
MISMATCH_MODULES = {
    *("accurate", "atlas", "centering", "correction", "diagnosis", "importance", "metrics", "names", "regions", "signs")
}
LEVEL_0_MAY_IMPORT = {"jax", "optax", "numpy", "rljax"}
FOR_TORCH = {"schedule.torch": {"torch", "transformers"}}

# Modules that are loaded where jax may be absent: the plugins inside servers' workers, and the weights beside them.
WITHOUT_JAX = (
    *("rollout.servers.vllm.plugin", "rollout.servers.sglang.plugin", "rollout.servers.sglang.server"),
    *("weights.store", "weights.pull"),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "rljax").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted((ROOT / "rljax").rglob("*.py"))}


@functools.cache
def imported(module: str) -> tuple[str, ...]:
    """Returns every dotted name that a module imports anywhere; ``from a import b`` gives ``a.b``."""
    found: list[str] = []
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def test_no_room_imports_another_on_its_level_or_above():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_a_third_party_comes_in_by_its_doors():
    tops = {module: {name.split(".")[0] for name in imported(module)} for module in MODULES}
    assert {third: {module for module in MODULES if third in tops[module]} for third in DOORS} == DOORS


def test_level_0_needs_jax_optax_and_numpy_alone():
    for module in MODULES:
        if module.split(".")[0] in LEVEL_0:
            tops = {name.split(".")[0] for name in imported(module)}
            assert tops - sys.stdlib_module_names <= LEVEL_0_MAY_IMPORT | FOR_TORCH.get(module, set()), module


def test_other_rooms_do_not_read_the_inside_of_mismatch():
    inside = {name for name in MODULES if name.startswith("mismatch.")} - {f"mismatch.{m}" for m in MISMATCH_MODULES}
    used = {
        (module, name)
        for module in MODULES
        if module.split(".")[0] != "mismatch"
        for name in imported(module)
        if ".".join(name.split(".")[1:3]) in inside
    }
    assert inside
    assert not used


def test_package_files_above_level_0_are_empty():
    packages = [name for name, path in MODULES.items() if path.name == "__init__.py" and name not in ("", *LEVEL_0)]
    assert len(packages) > 15
    assert [name for name in packages if MODULES[name].read_bytes() != b""] == []


def test_the_package_imports_nothing_and_knows_its_version(tmp_path):
    """It says the version of the installed distribution, or that it is not installed. A checkout may have metadata."""
    (tmp_path / "rljax").symlink_to(ROOT / "rljax")
    shown = "import sys; before = set(sys.modules); import rljax; assert set(sys.modules) - before == {'rljax'}; "
    for options, expected in (((), version(rljax.DISTRIBUTION)), (("-S",), "0+unknown")):
        words = [sys.executable, *options, "-c", f"{shown}print(rljax.__version__)"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert (done.stdout, done.stderr) == (f"{expected}\n", "")


def brought_in(module: str) -> set[str]:
    """Returns the modules of rljax that are imported together with one, including its parent packages."""
    waiting, seen = [module], set()
    while waiting:
        current = waiting.pop()
        if current in seen or current not in MODULES:
            continue
        seen.add(current)
        parts = current.split(".")
        waiting += [".".join(parts[:count]) for count in range(len(parts))]
        for name in imported(current):
            inner = name.removeprefix("rljax").lstrip(".")
            waiting += [inner, inner.rpartition(".")[0]] if name.startswith("rljax") else []
    return seen


def test_what_runs_beside_vllm_does_not_lead_to_jax():
    for module in WITHOUT_JAX:
        tops = {name.split(".")[0] for one in brought_in(module) for name in imported(one)}
        assert not tops & {"jax", "optax", "flax"}, module


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_the_start_of_a_command_is_light_and_silent(command):
    code = f"import sys, rljax.{command}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert not LATE & set(done.stdout.split())
