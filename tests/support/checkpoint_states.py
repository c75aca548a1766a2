"""States of a checkpoint for tests."""

import jax
import jax.numpy as jnp
import numpy as np


def state(step: int) -> dict[str, jax.Array]:
    """Returns a state whose noise is random bits.

    Such bits do not compress, so the format stores them unchanged and does not notice a flipped bit.
    """
    draw = np.random.default_rng(step)
    noise = jnp.asarray(draw.standard_normal((64, 300)), jnp.float32)
    return {"noise": noise, "half": noise[:5].astype(jnp.bfloat16), "count": jnp.int32(step), "flag": jnp.array(True)}
