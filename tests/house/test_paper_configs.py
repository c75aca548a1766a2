"""Every shipped configuration and every arm of docs/paper.md must load and build, and its step must trace."""

import dataclasses
import functools
import json
import operator
import re
from pathlib import Path

import jax
import pytest
import yaml
from changed_configs import changed
from toy_texts import toy_config

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.plan.dry_run import dry_run
from rljax.policy.config import PolicyConfig
from rljax.policy.families import config_to_hf
from rljax.run.config import Config
from rljax.run.config_file import dotted, load_config
from rljax.run.training import make_step, optional_logprobs
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.state import abstract_state, make_optimizer

ROOT = Path(__file__).parents[2]
FILES = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if "study" not in path.parts]
SIZES = ("model", "data", "rollout", "packing", "mesh", "precision", "optimizer", "lora", "policy")
PAPER = [path for path in FILES if path.parent.name == "paper"]
PAGE = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
# The file, the options and the paper's result of each arm, as the page's tables have them.
ARMS = {
    name: (ROOT / "configs/paper" / file, options.split(), result)
    for name, file, options, result in re.findall(
        r"^\| `((?:qwen3|deepseek)_[^`]+)` \| `(\S+\.yaml)([^`]*)` \| ([^|]+) \|$", PAGE, re.MULTILINE
    )
}
TINY = PolicyConfig(24, 32, 64, 1, 4, 2, 8, tie_word_embeddings=True)
EXPECTED = yaml.safe_load(Path(__file__).with_name("paper_arms.yaml").read_text())


def load(path, *options):
    return load_config(Config, [str(path), *options], prog="test", description="")


@functools.cache
def load_arm(name):
    """Returns the configuration of an arm as the page's command runs it."""
    path, options, _ = ARMS[name]
    return load(path, "--run.dir", f"runs/paper/{name}", *options)


def flat(settings):
    """Returns the value of each setting by its dotted key."""
    return {key: value for key, value in dotted(settings) if not isinstance(value, dict)}


@pytest.fixture(scope="module")
def setup():
    return flat(dataclasses.asdict(load(ROOT / "configs/paper/setup.yaml")))


def test_each_file_is_an_arm_and_the_base_of_its_options():
    assert sorted(ARMS) == sorted(EXPECTED["arms"])
    assert {path for path, _, _ in ARMS.values()} == {path for path in PAPER if path.stem != "setup"}
    for name, (path, options, _) in ARMS.items():
        assert (path.stem == name) == (not options)


def test_an_arm_differs_from_table_1_only_in_what_it_says(setup):
    for name, parts in EXPECTED["arms"].items():
        expected = functools.reduce(operator.or_, parts, setup | {"run.dir": f"runs/paper/{name}"})
        assert flat(dataclasses.asdict(load_arm(name))) == expected


def test_table_1(setup):
    table = flat(EXPECTED["table_1"]) | {"eval.datasets": ("runs/data/aime-24.parquet",)}
    assert {key: setup[key] for key in table} == table
    settings = {"token_tis": {"level": "token"}, "sequence_mis": {"level": "sequence", "mode": "mask"}}
    for preset, given in settings.items():
        assert CorrectionConfig(preset=preset).resolved() == CorrectionConfig(**given, threshold=2.0)


def test_the_head_of_a_file_has_the_pages_result():
    arms = [(path.read_text(), result) for path, options, result in ARMS.values() if not options]
    heads = [(text, result) for text, result in arms if "2602.01826" in text]
    assert len(heads) > 5
    for text, result in heads:
        head = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        assert f"The paper's result (arXiv 2602.01826): {result}." in head


@pytest.mark.parametrize("sizes", [("mesh", "precision", "lora"), pytest.param(SIZES, marks=pytest.mark.harness)])
def test_the_parts_of_each_file_build_from_shapes(sizes, tmp_path, monkeypatch):
    """Files with equal sizes build equal parts, so one of them is built. The suite has the meshes and precisions."""
    (tmp_path / "configs/toy-base").mkdir(parents=True)
    (tmp_path / "configs/toy-base/config.json").write_text(json.dumps(config_to_hf(toy_config(), "float32")))
    configs = map(load, FILES)
    distinct = {tuple(getattr(config, name) for name in sizes): config for config in configs}
    monkeypatch.chdir(tmp_path)
    for config in distinct.values():
        assert f"dry run of {config.run.dir}: " in dry_run(config)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"config.json"}


