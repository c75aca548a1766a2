"""Tests of the dry run's numbers by hand, of models by name, and of the steps to profile."""

import dataclasses
from pathlib import Path

import pytest
from changed_configs import changed
from toy_runs import outcome

from rljax import train
from rljax.plan.dry_run import beside_bytes, check_shapes, dry_run, in_units, planned_bytes, shape_mesh, state_bytes
from rljax.policy.config import PolicyConfig
from rljax.policy.hub import KNOWN_SHAPES, is_hub_id, model_directory, policy_shape
from rljax.run.config import Config, RunConfig
from rljax.sharding import MeshConfig

TINY = PolicyConfig(24, 32, 64, 3, 4, 2, 8, tie_word_embeddings=True)
# The parameters are the embedding, 3 blocks of (q, k, v, o, MLP, two norms of the width, two of a head), and the last
# norm.
TINY_COUNT = 24 * 32 + 3 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64 + 2 * 32 + 2 * 8) + 32

MIXTURE = dataclasses.replace(TINY, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=16)


def test_known_shapes_have_the_published_parameter_counts():
    config = changed(Config(), mesh={"fsdp": 1})
    expected = {"0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360}
    for size, count in expected.items():
        for name in (f"Qwen/Qwen3-{size}", f"Qwen/Qwen3-{size}-Base"):
            assert state_bytes(config, KNOWN_SHAPES[name], shape_mesh(config.mesh))["masters"] == (4 * count, 4 * count)
    assert {shape.stop_token_ids for name, shape in KNOWN_SHAPES.items() if name.endswith("-Base")} == {(151_643,)}
    tuned = [shape for name, shape in KNOWN_SHAPES.items() if "Qwen3-" in name and "Base" not in name]
    assert {shape.stop_token_ids for shape in tuned} == {(151_645,)}


def test_bytes_of_a_tiny_policy_by_hand():
    config = changed(Config(), mesh={"fsdp": 1}, precision={"compute_dtype": "float16"})
    sizes = state_bytes(config, TINY, shape_mesh(config.mesh))
    assert sizes["masters"][0] == sizes["gradients"][0] == 4 * TINY_COUNT
    assert sizes["float16 copy"][0] == 2 * TINY_COUNT
    # The optimizer has two moments and besides only scalars: a count and the rate.
    assert 0 < sizes["moments"][0] - 8 * TINY_COUNT <= 32
    assert "reference policy" not in sizes
    kl = changed(config, loss={"kl": "k3", "kl_coefficient": 0.1})
    assert state_bytes(kl, TINY, shape_mesh(kl.mesh))["reference policy"][0] == 4 * TINY_COUNT
    assert sizes["weights of the embedded engine"][0] == 2 * TINY_COUNT  # bfloat16
    assert beside_bytes(config, TINY, shape_mesh(config.mesh)) == 2 * TINY_COUNT
    assert beside_bytes(kl, TINY, shape_mesh(kl.mesh)) == 6 * TINY_COUNT
    served = changed(kl, rollout={"engine": "vllm"})
    assert "weights of the embedded engine" not in state_bytes(served, TINY, shape_mesh(kl.mesh))
    assert beside_bytes(served, TINY, shape_mesh(kl.mesh)) == 4 * TINY_COUNT
    stale = changed(served, rollout={"max_staleness": 1})  # two older policies in the compute dtype
    assert beside_bytes(stale, TINY, shape_mesh(kl.mesh)) == 4 * TINY_COUNT + 2 * 2 * TINY_COUNT


def test_bytes_of_adapters_on_a_tiny_policy_by_hand():
    config = changed(Config(), mesh={"fsdp": 1}, lora={"rank": 4, "targets": ("q_proj", "down_proj")})
    sizes = state_bytes(config, TINY, shape_mesh(config.mesh))
    count = 3 * 4 * (32 + 32 + 64 + 32)  # in and out of q, in and out of down
    assert sizes["adapters"][0] == sizes["gradients"][0] == 4 * count
    assert 0 < sizes["moments"][0] - 8 * count <= 32
    assert sizes["frozen bfloat16 base"][0] == 2 * TINY_COUNT
    assert sizes["bfloat16 merged"][0] == 2 * 3 * (32 * 32 + 64 * 32)
    assert not {"masters", "bfloat16 copy", "bfloat16 gathered", "reference policy"} & set(sizes)
    # The reference policy of a KL penalty is the base, unless the run starts from other adapters.
    kl = changed(config, loss={"kl": "k3", "kl_coefficient": 0.1})
    assert state_bytes(kl, TINY, shape_mesh(kl.mesh))["reference policy"] == (0, 0)
    started = changed(kl, lora={"adapter": "somewhere"})
    assert state_bytes(started, TINY, shape_mesh(kl.mesh))["reference policy"] == sizes["bfloat16 merged"]
    # The step reads the merged weights, and the base's weights without adapters. The rest of the base lies beside it,
    # and so do the engine's weights, which are whole.
    assert beside_bytes(config, TINY, shape_mesh(kl.mesh)) == 2 * 3 * (32 * 32 + 64 * 32) + 2 * TINY_COUNT


def test_a_run_on_adapters_is_described(tmp_path):
    config = changed(
        Config(), model={"path": "Qwen/Qwen3-14B"}, lora={"rank": 32, "targets": ("q_proj", "v_proj")}, mesh={"fsdp": 8}
    )
    lines = dict(line.split("  ", 1) for line in dry_run(config).splitlines()[1:])
    count = 40 * 32 * (5120 + 5120 + 5120 + 1024)
    assert lines["parameters"].strip() == "14,768,307,200"
    assert lines["lora"].strip() == f"{count:,} parameters are trained: rank 32, alpha 64, on q_proj, v_proj"
    with pytest.raises(ValueError, match=r"^lora.targets: .* has no up_proj that may have an adapter"):
        check_shapes(changed(config, lora={"targets": ("up_proj",)}), MIXTURE, shape_mesh(MeshConfig(1, 1)))


def test_a_device_holds_its_share_of_what_divides():
    config = changed(Config(), mesh={"fsdp": 16, "tp": 4})
    whole, part = state_bytes(config, TINY, shape_mesh(config.mesh))["masters"]
    # The width is split 16 ways, and heads, MLP and vocabulary 4 ways. The 2 kv heads and the norms are not split.
    block = (32 * 32 * 2 + 3 * 32 * 64) // 64 + 2 * 32 * 16 // 16 + 2 * 32 + 2 * 8
    assert part == 4 * (24 * 32 // 64 + 3 * block + 32)
    assert whole == 4 * TINY_COUNT


def test_a_run_is_described_by_hand_worked_numbers(tmp_path):
    sizes = {"run.dir": tmp_path / "run", "model.path": "Qwen/Qwen3-4B-Base", "data.batch-size": 6}
    sizes |= {"data.max-prompt-tokens": 100, "rollout.group-size": 4, "rollout.max-response-tokens": 900}
    sizes |= {"rollout.engine": "vllm", "rollout.urls": "http://nowhere:1", "loss.mini-batches": 2}
    sizes |= {"packing.row-tokens": 2048, "packing.rows-per-micro-batch": 4, "mesh.fsdp": 4, "mesh.tp": 8}
    words = ["configs/quickstart.yaml", "--dry-run", *(f"--{key}={value}" for key, value in sizes.items())]
    status, text, error = outcome(train.main, words)
    assert (status, error) == (0, "")
    lines = dict(line.split("  ", 1) for line in text.splitlines()[1:] if "  " in line)
    # A row takes two of the longest sequences. So 12 of them are 6 rows, in 2 micro-batches of 4.
    expected = {
        "a step": "6 prompts x 4 responses = 24 responses, 2 updates of 12",
        "tokens a step": "at most 24,000: 100 + 900 each",
        "packing": "at most 2 micro-batches of 4 rows of 2,048 tokens",
        "parameters": "4,022,468,096",
        "mesh": "fsdp 4 x tp 8 = 32 devices; only 1 here",
    }
    assert {key: lines[key].strip() for key in expected} == expected
    assert lines["masters"].split()[:2] == ["14.98", "GiB"]
    assert list(tmp_path.iterdir()) == []
    assert [in_units(n) for n in (0, 1023, 1024, 2**30)] == ["0 B", "1023 B", "1.00 KiB", "1.00 GiB"]


TOO_MANY = "must be at most the model's vocabulary, 151,?936 tokens"


@pytest.mark.parametrize(
    ("sections", "part"),
    [
        ({"rollout": {"max_response_tokens": 40_000}}, "is longer than the model's max_position_embeddings = 32768"),
        ({"mesh": {"fsdp": 3}}, "must be a multiple of the 3 ways that the mesh splits rows"),
        ({"packing": {"row_tokens": 64}}, "row_tokens = 64 is shorter than the longest possible sequence"),
        *(({"rollout": {key: 151_937}}, f"rollout.{key} = 151937 {TOO_MANY}") for key in ("top_logprobs", "top_k")),
        (
            {"rollout": {"engine": "exact", "refill": True, "group_size": 12}, "packing": {"rows_per_micro_batch": 8}},
            "rollout.group_size = 12 must be a multiple of the 8 rows of a micro-batch",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sections, part):
    config = changed(changed(Config(), mesh={"fsdp": 4}), **sections)
    with pytest.raises(ValueError, match=part):
        check_shapes(config, KNOWN_SHAPES["Qwen/Qwen3-4B-Base"], shape_mesh(config.mesh))


def test_profile_steps_are_two_in_order():
    for steps in ((1,), (0, 2), (3, 2), (1, 2, 3)):
        with pytest.raises(ValueError, match="profile_steps must be two steps"):
            RunConfig(profile_steps=steps)


@pytest.mark.mesh
def test_a_mesh_without_a_number_takes_the_devices_here():
    assert dict(shape_mesh(MeshConfig(-1, 2)).shape) == {"replica": 1, "fsdp": 4, "expert": 1, "context": 1, "tp": 2}
    assert dict(shape_mesh(MeshConfig(-1, 2, 2)).shape) == {"replica": 2, "fsdp": 2, "expert": 1, "context": 1, "tp": 2}


def test_names_of_the_hub_and_paths_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("Qwen/Qwen3-4B-Base")
    assert not is_hub_id("toy-base")
    assert not is_hub_id("/models/qwen")
    assert not is_hub_id("./qwen")
    (tmp_path / "Qwen").mkdir()
    assert not is_hub_id("Qwen/Qwen3-4B-Base")  # it is a path in an existing directory
    assert model_directory("Qwen/Qwen3-4B-Base") == "Qwen/Qwen3-4B-Base"
    with pytest.raises(ValueError, match="no model at Qwen/Qwen3-4B-Base"):
        policy_shape("Qwen/Qwen3-4B-Base")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="no model at nobody/nothing: there is no such directory") as error:
        model_directory("nobody/nothing")
    assert "\n" not in str(error.value)
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: asked.extend(allow_patterns))
    model_directory("owner/name")
    assert {"*.json", "tokenizer.model", "merges.txt"} <= set(asked)  # the vocabulary in any form


def test_a_fetched_model_is_found_without_the_hub(monkeypatch, tmp_path):
    commit, model = "0" * 40, tmp_path / "hub/models--owner--name"
    snapshot = model / "snapshots" / commit
    for path, text in ((snapshot / "config.json", "{}"), (model / "refs/main", commit)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert Path(model_directory("owner/name")) == snapshot


def test_likeliest_tokens_are_counted_on_a_device():
    """There are 8 rows of 128 tokens in the batch, and twice 8 rows at work. Each has 5 likeliest tokens of 8 bytes."""
    sizes = {
        "data": {"batch_size": 2, "max_prompt_tokens": 10},
        "rollout": {"group_size": 4, "max_response_tokens": 90},
    }
    sizes |= {"packing": {"row_tokens": 128, "rows_per_micro_batch": 8}, "mesh": {"fsdp": 1}}
    plain = changed(Config(), **sizes)
    reported = changed(plain, rollout={"top_logprobs": 5})
    centered, mesh = changed(reported, correction={"score_centering": True}), shape_mesh(plain.mesh)
    assert planned_bytes(centered, TINY, mesh)["likeliest tokens"] == (3 * 8 * 128 * 40,) * 2
    for unread in (plain, reported):
        assert "likeliest tokens" not in planned_bytes(unread, TINY, mesh)
