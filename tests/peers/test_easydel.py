"""The recipe of docs/schedule.md for EasyDeL runs with its own training arguments, optimizer and trainer."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import run_block

from rljax.schedule import length_decay_schedule

pytest.importorskip("easydel")

import easydel
from datasets import Dataset
from flax import nnx


def test_easydels_optimizer_follows_the_schedule(tmp_path):
    space = run_block(
        "schedule.md",
        "# EasyDeL",
        TrainingArguments=easydel.TrainingArguments,
        length_decay_schedule=length_decay_schedule,
        settings={"save_directory": str(tmp_path), "optimizer": "adamw", "weight_decay": 0.0},
    )
    optimizer, scheduler = space["arguments"].get_optimizer_and_scheduler(400)
    expected = np.float32([max(1e-6 * 0.5 ** (update // 198), 1e-7) for update in range(1, 401)])
    np.testing.assert_array_equal([scheduler(count) for count in range(400)], expected)
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    for count in range(200):
        updates, state = optimizer.update({"w": jnp.ones(3)}, state, params)
        # With equal gradients, Adam moves every weight by the rate.
        np.testing.assert_allclose(updates["w"], -expected[count], rtol=1e-4)


def test_each_step_of_easydel_moves_the_weights_by_the_rate(tmp_path):
    """Lion moves every weight by the rate.

    The initial rate and the period differ from the recipe, so that few steps suffice.
    """
    steps, period, initial = 9, 3, 1e-2
    settings = {
        "save_directory": str(tmp_path),
        "optimizer": "lion",
        "weight_decay": 0.0,
        "max_training_steps": steps,
        "num_train_epochs": steps,
        "total_batch_size": 4,
        "max_length": 8,
        "do_last_save": False,
        "use_wandb": False,
        "report_metrics": False,
        "progress_bar_type": "json",
    }
    space = run_block(
        "schedule.md",
        "# EasyDeL",
        TrainingArguments=easydel.TrainingArguments,
        length_decay_schedule=lambda init_value, decay_period: length_decay_schedule(initial, period),
        settings=settings,
    )
    config = easydel.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        attn_mechanism="vanilla",
    )
    model = easydel.LlamaForCausalLM(config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 32, (16, 8)).tolist()
    data = Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * 8] * len(tokens)})
    weights = [jax.device_get(jax.tree.leaves(model.to_state().graphstate))]

    class Watched(easydel.Trainer):
        def on_step_end(self, state, metrics, step):
            weights.append(jax.device_get(jax.tree.leaves(state.graphstate)))
            return super().on_step_end(state, metrics, step)

    Watched(arguments=space["arguments"], model=model, dataset_train=data).train()
    assert len(weights) == 1 + steps
    for step, (before, after) in enumerate(itertools.pairwise(weights), start=1):
        moves = np.concatenate([np.abs(b - a).reshape(-1) for a, b in zip(before, after, strict=True)])
        # Its Lion has a small decay, which the median of small weights does not show. A token that no row has is not
        # moved.
        np.testing.assert_allclose(np.median(moves[moves > 0]), initial * 0.5 ** (step // period), rtol=2e-4)
