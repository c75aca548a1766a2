"""A tiny policy, its batch, its step and state, and the gradient of its loss, computed directly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from records import train_sequence

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.policy.lora import OFF
from rljax.policy.model import hidden_states, init_params, lm_head_table
from rljax.policy.score import segment_ends
from rljax.schedule import inject_learning_rate
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.packing import max_micro_batches, pack
from rljax.trainer.state import PrecisionConfig, create_state
from rljax.trainer.step import TrainStep

CONFIG = PolicyConfig(24, 32, 64, 2, 4, 2, 8, tie_word_embeddings=False, initializer_range=0.2)
COUNT, LONGEST = 12, 19
MESH = make_mesh(MeshConfig(1, 1))
PLAIN, UNCORRECTED, MEASURED = LossConfig(), CorrectionConfig(), DiagnosisConfig()


def sequences(in_loss=lambda i: i % 4 != 0):
    rng = np.random.default_rng(2)
    result = []
    for i in range(COUNT):
        p, r = int(rng.integers(1, 6)), int(rng.integers(1, 14))
        prompt, response = (rng.integers(0, 24, n).astype(np.int32) for n in (p, r))
        noise = rng.normal(-3.0, 0.4, r).astype(np.float32)
        result.append(train_sequence(prompt, response, noise, float(rng.normal()), in_loss(i)))
    return result


def batch_shape(row, rows, count=COUNT, longest=LONGEST):
    return max_micro_batches(count, longest, row, rows), rows, row


def packed(batch_sequences, row=20, rows=2, count=COUNT, longest=LONGEST):
    micro = batch_shape(row, rows, count, longest)[0]
    return pack(batch_sequences, row_tokens=row, rows_per_micro_batch=rows, micro_batches=micro)


@functools.cache
def keep_gradient():
    return inject_learning_rate(lambda rate: optax.trace(decay=0.0), 1.0)


def make_step(tx=None, *, config=CONFIG, mesh=MESH, row=20, rows=2, shape=None, count=COUNT, limit=16, **options):
    """Returns the step of such a batch, or of batches of ``shape``. Without ``tx`` its state keeps the gradient."""
    loss, correction = options.pop("loss", PLAIN), options.pop("correction", UNCORRECTED)
    precision = {"compute_dtype": options.pop("dtype", "float32"), "remat": options.pop("remat", False)}
    precision["lm_head_dtype"] = options.pop("head", "compute")
    objective = Objective(loss, correction.resolved(), count, limit, has_tail=not options.get("cut"))
    more = {"batch_shape": shape or batch_shape(row, rows), "diagnosis": None, **options}
    return TrainStep(
        config, tx or keep_gradient(), mesh, precision=PrecisionConfig(**precision), objective=objective, **more
    )


def forward_of(step, count=COUNT, diagnosis=MEASURED):
    """Returns the step's forward without a gradient, as updates take it."""
    return functools.partial(step.forward, num_sequences=count, diagnosis=diagnosis)


def fresh_state(tx=None, *, config=CONFIG, mesh=MESH, params=None, dtype="float32", lora=OFF):
    """Returns the first state of such a step, from new parameters if ``params`` is None."""
    params = init_params(config, 0) if params is None else params
    return create_state(params, config, tx or keep_gradient(), mesh, dynamic_scale=dtype == "float16", lora=lora)


def in_own_rows(batch_sequences):
    """Returns the tokens, segment ids and positions [n, LONGEST] of sequences, each in its own row."""
    shape = (len(batch_sequences), LONGEST)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for i, s in enumerate(batch_sequences):
        end = len(s.prompt) + len(s.response)
        tokens[i, :end], segments[i, :end] = np.concatenate([s.prompt, s.response]), 1
    return tokens, segments, np.tile(np.arange(LONGEST, dtype=np.int32), (shape[0], 1))


@jax.jit
def log_distributions(params, tokens, segments, positions, temperature=1.0):
    """Returns the log-probabilities [n, LONGEST, v] of every token after each position."""
    hidden, _ = hidden_states(params, CONFIG, tokens, segment_ends(segments), positions)
    return jax.nn.log_softmax(jnp.einsum("btd,vd->btv", hidden, lm_head_table(params)) / temperature)


def expected_gradient(batch_sequences, params=None):
    """Returns equation 3, -sum_i sum_t A_i grad log pi(token) / (the number of tokens in the loss), computed directly.

    Each sequence is in its own row. Tokens may have own advantages.
    """
    in_loss = [s for s in batch_sequences if s.in_loss]
    total, rows = sum(len(s.response) for s in in_loss), in_own_rows(in_loss)
    advantages = np.zeros(rows[0].shape, np.float32)
    for i, s in enumerate(in_loss):
        own = s["advantages"] if "advantages" in s.columns else s.advantage
        advantages[i, len(s.prompt) : len(s.prompt) + len(s.response)] = own

    @jax.jit
    @jax.grad
    def gradient(params):
        logp = log_distributions(params, *rows)
        picked = jnp.take_along_axis(logp[:, :-1], rows[0][:, 1:, None], -1)[..., 0]
        return -jnp.sum(advantages[:, 1:] * picked) / total

    with jax.default_matmul_precision("highest"):
        return gradient(init_params(CONFIG, 0) if params is None else params)


def check_close(found, expected, most=1e-5):
    """Checks that gradients differ by less than ``most`` of the largest number in their array, which is not 0."""
    for gradient, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(wanted).max() > 0
        assert np.abs(gradient - wanted).max() / np.abs(wanted).max() < most
