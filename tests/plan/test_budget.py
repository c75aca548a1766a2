"""Tests of a run's demands by hand: a step's bytes, the host, disks, and the settings named in a shortage."""

import dataclasses

import jax
import pytest
from changed_configs import changed

from rljax.plan.budget import (
    H100,
    PROCESS_BYTES,
    Devices,
    device_demands,
    disk_demands,
    find_devices,
    host_demand,
    plan_decoding,
    resident_bytes,
    saved_bytes,
    top_bytes,
)
from rljax.plan.dry_run import dry_run, lacks_at_start, planned_bytes, shape_mesh, state_bytes
from rljax.plan.memory import block_bytes, head_bytes, kept_by_a_block, local_policy, planned_attention, working_bytes
from rljax.policy.attention import packed_attention
from rljax.policy.config import PolicyConfig
from rljax.policy.hub import KNOWN_SHAPES
from rljax.rollout.decode_sizes import cache_row_bytes, free_cache_room
from rljax.run.config import Config
from rljax.run.packing import with_separate_rows
from rljax.sharding import MeshConfig, make_mesh

TINY = PolicyConfig(24, 32, 64, 3, 4, 2, 8, tie_word_embeddings=True)
COUNT = 24 * 32 + 3 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64 + 2 * 32 + 2 * 8) + 32
GPU = Devices(4, True, "a GPU", 10**6)
CPU = Devices(1, True, "a CPU", None)
QWEN = "Qwen/Qwen3-4B-Base"


def tiny(**rollout):
    sizes = {"group_size": 4, "max_response_tokens": 90, **rollout}
    return changed(Config(), data={"batch_size": 2, "max_prompt_tokens": 10}, mesh={"fsdp": 1}, rollout=sizes)


def sizes_of(config):
    return state_bytes(config, TINY, shape_mesh(config.mesh))


def test_the_cache_that_decode_tokens_allow():
    """A token has 3 layers x 2 heads x 8 x 2 (k, v) of 2 bytes. The 10 rows of 2 x 5 trajectories are padded to 12."""
    turns, eight_bits = {"group_size": 5, "environment": "package.module:Class"}, {"kv_cache_dtype": "fp8_e5m2"}
    cases = [(tokens, slots, {}) for tokens, slots in ((1000, 8), (800, 8), (799, 7), (399, 3), (1, 1))]
    for tokens, slots, rollout in [*cases, (10_000, 12, turns), (799, 7, turns), (800, 8, eight_bits)]:
        config = tiny(decode_tokens=tokens, **rollout)
        found = plan_decoding(config, TINY, shape_mesh(config.mesh), GPU, 0)
        assert found == (slots, 100, slots * 100 * (96 if rollout is eight_bits else 192))


def test_without_decode_tokens_a_gpu_gives_seven_tenths():
    """857,000 of 10^6 bytes are taken. The tokens are 0.7 x 143,000 / 192 = 521, which hold 5 responses of 100."""
    config, mesh = tiny(), shape_mesh(tiny().mesh)
    assert plan_decoding(config, TINY, mesh, GPU, 857_000).slots == 5
    assert plan_decoding(config, TINY, mesh, GPU, 2_000_000).slots == 1  # a batch has at least one response


def test_on_a_cpu_the_plan_is_the_engine_s_own_choice():
    mesh = make_mesh(MeshConfig(1, 1), jax.devices()[:1])
    places = 2**22
    config = tiny(group_size=1024, max_response_tokens=places - 10)
    room = free_cache_room(make_mesh(MeshConfig(jax.device_count(), 1)))
    rows = int(room / cache_row_bytes(TINY, mesh, places, "bfloat16", "bfloat16"))
    found = plan_decoding(config, TINY, mesh, CPU, 0)
    assert abs(found.slots - rows) <= 1 + rows // 8