def toy_sized(config):
    """Returns the same recipe at a size that traces in a moment: four prompts and short responses."""
    return changed(
        config,
        data={"batch_size": 4, "max_prompt_tokens": 4},
        rollout={"engine": "jax", "urls": (), "group_size": 2, "max_response_tokens": 12},
        packing={"row_tokens": 32, "rows_per_micro_batch": 2, "tokens_per_device": 0},
        mesh={"fsdp": 1, "tp": 1, "expert": 1},
    )


# These have each loss, correction and precision at least once.
LOWERED = [
    *("qwen3_4b_score_centering", "qwen3_30b_a3b_sequence_mis_fp16", "quickstart", "qwen3_4b_two_sided_tv"),
    *("qwen3_14b_token_tis", "deepseek_1.5b_sanity_grpo_bf16", "deepseek_1.5b_sanity_gspo_bf16"),
    *("deepseek_1.5b_sanity_token_tis_fp16", "deepseek_1.5b_sanity_pg_sequence_tis_bf16"),
    "qwen3_4b_token_mis_schedule",
]


def load_named(name):
    """Returns an arm of the page, or another file of configs/."""
    return load_arm(name) if name in ARMS else load(*(path for path in FILES if path.stem == name))


def parts_of_step(name):
    config = load_named(name)
    return config.loss, config.correction.resolved(), config.precision


def test_each_part_of_a_step_is_lowered():
    parts = {*sum(map(parts_of_step, [*(path.stem for path in FILES), *ARMS]), ())}
    assert {*sum(map(parts_of_step, LOWERED), ())} == parts


def assert_lowered(name):
    """Builds and lowers the step of a configuration, and checks what comes out."""
    config, mesh = toy_sized(load_named(name)), make_mesh(MeshConfig(1, 1))
    tx = make_optimizer(config.optimizer)
    dynamic = config.precision.compute_dtype == "float16"
    state = abstract_state(TINY, tx, mesh, dynamic_scale=dynamic)
    lowered = make_step(config, TINY, mesh).lower(*optional_logprobs(config), reported=config.rollout.reported)
    text = lowered.as_text()
    assert ("xf16>" in text, "xbf16>" in text) == (dynamic, not dynamic)
    new_state, row, _ = lowered.out_info
    new, old = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each) for each in (new_state, state))
    assert new == old
    assert ("correction/weight_mean" in row) == (not config.correction.is_off)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*LOWERED[:2], *(pytest.param(name, marks=pytest.mark.harness) for name in LOWERED[2:])]
)
def test_a_toy_sized_step_is_built_and_lowered(name):
    assert_lowered(name)


@pytest.mark.harness
@pytest.mark.slow
def test_each_other_combination_is_lowered():
    """The parts are combined in more ways by further configurations."""
    every = [*(path.stem for path in FILES), *ARMS]
    names = {parts_of_step(name): name for name in every if not load_named(name).lora.rank}
    assert names.keys() == {*map(parts_of_step, every)}
    others = names.keys() - {*map(parts_of_step, LOWERED)}
    assert len(others) == len(names) - len(LOWERED)
    for parts in others:
        assert_lowered(names[parts])


def test_each_file_opens_with_hardware_result_and_command():
    for path in FILES:
        head = re.split(r"\n(?!#)", path.read_text())[0]
        assert "# Hardware: " in head, path
        assert "esult" in head, path
        commands = " ".join(line.removeprefix("#").strip() for line in head.splitlines()).partition("Command:")[2]
        assert commands, path
        if path in PAPER:
            assert "# Not run here." in head, path
            assert re.search(r"^# The paper's result( \(arXiv [\d.]+\))?: ", head, re.MULTILINE), path
            for named in re.findall(r"\S+\.yaml", commands):
                assert named == str(path.relative_to(ROOT))
        assert max(map(len, path.read_text().splitlines())) <= 120, path
