"""Compiles tunix's training step for a machine that is not here, and writes the compiled program.

    PYTHONPATH=. TUNIX_PYTHON experiments/compile_tunix.py MODEL MACHINE OUT [xla_KEY=VALUE ...]

It runs in an environment with tunix and the compilers of ``launch/install_compilers.sh``. MODEL is 4b or 8b, and
MACHINE is one of ``--compile``. The step is the one of tunix's ``Trainer`` with the loss of its GRPO learner, on the
devices that rljax compiles for. The prompt of each row has 1,024 tokens. tunix takes no other words, and
``peer_program.py`` describes the words for the compiler.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from peer_program import ROW_TOKENS, compile_peer

from rljax.plan.machines import Machine, topology_devices

PROMPT_TOKENS = 1024


def constrained(x: Any, axes: tuple[str | None, ...]) -> Any:
    """Constrains an activation as tunix's own ``shard`` does, but also in a process that has only CPUs."""
    from jax.interpreters import pxla

    mesh = pxla.thread_resources.env.physical_mesh
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))


def lower_tunix(model_name: str, machine: Machine, words: list[str]) -> jax.stages.Lowered:
    """Returns tunix's step, lowered for the machine. Raises ValueError if there are words for tunix."""
    if words:
        raise ValueError(f"tunix takes no settings, got {' '.join(words)}")
    devices = topology_devices(machine)  # this comes first, so that JAX runs on the CPU

    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import algo_core, function_registry  # noqa: F401
    from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
    from tunix.rl.trainer import Trainer
    from tunix.sft.peft_trainer import TrainingConfig

    qwen3.shard = constrained
    shape = getattr(qwen3.ModelConfig, f"qwen3_{model_name}")()
    shape.dtype, shape.param_dtype = jnp.bfloat16, jnp.float32
    shape.remat_config = qwen3.RematConfig.DECODER
    shape.use_flash_attention = machine.platform == "tpu"  # the kernel is for TPUs
    config = GRPOConfig(num_generations=2, num_iterations=1, beta=0.0, loss_agg_mode="token-mean")
    config.temperature = 1.0
    loss = function_registry.get_policy_loss_fn(config.policy_loss_fn)
    made = {}

    def build() -> Any:
        trainer = Trainer(
            model=qwen3.Qwen3(shape, rngs=nnx.Rngs(0)),
            optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.01)),
            training_config=TrainingConfig(eval_every_n_steps=10**9, max_steps=10**9),
            custom_checkpoint_metadata_fn=dict,
        )
        trainer.with_loss_fn(
            lambda model, example: loss(model, example, algo_config=config, pad_id=0, eos_id=2), has_aux=True
        )
        trainer.with_gen_model_input_fn(lambda example: {"example": example})
        made["graph"], state = nnx.split((trainer.model, trainer.optimizer))
        made["step"] = trainer.create_train_step_fn()
        return state

    mesh = jax.sharding.Mesh(np.array(devices).reshape(len(devices), 1), ("fsdp", "tp"))
    state = jax.eval_shape(build)

    def placed(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    state = jax.tree.map(placed, state, nnx.get_partition_spec(state))

    def rows(tokens: int | None, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        shape = (len(devices),) if tokens is None else (len(devices), tokens)
        return placed(jax.ShapeDtypeStruct(shape, dtype), jax.sharding.PartitionSpec("fsdp"))

    prompt, completion = rows(PROMPT_TOKENS), rows(ROW_TOKENS - PROMPT_TOKENS)
    example = TrainExample(
        prompt_ids=prompt,
        prompt_mask=prompt,
        completion_ids=completion,
        completion_mask=completion,
        advantages=rows(None, jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=rows(ROW_TOKENS - PROMPT_TOKENS, jnp.float32),
    )

    def step(state: Any, example: Any) -> Any:
        model, optimizer = nnx.merge(made["graph"], state)
        metrics = made["step"](model, optimizer, example)
        return nnx.state((model, optimizer)), metrics

    with mesh:
        return jax.jit(step, donate_argnums=0).lower(state, example)


if __name__ == "__main__":
    sys.exit(compile_peer(lower_tunix))