def test_between_updates_there_are_masters_moments_and_engine():
    kl = changed(tiny(), loss={"kl": "k3", "kl_coefficient": 0.1})
    for config, per_parameter in ((tiny(), 4 + 8 + 2), (kl, 4 + 8 + 2 + 4)):
        assert 0 <= resident_bytes(sizes_of(config)) - per_parameter * COUNT <= 32
    assert 0 <= saved_bytes(sizes_of(kl))[0] - 12 * COUNT <= 32


def test_a_device_that_is_too_small_is_told_of_settings():
    config = changed(tiny(decode_tokens=800), precision={"remat": "dots"}, packing={"tokens_per_device": 128})
    config = changed(config, mesh={"keep_gathered": True})
    decoding = plan_decoding(config, TINY, shape_mesh(config.mesh), GPU, 0)
    training, sampling = device_demands(config, GPU, 999_999, 10**6 - 8 * 100 * 192 + 1, decoding)
    assert training.fits
    assert (sampling.total, sampling.fits) == (10**6 + 1, False)
    assert "rollout.decode_tokens below 800" in sampling.remedy
    (training,) = device_demands(config, GPU, 10**6 + 1, 0, None)
    assert not training.fits
    assert training.remedy == (
        "mesh.keep_gathered: false, precision.remat: blocks, a larger mesh.fsdp, adapters (lora.rank)"
    )
    assert device_demands(config, CPU, 10**18, 0, None) == []


def test_likeliest_tokens_are_on_the_host_and_on_devices():
    """8 responses of 90 tokens with 5 of 8 bytes take 28,800, in two batches. Packed they are 128 x 8 x 40."""
    config = changed(tiny(decode_tokens=800, top_logprobs=5, max_staleness=1), packing={"row_tokens": 128})
    mesh = shape_mesh(config.mesh)
    assert top_bytes(config) == 28_800
    decoding = plan_decoding(config, TINY, mesh, GPU, 0)
    _, sampling = device_demands(config, GPU, 0, 0, decoding)
    assert sampling.parts["likeliest tokens"] == 28_800
    host = host_demand(config, TINY, sizes_of(config), GPU, 0, decoding)
    assert host.parts["likeliest tokens"] == 2 * 28_800  # the loss needs none, so none are packed
    centered = changed(config, correction={"score_centering": True})
    host = host_demand(centered, TINY, sizes_of(config), GPU, 0, decoding)
    assert host.parts["likeliest tokens"] == 2 * 28_800 + 128 * 8 * 40
    assert "likeliest tokens" not in host_demand(tiny(), TINY, sizes_of(config), GPU, 0, decoding).parts


def test_a_host_of_servers_holds_versions_and_offloaded_state(tmp_path):
    config = tiny(engine="vllm", colocated=True, transfer_dir="/dev/shm")
    config = changed(config, publish={"store": "http"})
    sizes, gpu = sizes_of(config), GPU._replace(number=1)
    state = saved_bytes(sizes)[0]
    assert host_demand(config, TINY, sizes, gpu, 0, None).parts == {
        "the process": PROCESS_BYTES,
        "3 versions in /dev/shm": 3 * 2 * COUNT,
        "the last version for deltas": 2 * COUNT,
        "arrays between updates": 2 * state,
        "a checkpoint on its way": state,
    }
    on_disk = changed(config, rollout={"transfer_dir": str(tmp_path), "colocated": False}, publish={"store": "shared"})
    assert set(host_demand(on_disk, TINY, sizes, gpu, 0, None).parts) == {"the process", "a checkpoint on its way"}


