"""Hints to XLA of ``rljax.policy.fusion``: they change layouts and no values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.fusion import features_last, opaque

GATE = jnp.arange(24.0).reshape(2, 3, 4)


def product(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = features_last(gate, up)
    return jnp.sum(jnp.sin(gate) * up)


def lowered_for(platform: str) -> str:
    return jax.jit(jax.grad(product, (0, 1))).trace(GATE, GATE).lower(lowering_platforms=(platform,)).as_text()


def test_a_tpu_keeps_the_features_of_a_token_together():
    # Both arrays and both gradients have the layout in which the last axis varies fastest.
    layouts = re.findall(r"@LayoutConstraint.*result_layouts = \[dense<\[(.*?)\]>", lowered_for("tpu"))
    assert layouts == ["2, 1, 0"] * 4


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_other_platforms_choose_their_layouts(platform: str):
    assert "LayoutConstraint" not in lowered_for(platform)


@pytest.mark.parametrize("hint", [opaque, features_last])
def test_a_hint_changes_no_value_and_no_gradient(hint):
    def gradients(of: Callable[..., Any]) -> tuple[jax.Array, ...]:
        def summed(gate: jax.Array, up: jax.Array) -> jax.Array:
            gate, up = of(gate, up)
            return jnp.sum(jnp.sin(gate) * up)

        return jax.grad(summed, (0, 1))(GATE, 2 * GATE)

    for got, expected in zip(hint(GATE, 2 * GATE), (GATE, 2 * GATE), strict=True):
        np.testing.assert_array_equal(got, expected)
    for got, expected in zip(gradients(hint), gradients(lambda *each: each), strict=True):
        np.testing.assert_array_equal(got, expected)
