"""``policy.attention`` and ``policy.experts`` give implementations by the devices, the dtype and the sizes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rljax.policy.attention import choose_attention, packed_attention
from rljax.policy.config import DEFAULTS, PolicyConfig
from rljax.policy.context import fold, heads_of_device
from rljax.policy.cudnn import cudnn_attention
from rljax.policy.grouped import IMPLEMENTATIONS, choose_experts
from rljax.policy.kernels import MAX_UNROLLED, check_mesh, choose_kernels
from rljax.policy.rotary import rotate, rotate_by_product
from rljax.policy.splash import splash_attention
from rljax.sharding import MESH_AXES

CPU = jax.devices("cpu")[0]
H100, B200, A100, RTX5090 = (
    SimpleNamespace(platform="gpu", device_kind=f"NVIDIA {name}", compute_capability=capability)
    for name, capability in (("H100", "9.0"), ("B200", "10.0"), ("A100", "8.0"), ("RTX 5090", "12.0"))
)
V5P = SimpleNamespace(platform="tpu", device_kind="TPU v5")
WIDE = (2048, 768)
CASES = [
    (choose_attention, "xla", CPU, "float32", 12, packed_attention),
    (choose_attention, "cudnn", H100, "bfloat16", 128, cudnn_attention),
    (choose_attention, "cudnn", B200, "float16", 64, cudnn_attention),
    (choose_attention, "splash", V5P, "bfloat16", 128, splash_attention),
    *((choose_attention, "auto", device, "bfloat16", 128, None) for device in (H100, V5P)),  # its kernel, or one piece
    *((choose_attention, "auto", device, "bfloat16", 128, packed_attention) for device in (CPU, A100, RTX5090)),
    (choose_attention, "auto", H100, "float32", 128, packed_attention),
    (choose_attention, "auto", V5P, "float16", 128, packed_attention),
    (choose_attention, "auto", V5P, "bfloat16", 64, packed_attention),
    (choose_experts, "auto", H100, "bfloat16", WIDE, IMPLEMENTATIONS["mosaic"]),
    (choose_experts, "auto", H100, "float32", WIDE, IMPLEMENTATIONS["xla"]),
    (choose_experts, "auto", H100, "float16", (2048, 96), IMPLEMENTATIONS["xla"]),
    *((choose_experts, "auto", device, "bfloat16", WIDE, IMPLEMENTATIONS["xla"]) for device in (CPU, A100)),
    (choose_experts, "auto", V5P, "bfloat16", WIDE, IMPLEMENTATIONS["ragged"]),
]
REFUSED = [
    (choose_attention, "cudnn", CPU, "bfloat16", 128, "needs an NVIDIA GPU, got cpu; auto chooses one that fits"),
    (choose_attention, "cudnn", A100, "bfloat16", 128, r"needs compute capability 9.0, got 8.0 \(NVIDIA A100\)"),
    (choose_attention, "cudnn", H100, "float32", 128, "needs bfloat16 or float16, got float32"),
    (choose_attention, "cudnn", H100, "bfloat16", 260, "needs a head width of at most 256 .* multiple of 8, got 260"),
    (choose_attention, "splash", H100, "bfloat16", 128, "needs a TPU, got NVIDIA H100"),
    (choose_attention, "splash", V5P, "float16", 128, "needs bfloat16, got float16"),
    (choose_attention, "splash", V5P, "bfloat16", 64, "needs a head width that is a multiple of 128, got 64"),
    (choose_experts, "mosaic", A100, "bfloat16", WIDE, "needs an NVIDIA Hopper GPU, got NVIDIA A100"),
    (choose_experts, "mosaic", H100, "float32", WIDE, "needs bfloat16 or float16, got float32"),
    (choose_experts, "mosaic", H100, "bfloat16", (2048, 96), "needs widths that are multiples of 128"),
    (choose_experts, "ragged", CPU, "bfloat16", WIDE, "needs a TPU, got cpu"),
]


@pytest.mark.parametrize(("choose", "name", "device", "dtype", "sizes", "expected"), CASES)
def test_each_is_given_where_it_runs(choose, name, device, dtype, sizes, expected):
    found = choose(name, device, dtype, sizes)
    assert found is expected or (expected is None and found is not packed_attention)


@pytest.mark.parametrize(("choose", "name", "device", "dtype", "sizes", "message"), REFUSED)
def test_what_the_device_lacks_is_refused(choose, name, device, dtype, sizes, message):
    key = "attention" if choose is choose_attention else "experts"
    with pytest.raises(ValueError, match=f"^policy.{key} = {name} {message}"):
        choose(name, device, dtype, sizes)


def test_devices_that_share_a_row_split_its_heads():
    """They have whole groups of query heads, or heads of one group, and some may have fewer."""
    cases = {(8, 32, 8): 4, (16, 32, 8): 2, (8, 40, 8): 5, (8, 12, 2): 2, (4, 12, 2): 3, (16, 12, 2): 1}
    assert {case: heads_of_device(*case) for case in cases} == cases
    mesh = SimpleNamespace(shape=dict.fromkeys(MESH_AXES, 1) | {"context": 3, "tp": 2})
    said = "mesh.context = 3 must divide the 4 key-value heads of a device, or be at least 4; set it to 2"
    with pytest.raises(ValueError, match=said):
        check_mesh(PolicyConfig(16, 8, 16, 3, 16, 8, 4), mesh)
    with pytest.raises(ValueError, match=r"mesh.context = 3 splits rows into 3 pieces.* got 1 rows of 8 tokens"):
        fold(np.zeros((1, 8)), 3)


def test_only_a_cpu_or_a_tpu_gets_the_forms_made_for_it():
    """The devices of the mesh decide. A program for a GPU or a TPU may be compiled on a machine with only a CPU."""
    for devices, dtype, expected in (
        ([CPU], "bfloat16", (MAX_UNROLLED, True, rotate)),
        ([CPU] * 2, "bfloat16", (0, False, rotate)),
        ([H100], "bfloat16", (0, False, rotate)),
        ([V5P], "bfloat16", (0, False, rotate_by_product)),
        ([V5P], "float16", (0, False, rotate)),
    ):
        mesh = SimpleNamespace(devices=np.array(devices), shape=dict.fromkeys(MESH_AXES, 1))
        kernels = choose_kernels(DEFAULTS, PolicyConfig(16, 8, 16, 3, 2, 1, 4), dtype, mesh)
        assert (kernels.unrolled, kernels.stored_logits, kernels.rotate) == expected, devices