def test_a_host_without_gpus_holds_the_arrays(monkeypatch):
    config = tiny(decode_tokens=800)
    decoding, sizes = plan_decoding(config, TINY, shape_mesh(config.mesh), CPU, 0), sizes_of(config)

    def arrays(each, update, planned):
        parts = host_demand(config, TINY, sizes, each, update, planned).parts
        assert parts.keys() == {"the process", "arrays of an update"}
        return parts["arrays of an update"]

    assert arrays(CPU, 50 * COUNT, decoding) == 50 * COUNT
    assert arrays(CPU, 0, decoding) == saved_bytes(sizes)[0] + 2 * COUNT + 8 * 100 * 192
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    assert arrays(CPU._replace(number=16), 1000, None) == 4 * 1000
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")  # two processes a host, with four devices each
    assert arrays(CPU._replace(number=16), 1000, None) == 8 * 1000


def test_a_host_of_a_larger_mesh_holds_eight_devices():
    config = changed(tiny(), mesh={"fsdp": 16})
    devices = find_devices(shape_mesh(config.mesh))
    assert devices == (16, False, H100.name, H100.memory_bytes)
    demand = host_demand(config, TINY, sizes_of(config), devices, 0, None)
    assert demand.free is None
    assert demand.parts["a checkpoint on its way"] == 8 * saved_bytes(sizes_of(config))[1]
    mesh = shape_mesh(MeshConfig(1, 1))
    assert find_devices(mesh, H100) == (1, False, H100.name, H100.memory_bytes)  # a card that is given
    assert find_devices(mesh)._replace(name="") == (1, True, "", None)


def test_disks_hold_checkpoints_and_versions(tmp_path):
    config = tiny(engine="vllm", transfer_dir=str(tmp_path / "new/weights"))
    config = changed(config, run={"dir": str(tmp_path / "run")}, checkpoint={"keep": 3, "keep_best": True})
    state = saved_bytes(sizes_of(config))[0]
    run, weights = disk_demands(config, TINY, sizes_of(config))
    assert run.parts == {"3 checkpoints": 3 * state, "the next one": state, "the best and the next best": 2 * state}
    assert weights.parts == {"2 versions": 2 * 2 * COUNT}
    assert None not in (run.free, weights.free)
    assert run.fits
    assert "checkpoint.keep" in run.remedy
    assert not list(tmp_path.iterdir())
    (alone,) = disk_demands(tiny(), TINY, sizes_of(config))
    assert alone.parts == {"2 checkpoints": 2 * state, "the next one": state}


def test_the_dry_run_ends_with_what_does_not_fit(tmp_path):
    served = {"engine": "vllm", "urls": ("http://nowhere:1",), "transfer_dir": str(tmp_path)}
    config = changed(Config(), run={"dir": str(tmp_path / "run")}, model={"path": QWEN}, rollout=served)
    config = changed(config, mesh={"fsdp": 4}, packing={"tokens_per_device": 9216}, precision={"remat": "none"})
    lines = dry_run(config).splitlines()
    (line,) = [line for line in lines if line.startswith("does not fit  in training: ")]
    assert line.endswith(
        "; free: 79.11 GiB on one NVIDIA H100 SXM 80 GB; "
        "try precision.remat: blocks, a larger mesh.fsdp, adapters (lora.rank)"
    )
    assert lines.index(line) > max(i for i, each in enumerate(lines) if each.startswith("sum "))
    assert "does not fit  while" not in dry_run(changed(config, precision={"remat": "blocks"}))
    # A start looks for room for large policies alone.
    (line, *_) = lacks_at_start(config, KNOWN_SHAPES[QWEN], shape_mesh(config.mesh))
    assert line.startswith("this run may not fit in training: arrays of an update ")
    assert lacks_at_start(config, TINY, shape_mesh(config.mesh)) == []


POLICY = PolicyConfig(32, 16, 48, 3, 4, 2, 8)
ONE_ROW = {"mesh": {"fsdp": 1, "tp": 1}, "packing": {"row_tokens": 64, "rows_per_micro_batch": 1}}


def of_step(**precision):
    sizes = {"data": {"batch_size": 2, "max_prompt_tokens": 4}, "rollout": {"group_size": 8, "max_response_tokens": 60}}
    sizes |= {"packing": {"row_tokens": 64, "rows_per_micro_batch": 8}, "mesh": {"fsdp": 4, "tp": 2}}
    return changed(Config(), **sizes, precision=precision)


