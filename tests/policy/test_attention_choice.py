"""``policy.attention`` gives an implementation by the mesh's devices, the dtype and the heads."""

from types import SimpleNamespace

import jax
import pytest

from rljax.policy.attention import choose_attention, packed_attention
from rljax.policy.cudnn import cudnn_attention
from rljax.policy.splash import splash_attention

CPU = jax.devices("cpu")[0]
H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
B200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
RTX5090 = SimpleNamespace(platform="gpu", device_kind="NVIDIA GeForce RTX 5090", compute_capability="12.0")
V5P = SimpleNamespace(platform="tpu", device_kind="TPU v5")


def test_each_is_given_where_it_runs():
    assert choose_attention("xla", CPU, "float32", 12) is packed_attention
    assert choose_attention("cudnn", H100, "bfloat16", 128) is cudnn_attention
    assert choose_attention("cudnn", B200, "float16", 64) is cudnn_attention
    assert choose_attention("splash", V5P, "bfloat16", 128) is splash_attention


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim"),
    [
        (CPU, "bfloat16", 128),
        (A100, "bfloat16", 128),
        (RTX5090, "bfloat16", 128),
        (H100, "float32", 128),
        (V5P, "float16", 128),
        (V5P, "bfloat16", 64),
    ],
)
def test_auto_is_xla_where_no_kernel_fits(device, dtype, head_dim):
    assert choose_attention("auto", device, dtype, head_dim) is packed_attention


@pytest.mark.parametrize("device", [H100, V5P])
def test_auto_is_the_kernel_of_the_backend(device):
    assert choose_attention("auto", device, "bfloat16", 128) is not packed_attention


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "message"),
    [
        (
            "cudnn",
            CPU,
            "bfloat16",
            128,
            "policy.attention = cudnn needs an NVIDIA GPU, got cpu; auto chooses one that fits",
        ),
        ("cudnn", A100, "bfloat16", 128, r"needs compute capability 9.0, got 8.0 \(NVIDIA A100\)"),
        ("cudnn", H100, "float32", 128, "needs bfloat16 or float16, got float32"),
        ("cudnn", H100, "bfloat16", 260, "needs a head width of at most 256 that is a multiple of 8, got 260"),
        ("splash", H100, "bfloat16", 128, "needs a TPU, got NVIDIA H100"),
        ("splash", V5P, "float16", 128, "needs bfloat16, got float16"),
        ("splash", V5P, "bfloat16", 64, "needs a head width that is a multiple of 128, got 64"),
    ],
)
def test_what_the_device_lacks_is_refused(name, device, dtype, head_dim, message):
    with pytest.raises(ValueError, match=message):
        choose_attention(name, device, dtype, head_dim)
