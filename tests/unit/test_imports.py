"""Who may import whom inside rljax, read from the source: no upward edge, no room beside, third parties by their doors.

A new file takes its room's line in LEVELS; rooms whose files stand at several levels (training, compare, rollout) name
them one by one. The longest matching name counts.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Module or room (dotted, without "rljax.") -> level. An edge goes to a lower level, or stays in its room on its level.
LEVELS = {
    "schedule": 0,
    "mismatch": 0,
    "rollout.types": 0,
    "algorithms": 1,
    "sharding": 1,
    "training.packing": 1,
    "training.loss_scale": 1,
    "training.optimizer": 1,
    "training.rate": 1,
    "training.profiling": 1,
    "policy": 2,
    "training.state": 2,
    "training.measure": 2,
    "training.objective": 2,
    "training.step": 3,
    "training.forward": 3,
    "training.update": 3,
    "training.exact_pass": 3,
    "training.exact_step": 3,
    "rollout": 4,
    "rewards": 4,
    "data": 4,
    "training.checkpoint": 4,
    "record": 4,
    "compare.dump": 4,
    "compare": 5,
    "guard": 4,
    "config": 5,
    "config_loader": 5,
    "config_values": 5,
    "report_panels": 5,
    "report_lengths": 5,
    "report_figure": 5,
    "paper_figures": 5,
    "outcome": 5,
    "run_directory": 6,
    "training.rollout_files": 6,
    "training.build": 6,
    "training.loop": 6,
    "evaluation": 5,
    "evaluate": 6,
    "dry_run": 7,
    "train": 8,
}

# Files that make one room though no folder holds them.
SHARED_ROOM = {"config_loader": "config", "config_values": "config"} | dict.fromkeys(
    ("report_lengths", "report_figure", "paper_figures"), "report_panels"
)

# Edges between two rooms on one level that are meant: the train state holds the policy's parameters.
SIDE_DOORS = {("training.state", "policy")}

# Third party -> the only modules that may import it.
DOORS = {
    "httpx": {"rollout.vllm_client"},
    "orbax": {"training.checkpoint"},
    "grain": {"data.prompts"},
    "pyarrow": {"data.files", "compare.dump"},
    "safetensors": {"policy.hf", "rollout.publish", "rollout.vllm_plugin"},  # the plugin reads what publish wrote
    "vllm": {"rollout.vllm_plugin"},
    "torch": {"rollout.vllm_plugin", "compare.scorers"},
    "huggingface_hub": {"policy.hub"},
    "transformers": {"data.tokenizer", "compare.scorers"},
    "tensorboardX": {"record"},
    "tqdm": {"record", "evaluate"},
    "jinja2": {"data.tokenizer"},
    "tyro": {"config_loader"},
    "yaml": {"config_loader"},
    "matplotlib": {"report_panels", "report_lengths"},
    "math_verify": {"rewards.math"},
    "latex2sympy2_extended": {"rewards.math"},
}
LEVEL_0_MAY_IMPORT = {"jax", "optax", "numpy"}

# Loaded inside vLLM's worker processes, where there may be no jax: nothing it imports may lead to these.
WORKER_MODULE, WORKER_MUST_NOT_REACH = "rollout.vllm_plugin", {"jax", "optax", "flax"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "rljax").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted((ROOT / "rljax").rglob("*.py"))}


def longest_match(module: str, names: set[str]) -> str | None:
    parts = module.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in names), None)


def level_of(module: str) -> int | None:
    line = longest_match(module, set(LEVELS))
    return None if line is None else LEVELS[line]


def room_of(module: str) -> str:
    room = module.split(".")[0]
    return SHARED_ROOM.get(room, room)


def imported(source: str) -> Iterator[str]:
    """Every dotted name a source imports, wherever in it; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from (f"{start}.{alias.name}" for alias in node.names)


def own_target(name: str) -> str | None:
    """The module of rljax that a dotted name stands for, or None for somebody else's."""
    if name.split(".")[0] != "rljax":
        return None
    inner = name.removeprefix("rljax").lstrip(".")
    return longest_match(inner, set(MODULES)) or inner