def test_a_device_has_its_part_of_heads_and_mlp():
    part = local_policy(POLICY, shape_mesh(MeshConfig(4, 2)))
    assert (part.intermediate_size, part.num_heads, part.num_kv_heads, part.hidden_size) == (24, 2, 1, 16)
    # Two kv heads are not split over 4.
    whole = local_policy(POLICY, shape_mesh(MeshConfig(1, 4)))
    assert (whole.num_heads, whole.num_kv_heads) == (1, 1)
    # A value head is where its key head is: 16 key heads are split over 8, and not over 3.
    hybrid = KNOWN_SHAPES["Qwen/Qwen3.5-4B"]
    parts = (local_policy(hybrid, shape_mesh(MeshConfig(1, tp))) for tp in (8, 3))
    assert [(part.delta_key_heads, part.delta_value_heads) for part in parts] == [(2, 4), (16, 32)]


def test_with_adapters_only_their_weights_have_a_gradient():
    mesh = make_mesh(MeshConfig(1, 1))
    lora = changed(of_step(), **ONE_ROW, lora={"rank": 2, "targets": ("gate_proj",)})
    block = block_bytes(local_policy(POLICY, mesh), 64, 2) + 2 * 3 * 16 * 48
    assert working_bytes(lora, POLICY, mesh)["at work in a micro-batch"] == max(head_bytes(POLICY, mesh, 64, 2), block)


def test_a_cpu_keeps_up_to_2_to_the_27_logits():
    """A row has 64 tokens. The mesh without devices is planned as cards, which keep no logits."""
    meshes = make_mesh(MeshConfig(1, 1)), shape_mesh(MeshConfig(1, 1))
    for vocab_size, is_stored in ((2**21, True), (2**22, False)):
        policy, one = dataclasses.replace(POLICY, vocab_size=vocab_size), changed(of_step(), **ONE_ROW)
        cpu, card = (working_bytes(one, policy, mesh)["at work in a micro-batch"] for mesh in meshes)
        assert cpu == (head_bytes(policy, meshes[0], 64, 2) + 4 * 64 * vocab_size if is_stored else card)


def test_the_head_sees_only_responses_where_prompts_are_shared():
    """Rows of 256 tokens hold up to 192 of responses. A CPU keeps so many logits of this vocabulary, and not 256."""
    mesh, policy = make_mesh(MeshConfig(1, 1)), dataclasses.replace(POLICY, vocab_size=600_000)
    shared = changed(of_step(), **ONE_ROW, data={"max_prompt_tokens": 128}, rollout={"group_size": 2})
    shared = changed(shared, packing={"row_tokens": 256})
    trees, apart = (
        working_bytes(each, policy, mesh)["at work in a micro-batch"] for each in (shared, with_separate_rows(shared))
    )
    assert trees == head_bytes(policy, mesh, 192, 2) + 4 * 192 * 600_000
    assert apart < 4 * 192 * 600_000


def test_blocks_keep_their_input_and_other_remats_more_or_none():
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        kept = kept_by_a_block(POLICY, 2, 64, of_step(compute_dtype=dtype, remat=True))
        scales = 2 * (2 * 16 + 2 * 8) * size  # the scales of norms, one for each row, and some more for the gradients
        assert 0 <= kept - 2 * 64 * 16 * size <= 2 * scales
    policies = ("offload", "blocks", "dots", "none")
    kept = [kept_by_a_block(POLICY, 2, 64, of_step(remat=remat)) for remat in policies]
    assert kept[0] == 0
    assert kept == sorted(set(kept))
    # With dots a block keeps the input, and the products q, k, v, output, gate and up. No gradient needs the last
    # product.
    products = 2 * 64 * 2 * (16 + (4 + 2 + 2) * 8 + 16 + 48 + 48)
    assert 0 <= kept[2] - products <= 0.02 * products


