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


def arguments_of(schedule, **settings):
    """Returns the training arguments of the recipe, with this function for ``length_decay_schedule``."""
    names = {"TrainingArguments": easydel.TrainingArguments, "length_decay_schedule": schedule}
    return run_block("schedule.md", "# EasyDeL", settings={"weight_decay": 0.0} | settings, **names)["arguments"]


def test_easydels_optimizer_has_the_rates_of_the_schedule(tmp_path):
    made = arguments_of(length_decay_schedule, save_directory=str(tmp_path), optimizer="adamw")
    _, scheduler = made.get_optimizer_and_scheduler(400)
    expected = np.float32([max(1e-6 * 0.5 ** (update // 198), 1e-7) for update in range(1, 401)])
    np.testing.assert_array_equal([scheduler(count) for count in range(400)], expected)


def test_each_step_of_easydel_moves_the_weights_by_the_rate(tmp_path):
    """Lion moves every weight by the rate. Another initial rate and period need fewer steps than the recipe's."""
    steps, period, initial = 9, 3, 1e-2
    sizes = {"max_training_steps": steps, "num_train_epochs": steps, "total_batch_size": 4, "max_length": 8}
    quiet = {"do_last_save": False, "use_wandb": False, "report_metrics": False, "progress_bar_type": "json"}
    made = arguments_of(
        lambda init_value, decay_period: length_decay_schedule(initial, period),
        save_directory=str(tmp_path),
        optimizer="lion",
        **sizes,
        **quiet,
    )
    widths = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = easydel.LlamaConfig(**widths, **heads, attn_mechanism="vanilla")
    model = easydel.LlamaForCausalLM(config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 32, (16, 8)).tolist()
    data = Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * 8] * len(tokens)})
    weights = [jax.device_get(jax.tree.leaves(model.to_state().graphstate))]

    class Watched(easydel.Trainer):
        def on_step_end(self, state, metrics, step):
            weights.append(jax.device_get(jax.tree.leaves(state.graphstate)))
            return super().on_step_end(state, metrics, step)

    Watched(arguments=made, model=model, dataset_train=data).train()
    assert len(weights) == 1 + steps
    for step, (before, after) in enumerate(itertools.pairwise(weights), start=1):
        moves = np.concatenate([np.abs(b - a).reshape(-1) for a, b in zip(before, after, strict=True)])
        # Its Lion has a small decay, which the median of small weights does not show. A token that no row has is not
        # moved.
        np.testing.assert_allclose(np.median(moves[moves > 0]), initial * 0.5 ** (step // period), rtol=2e-4)
