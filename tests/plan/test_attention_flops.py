from rljax.plan.kernels import attention_flops


def test_flops_by_hand():
    # 2 tokens have 3 pairs and 1 token has one. So a product has 4 pairs x 3 heads x 5 multiply-adds = 120 operations.
    assert attention_flops([2, 1], num_heads=3, head_dim=5) == (2 * 120, 5 * 120)


def test_no_segment_needs_nothing():
    assert attention_flops([], num_heads=3, head_dim=5) == (0, 0)
