"""The recipe of docs/schedule.md for tunix runs in tunix's own GRPO learner; a tiny model samples a surge."""

import jax
import numpy as np
import optax
import pytest
from pages import run_block
from surging import LENGTHS, RATES, early_controller

from rljax.schedule import get_learning_rate, inject_learning_rate, set_learning_rate

pytest.importorskip("tunix")

from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.rollout.mock_rollout import MockRollout
from tunix.sft.hooks import TrainingHooks

TOKENS = [round(length / 100) for length in LENGTHS]  # 10, then 40: the same surge in shorter texts
STEPS = 60


class Tokenizer:
    """A tokenizer whose tokens are letters."""

    def encode(self, text, **_):
        return [ord(letter) % 28 + 4 for letter in text]

    def decode(self, ids, **_):
        return "".join(chr(i + 60) for i in ids)

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


def scripted(batches):
    """Returns a rollout engine whose responses have a mean of ``TOKENS[n]`` tokens over the batches of update n."""

    class Scripted(MockRollout):
        calls = 0

        def generate(self, prompts, rollout_config, **_):
            step, batch = divmod(Scripted.calls, batches)
            Scripted.calls += 1
            # The batches of an update differ in length; only their mean is TOKENS.
            length = TOKENS[step] + (2 * batch - (batches - 1))
            tokens = [np.full(length, 5, np.int32) for _ in prompts]
            width = rollout_config.max_prompt_length
            padded = np.stack([np.pad([7, 8, 9], (width - 3, 0)) for _ in prompts]).astype(np.int32)
            texts = [f"{i}" for i in range(len(prompts))]
            return RolloutOutput(text=texts, logits=[], tokens=tokens, left_padded_prompt_tokens=padded, logprobs=None)

    return Scripted


@pytest.mark.parametrize(("micro_batches", "iterations"), [(1, 1), (2, 1), (2, 2)])
def test_the_rate_follows_the_lengths_in_tunix(micro_batches, iterations):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    sizes = {"num_layers": 1, "vocab_size": 32, "embed_dim": 8, "hidden_dim": 16}
    heads = {"num_heads": 2, "head_dim": 4, "num_kv_heads": 1, "rope_theta": 10_000}
    with mesh:
        shape = ModelConfig(**sizes, **heads, norm_eps=1e-6, use_tied_embedding=True)
        actor = Qwen3(shape, rngs=nnx.Rngs(0))
    training = RLTrainingConfig(
        actor_optimizer=inject_learning_rate(optax.adamw, 1e-6),
        eval_every_n_steps=10_000,
        max_steps=STEPS * iterations,
        mini_batch_size=micro_batches,
        train_micro_batch_size=1,
        rollout_micro_batch_size=1,
    )
    roles = dict.fromkeys([Role.ACTOR, Role.ROLLOUT], mesh)
    rollout = RolloutConfig(max_prompt_length=4, max_tokens_to_generate=48, kv_cache_size=64)
    configs = {"training_config": training, "rollout_config": rollout}
    engine = ClusterConfig(role_to_mesh=roles, rollout_engine=scripted(micro_batches), **configs)
    cluster = RLCluster(actor=actor, tokenizer=Tokenizer(), cluster_config=engine)
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=2, num_iterations=iterations, beta=0.0),
        reward_fns=lambda prompts, completions, **_: [float(text) for text in completions],
    )
    names = {"set_learning_rate": set_learning_rate, "LengthTriggeredLR": early_controller, "rl_cluster": cluster}
    trainer = run_block("schedule.md", "# tunix", TrainingHooks=TrainingHooks, **names)["trainer"]
    rates, compiled = {}, {}
    write = trainer._write_train_metrics  # the trainer calls it right after an update, and at the end

    def written():
        rates[trainer.train_steps] = np.float32(get_learning_rate(trainer.optimizer.opt_state))
        compiled[trainer.train_steps] = trainer._jitted_train_step_fn.func.jitted_fn._cache_size()
        write()

    trainer._write_train_metrics = written
    learner.train([{"prompts": np.array(["abc"] * micro_batches)} for _ in range(STEPS)])
    assert trainer.train_steps == STEPS * iterations
    assert list(rates) == list(range(1, STEPS * iterations + 1))
    np.testing.assert_array_equal(list(rates.values()), np.repeat(RATES[:STEPS], iterations))
    assert rates[STEPS * iterations] == np.float32(5e-7)
    assert compiled[STEPS * iterations] == compiled[3]  # setting the rate does not compile the step again