def test_between_products_tokens_are_split():
    """Over two devices a block with remat blocks halves one kept array, and a block with dots two."""
    width, saved = 2 * 64 * 16 * 2, {}
    for remat in ("blocks", "dots", "none"):
        whole, halved = (kept_by_a_block(POLICY, 2, 64, of_step(remat=remat), ways=ways) for ways in (1, 2))
        saved[remat] = whole - halved
    assert (saved["blocks"], saved["dots"], saved["none"] % width) == (width // 2, width, 0)
    assert saved["none"] > 2 * width


@pytest.mark.parametrize("remat", ["blocks", "dots", "none"])
@pytest.mark.parametrize("shares", [False, True])
def test_cudnn_keeps_queries_again_and_the_sums_of_each_segment(shares, remat):
    """There is a log-sum-exp for each of up to 16 segments, but only a joined one of trees."""
    wanted = changed(of_step(remat=remat), packing={"share_prefixes": shares})
    cudnn = planned_attention(wanted, POLICY, shape_mesh(MeshConfig(1, 1)))
    more = kept_by_a_block(POLICY, 2, 2048, wanted, cudnn) - kept_by_a_block(POLICY, 2, 2048, wanted)
    queries, sums = 2 * 2048 * 4 * 8 * 2, 2 * 2048 * 4 * 4
    assert more == {"blocks": 0, "dots": queries + shares * sums, "none": queries + (not shares) * 15 * sums}[remat]


def test_attention_is_planned_for_the_devices():
    wanted, abstract = of_step(compute_dtype="bfloat16"), shape_mesh(MeshConfig(1, 1))
    assert planned_attention(wanted, POLICY, abstract) is not packed_attention
    assert planned_attention(wanted, POLICY, make_mesh(MeshConfig(1, 1))) is packed_attention  # a CPU
    in_float32 = of_step(compute_dtype="float32")
    assert planned_attention(in_float32, POLICY, abstract) is packed_attention
    for name in ("xla", "splash"):
        asked = changed(wanted, policy={"attention": name})
        assert planned_attention(asked, POLICY, abstract) is packed_attention
    with pytest.raises(ValueError, match=r"policy\.attention = cudnn needs bfloat16 or float16"):
        planned_attention(changed(in_float32, policy={"attention": "cudnn"}), POLICY, abstract)


def test_work_by_hand():
    """A device has two rows of 64 tokens, which are 128 places, and half of the heads, the MLP and the vocabulary."""
    wanted, mesh = of_step(remat=True), shape_mesh(MeshConfig(4, 2))
    found = working_bytes(wanted, POLICY, mesh)
    # 16 sequences of up to 64 tokens are 16 rows, in 2 micro-batches of 8.
    assert found["batch"] == 2 * 128 * (38 + 16)
    assert working_bytes(with_separate_rows(wanted), POLICY, mesh)["batch"] == 2 * 128 * 38
    # A device has half of the tokens of blocks' inputs. A block also keeps some bytes of each row.
    assert 0 <= found["kept for the backward pass"] - 3 * 128 * 16 * 2 // 2 <= 3 * 2 * 150
    part = local_policy(POLICY, mesh)
    block = 128 * (2 * (4 * 24 + 7 * 16 + 3 * 16) + 4 * 24) + 16 * 24 * (2 + 8)
    assert block_bytes(part, 128, 2) == block
    head = 128 * 16 * (8 + 2) + (128 + 16) * 16 * 8
    assert head_bytes(POLICY, mesh, 128, 2) == head
    copy = state_bytes(wanted, POLICY, mesh)["bfloat16 copy"][1]
    assert found["at work in a micro-batch"] == max(copy + block, head)
    work = {name: (8 * size, size) for name, size in found.items()}
    assert planned_bytes(wanted, POLICY, mesh) == state_bytes(wanted, POLICY, mesh) | work