def complaints(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module."""
    found = []
    level = level_of(module)
    for name in imported(source):
        top, target = name.split(".")[0], own_target(name)
        if not top:
            found.append(f"{module}: relative import {name}")
        elif target is not None:
            found += edge_complaints(module, target)
        elif top == "tools" or top == "tests":
            found.append(f"{module}: imports {top}, which stands above the library")
        elif not any(longest_match(module, {door}) for door in DOORS.get(top, {module})):
            found.append(f"{module}: imports {top}, whose doors are {', '.join(sorted(DOORS[top]))}")
        elif level == 0 and top not in LEVEL_0_MAY_IMPORT | sys.stdlib_module_names:
            found.append(f"{module}: level 0 imports {top}, which only higher levels may")
    return sorted(set(found))


def edge_complaints(module: str, target: str) -> list[str]:
    level, target_level = level_of(module), level_of(target)
    if target == "" or module == target:
        return []
    if level is None or target_level is None:
        unknown = module if level is None else target
        return [f"{module} -> {target}: {unknown} has no level; give it one in LEVELS"]
    if target_level > level:
        return [f"{module} (level {level}) -> {target} (level {target_level}): upward"]
    is_side_door = (module, room_of(target)) in SIDE_DOORS
    if target_level == level and room_of(module) != room_of(target) and not is_side_door:
        return [f"{module} -> {target}: two rooms on level {level}"]
    return []


def is_bare_package(module: str) -> bool:
    return MODULES[module].name == "__init__.py" and level_of(module) is None


@pytest.mark.parametrize("module", [name for name in MODULES if not is_bare_package(name)])
def test_imports_go_downwards_and_through_their_doors(module):
    assert level_of(module) is not None, f"{module} has no level; give it one in LEVELS"
    assert complaints(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", [name for name in MODULES if MODULES[name].name == "__init__.py"])
def test_package_files_above_level_0_are_empty(module):
    if level_of(module) != 0:
        assert MODULES[module].read_bytes() == b""


def test_the_library_itself_imports_nothing():
    assert list(imported(MODULES[""].read_text())) == []


def reachable(module: str) -> dict[str, set[str]]:
    """Modules that importing one brings in, packages on the way included -> the third parties each imports."""
    waiting, seen = [module], {}
    while waiting:
        current = waiting.pop()
        if current in seen or current not in MODULES:
            continue
        parts = current.split(".")
        waiting += [".".join(parts[:count]) for count in range(len(parts))]
        names = list(imported(MODULES[current].read_text()))
        waiting += [target for target in map(own_target, names) if target]
        seen[current] = {name.split(".")[0] for name in names} - {"rljax"}
    return seen


def test_what_runs_inside_vllm_does_not_lead_to_jax():
    if WORKER_MODULE not in MODULES:
        pytest.skip(f"{WORKER_MODULE} is not there")
    found = {module: third & WORKER_MUST_NOT_REACH for module, third in reachable(WORKER_MODULE).items()}
    assert {module: third for module, third in found.items() if third} == {}


@pytest.mark.parametrize(
    ("module", "source", "part"),
    [
        ("schedule.surge", "from rljax.policy import qwen3", "-> policy.qwen3 (level 2): upward"),
        ("schedule.surge", "import rljax.mismatch", "two rooms on level 0"),
        ("schedule.surge", "import flax", "level 0 imports flax"),
        ("schedule.surge", "import jaxtyping", "level 0 imports jaxtyping"),
        ("algorithms.losses", "def f():\n    from rljax.training.packing import pack", "two rooms on level 1"),
        ("training.packing", "from rljax.training import step", "-> training.step (level 3): upward"),
        ("training.checkpoint", "from rljax.data.prompts import x", "two rooms on level 4"),
        ("data.prompts", "from rljax.rollout.engine import x", "two rooms on level 4"),
        ("record", "from rljax.config_loader import x", "upward"),
        ("config", "from rljax.compare.report import x", "two rooms on level 5"),
        ("rollout.types", "from rljax.rollout import engine", "upward"),
        ("evaluate", "from rljax.training.loop import train", "two rooms on level 6"),
        ("policy.hf", "import torch", "policy.hf: imports torch, whose doors are compare.scorers, rollout.vllm_plugin"),
        ("training.checkpoint", "import grain.python", "imports grain, whose doors are data.prompts"),
        ("config", "import tyro", "imports tyro, whose doors are config_loader"),
        ("policy.hf", "from . import config", "relative import"),
        ("train", "import tools.plot_run", "stands above the library"),
        ("train", "import rljax.newroom", "newroom has no level"),
        ("newroom", "import rljax.schedule", "newroom has no level"),
    ],
)
def test_a_forbidden_edge_is_seen(module, source, part):
    (complaint,) = complaints(module, source)
    assert part in complaint


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("policy.hf", "import safetensors.numpy\nimport json\nfrom rljax.policy.config import x"),
        ("rollout.publish", "from rljax.rollout.vllm_client import x"),
        ("rollout.vllm_engine", "from rljax.rollout.types import Response\nfrom rljax.policy import score"),
        ("training.step", "import rljax.schedule\nfrom rljax.training import state"),
        ("config", "from rljax.config_loader import x\nfrom rljax.data.prompts import y"),
        ("train", "from rljax.training.loop import train\nfrom rljax.evaluate import x"),
        ("compare.report", "from rljax.compare.scorers import x\nfrom rljax.compare.dump import y"),
        ("data.prompts.sub", "import grain"),
    ],
)
def test_an_allowed_edge_is_let_pass(module, source):
    assert complaints(module, source) == []
