"""Engines and families of policies differ by entries in tables, and no other module compares their names."""

import ast
import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from rljax.compare.layers.operations import operations
from rljax.policy.config import PolicyConfig
from rljax.policy.families import FAMILIES
from rljax.policy.model import abstract_params, init_params
from rljax.rollout import build, kinds
from rljax.rollout.kinds import ENGINES, WISHES, can, engines_that
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.sharding import MeshConfig, make_mesh

PACKAGE = Path(kinds.__file__).parents[1]
POLICY = PolicyConfig(64, 8, 8, 1, 1, 1, 8, tie_word_embeddings=True)
NAMES = {*ENGINES, *FAMILIES}
# The schedule knows no engine: "jax" is the package there.
HOMES = [PACKAGE / path for path in ("rollout/kinds.py", "rollout/build.py", "policy/families.py", "schedule")]
HOMES += [PACKAGE / "rollout/servers" / name for name in ENGINES]


def names_in(node: ast.AST) -> Iterator[str]:
    """Yields the names of engines and families among the constants of an expression."""
    elements = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    yield from (one.value for one in elements if isinstance(one, ast.Constant) and one.value in NAMES)


def compared_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each comparison with the name of an engine or a family."""
    for node in ast.walk(tree):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "endswith"):
            operands = list(node.args)
        yield from ((node.lineno, name) for operand in operands for name in names_in(operand))


COMPARISONS = ["e == 'vllm'", "'exact' != e", "e in ('jax', 'x')", "e.startswith('sglang')"]
COMPARISONS += ["match e:\n case 'qwen2': 0"]


def test_no_module_compares_the_name_of_an_engine_or_a_family():
    assert [len([*compared_names(ast.parse(text))]) for text in COMPARISONS] == [1] * 5
    found = [
        f"{path.relative_to(PACKAGE)}:{line} compares {name!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not any(path.is_relative_to(home) for home in HOMES)
        for line, name in compared_names(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_each_engine_has_a_maker_and_abilities():
    served = engines_that("serves")
    assert tuple(build.make_backend(engine).name.lower() for engine in served) == served
    contracts = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{" | ".join(served)}",' in contracts  # kinds of servers do not import each other
    with pytest.raises(ValueError, match="the kind of server must be vllm or sglang, got 'jax'"):
        build.connect(["http://127.0.0.1:9"], kind="jax")
    for wish in WISHES:
        assert 0 < sum(wish.needs in abilities for abilities in ENGINES.values()) < len(ENGINES), wish.key
    with pytest.raises(ValueError, match="the engine must be exact, jax, vllm or sglang, got 'vlm'"):
        can("vlm", "serves")


class EchoBackend(VllmBackend):
    """A kind of server that speaks as vLLM does, under another name."""

    name = "Echo"


def test_a_new_kind_of_server_is_one_entry_and_one_package(monkeypatch, fake):
    """Nothing else has to know the engine: it is configured, checked, given weights, verified and sampled from."""
    monkeypatch.setitem(ENGINES, "echo", frozenset({"serves", "lags"}))
    for module, content in (("echo", {}), ("echo.client", {"EchoBackend": EchoBackend})):
        package = types.ModuleType(f"rljax.rollout.servers.{module}")
        vars(package).update(content)
        monkeypatch.setitem(sys.modules, package.__name__, package)
    config = RolloutConfig(engine="echo", urls=(fake.url,), dtype="float32", server_wait_s=10.0)
    for setting, needs in ({"colocated": True}, "vllm"), ({"max_staleness": 1, "update": "keep"}, "vllm or sglang"):
        with pytest.raises(ValueError, match=f"works with rollout.engine = {needs}, not with echo"):
            build.check_engine(dataclasses.replace(config, **setting))
    functions = dataclasses.replace(
        build.policy_functions(POLICY, "float32"),
        score=lambda params, sequences: [np.full(len(ids), -1.0, np.float32) for ids in sequences],
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    engine = build.make_engine(config, POLICY, mesh, max_prompt_tokens=6, max_tokens=20, functions=functions)
    with contextlib.closing(engine):
        engine.publish(init_params(POLICY, 0), 3)
        responses = list(engine.generate([np.array([3], np.int32)], 2, SamplingParams(4), seed=0))
    assert [response.response.tolist() for response in responses] == [[3, 4, 5, 6]] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_whether_its_blocks_normalise_heads(family):
    """The property that readers of a family ask for is what its blocks have."""
    mixture = {"num_experts": 4, "experts_per_token": 2, "expert_size": 8} if "moe" in family else {}
    delta = dict.fromkeys(("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "conv_width"), 2)
    layers = len(FAMILIES[family].pattern)
    config = dataclasses.replace(POLICY, family=family, num_layers=layers, **mixture, **delta)
    params, kinds_of_operations = abstract_params(config), {operation.kind for operation in operations(config)}
    names = {str(key) for path, _ in jax.tree_util.tree_leaves_with_path(params) for key in path}
    assert any("query_norm" in name for name in names) == ("query_norm" in kinds_of_operations)
