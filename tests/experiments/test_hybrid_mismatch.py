"""The rules of ``experiments/hybrid_mismatch.py`` differ in what their names say. Its tables are worked by hand."""

import itertools

import jax.numpy as jnp
import numpy as np
from hybrid_mismatch import PIECE, STATES, TOKENS, rule_of, tables

from rljax.policy.delta_net import DeltaTokens, chunked, recurrent


def tokens_of(t):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, t, 3, 8)).astype(np.float32) / 3 for _ in range(3))
    decay, rate = -rng.uniform(1e-4, 1e-2, (2, t, 3)), rng.uniform(0, 1, (2, t, 3))
    rest = (jnp.asarray(x, jnp.float32) for x in (decay, rate))
    return DeltaTokens(*map(jnp.asarray, (q, k, v)), *rest, jnp.zeros((2, t), bool)), jnp.zeros((2, 3, 8, 8))


def test_only_the_rounded_state_differs():
    tokens, state = tokens_of(128)
    for form, rule, far in (("recurrent", recurrent, 2e-2), ("chunked", chunked, 3.5e-3)):
        y, after = rule(tokens, state)
        kept = rule_of(form, "float32")(tokens, state)
        np.testing.assert_allclose(kept[0], y, atol=5e-7)
        np.testing.assert_allclose(kept[1], after, atol=5e-7)
        rounded = rule_of(form, "bfloat16")(tokens, state)
        np.testing.assert_array_equal(rounded[1], rounded[1].astype(jnp.bfloat16).astype(jnp.float32))
        assert 1e-4 < np.abs(rounded[0] - kept[0]).max() < far
        np.testing.assert_array_equal(rounded[0][:, 0], kept[0][:, 0])  # nothing was handed on before the first token
    control, chunks = (rule_of(form, "float32")(tokens, state)[0] for form in ("control", "chunked"))
    np.testing.assert_array_equal(control, chunks)


def test_the_share_and_the_growth_of_six_models(capsys):
    """Model i has gaps of 1 with a float32 state. With a bfloat16 state they are 2 + i, and twice that at last."""
    arm = {"engine": "jax", "dtype": "float32", "path": "decode", "form": "recurrent", "width": 256}
    rows = []
    for model, state, start in itertools.product(range(6), STATES, range(0, TOKENS, PIECE)):
        gap = 1.0 if state == "float32" else (2.0 + model) * (1 + (start == TOKENS - PIECE))
        names = {"seed": model, "state": state, "sequence": 0, "from": start, "tokens": 4}
        rows.append(arm | names | {"gap": gap, "k3": gap})
    tables(rows)
    said = capsys.readouterr().out
    # The share is 1 - 8 / (9 (2 + i)): from 5/9 to 55/63. The median lies half-way between 7/9 and 37/45.
    assert "share of the state's dtype: jax, float32, decode, recurrent, gap: 0.8 (0.556 to 0.873)" in said
    assert "growth: jax, float32, decode, recurrent, bfloat16: 2 (2 to 2)" in said
