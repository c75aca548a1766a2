"""Uses the length-triggered schedule in a plain optax loop.

    pip install '.[optax]' && python examples/optax_loop.py

This needs only jax, optax and numpy. The policy is one number: the logit of going on after each token. A response earns
1 if it has at least 24 tokens and stays below the limit of 64, so REINFORCE makes responses longer. The tracker calls
the surge and sets the decay period to 1.8 times that step; the rate is halved at every multiple of the period. Four
lines of the loop, marked with an arrow, belong to the schedule.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax.schedule import LengthTriggeredLR, get_learning_rate, inject_learning_rate, set_learning_rate

BATCH = 256  # responses per step
LIMIT = 64  # tokens; a longer response is cut off
ENOUGH = 24  # tokens; a shorter response earns nothing

Row = dict[str, Any]


def loss(logit: jax.Array, lengths: jax.Array, advantages: jax.Array) -> jax.Array:
    """Computes the REINFORCE loss: minus the mean of advantage x log-probability of the length; arrays are [b]."""
    logprobs = (lengths - 1) * jax.nn.log_sigmoid(logit) + jax.nn.log_sigmoid(-logit)
    return -jnp.mean(advantages * logprobs)


def train(steps: int = 240, learning_rate: float = 0.03, seed: int = 0) -> list[Row]:
    """Trains the one-number policy and returns one row for each step."""
    rng = np.random.default_rng(seed)
    logit = jnp.float32(1.0)  # mean length 3.7
    optimizer = inject_learning_rate(optax.adamw, learning_rate)  # <-- instead of optax.adamw(learning_rate)
    opt_state = optimizer.init(logit)
    controller = LengthTriggeredLR(learning_rate)  # <-- holds the tracker; state_dict() goes into a checkpoint

    @jax.jit
    def update(logit: jax.Array, opt_state: Any, lengths: jax.Array, advantages: jax.Array) -> tuple[jax.Array, Any]:
        gradient = jax.grad(loss)(logit, lengths, advantages)
        change, opt_state = optimizer.update(gradient, opt_state, logit)
        return optax.apply_updates(logit, change), opt_state

    rows = []
    for step in range(1, steps + 1):
        going_on = float(jax.nn.sigmoid(logit))
        lengths = np.minimum(rng.geometric(1.0 - going_on, BATCH), LIMIT)
        rewards = ((lengths >= ENOUGH) & (lengths < LIMIT)).astype(np.float32)
        rate = controller.step(lengths.mean(), truncated_fraction=np.mean(lengths == LIMIT))  # <-- before the update
        opt_state = set_learning_rate(opt_state, rate)  # <-- the rate of this update; nothing is traced again
        logit, opt_state = update(logit, opt_state, lengths.astype(np.float32), rewards - rewards.mean())
        rows.append(
            {
                "step": step,
                "length": float(lengths.mean()),
                "reward": float(rewards.mean()),
                "learning_rate": float(get_learning_rate(opt_state)),
                "surge_step": controller.surge_step,
                "decay_period": controller.decay_period,
            }
        )
    return rows


def main() -> None:
    """Prints every tenth row."""
    print("step  mean length  reward  learning rate  surge step  decay period")
    for row in train():
        if row["step"] % 10 == 0:
            surge, period = row["surge_step"] or "-", row["decay_period"] or "-"
            print(
                f"{row['step']:4}  {row['length']:11.1f}  {row['reward']:6.2f}  {row['learning_rate']:13.4f}"
                f"  {surge:>10}  {period:>12}"
            )


if __name__ == "__main__":
    main()
