"""The plan's bytes of a step's work, by hand and beside the compiler's (marker compilers, in test_compile.py)."""

import dataclasses

import pytest
from changed_configs import changed

from rljax.plan.dry_run import planned_bytes, shape_mesh, state_bytes
from rljax.plan.memory import block_bytes, head_bytes, kept_by_a_block, local_policy, planned_attention, working_bytes
from rljax.policy.attention import packed_attention
from rljax.policy.config import PolicyConfig
from rljax.policy.hub import KNOWN_SHAPES
from rljax.run.config import Config
from rljax.run.packing import with_separate_rows
from rljax.sharding import MeshConfig, make_mesh

POLICY = PolicyConfig(32, 16, 48, 3, 4, 2, 8)


def config(**precision):
    return changed(
        Config(),
        data={"batch_size": 2, "max_prompt_tokens": 4},
        rollout={"group_size": 8, "max_response_tokens": 60},
        packing={"row_tokens": 64, "rows_per_micro_batch": 8},
        precision=precision,
        mesh={"fsdp": 4, "tp": 2},
    )


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


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_blocks_keep_their_input(dtype, size):
    kept = kept_by_a_block(POLICY, 2, 64, config(compute_dtype=dtype, remat=True))
    scales = 2 * (2 * 16 + 2 * 8) * size  # the scales of norms, one for each row, and some more for the gradients
    assert 0 <= kept - 2 * 64 * 16 * size <= 2 * scales


def test_with_adapters_only_their_weights_have_a_gradient():
    mesh = make_mesh(MeshConfig(1, 1))
    one = changed(config(), mesh={"fsdp": 1, "tp": 1}, packing={"row_tokens": 64, "rows_per_micro_batch": 1})
    lora = changed(one, lora={"rank": 2, "targets": ("gate_proj",)})
    places = 64
    head = head_bytes(POLICY, mesh, places, 2)
    at_work = working_bytes(lora, POLICY, mesh)["at work in a micro-batch"]
    block = block_bytes(local_policy(POLICY, mesh), places, 2)
    assert at_work == max(head, block + 2 * 3 * 16 * 48)


@pytest.mark.parametrize(("vocab_size", "is_stored"), [(2**21, True), (2**22, False)], ids=["2^27", "2^28"])
def test_a_cpu_keeps_up_to_2_to_the_27_logits(vocab_size, is_stored):
    """A row has 64 tokens. The mesh without devices is planned as cards, which keep no logits."""
    policy = dataclasses.replace(POLICY, vocab_size=vocab_size)
    one = changed(config(), mesh={"fsdp": 1, "tp": 1}, packing={"row_tokens": 64, "rows_per_micro_batch": 1})
    meshes = make_mesh(MeshConfig(1, 1)), shape_mesh(MeshConfig(1, 1))
    cpu, card = (working_bytes(one, policy, mesh)["at work in a micro-batch"] for mesh in meshes)
    assert cpu == (head_bytes(policy, meshes[0], 64, 2) + 4 * 64 * vocab_size if is_stored else card)


def test_the_head_sees_only_responses_where_prompts_are_shared():
    """Rows of 256 tokens hold up to 192 of responses. A CPU keeps so many logits of this vocabulary, and not 256."""
    mesh, policy = make_mesh(MeshConfig(1, 1)), dataclasses.replace(POLICY, vocab_size=600_000)
    shared = changed(
        config(),
        data={"max_prompt_tokens": 128},
        rollout={"group_size": 2},
        mesh={"fsdp": 1, "tp": 1},
        packing={"row_tokens": 256, "rows_per_micro_batch": 1},
    )
    trees, apart = (
        working_bytes(each, policy, mesh)["at work in a micro-batch"] for each in (shared, with_separate_rows(shared))
    )
    assert trees == head_bytes(policy, mesh, 192, 2) + 4 * 192 * 600_000
    assert apart < 4 * 192 * 600_000


def test_other_remats_keep_more_or_none():
    policies = ("offload", "blocks", "dots", "none")
    kept = [kept_by_a_block(POLICY, 2, 64, config(remat=remat)) for remat in policies]
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
        whole, halved = (kept_by_a_block(POLICY, 2, 64, config(remat=remat), ways=ways) for ways in (1, 2))
        saved[remat] = whole - halved
    assert (saved["blocks"], saved["dots"], saved["none"] % width) == (width // 2, width, 0)
    assert saved["none"] > 2 * width


@pytest.mark.parametrize("remat", ["blocks", "dots", "none"])
@pytest.mark.parametrize("shares", [False, True])
def test_cudnn_keeps_queries_again_and_the_sums_of_each_segment(shares, remat):
    """There is a log-sum-exp for each of up to 16 segments, but only a joined one of trees."""
    wanted = changed(config(remat=remat), packing={"share_prefixes": shares})
    cudnn = planned_attention(wanted, POLICY, shape_mesh(MeshConfig(1, 1)))
    more = kept_by_a_block(POLICY, 2, 2048, wanted, cudnn) - kept_by_a_block(POLICY, 2, 2048, wanted)
    queries, sums = 2 * 2048 * 4 * 8 * 2, 2 * 2048 * 4 * 4
    assert more == {"blocks": 0, "dots": queries + shares * sums, "none": queries + (not shares) * 15 * sums}[remat]


def test_attention_is_planned_for_the_devices():
    wanted, abstract = config(compute_dtype="bfloat16"), shape_mesh(MeshConfig(1, 1))
    assert planned_attention(wanted, POLICY, abstract) is not packed_attention
    assert planned_attention(wanted, POLICY, make_mesh(MeshConfig(1, 1))) is packed_attention  # a CPU
    in_float32 = config(compute_dtype="float32")
    assert planned_attention(in_float32, POLICY, abstract) is packed_attention
    for name in ("xla", "splash"):
        asked = changed(wanted, policy={"attention": name})
        assert planned_attention(asked, POLICY, abstract) is packed_attention
    with pytest.raises(ValueError, match=r"policy\.attention = cudnn needs bfloat16 or float16"):
        planned_attention(changed(in_float32, policy={"attention": "cudnn"}), POLICY, abstract)


def test_work_by_hand():
    """A device has two rows of 64 tokens, which are 128 places, and half of the heads, the MLP and the vocabulary."""
    wanted, mesh = config(remat=True), shape_mesh(MeshConfig(4, 2))
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
