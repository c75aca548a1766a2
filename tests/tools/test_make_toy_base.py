"""Tests of the maker of toy bases on a short fit, and of the fitted base of the quickstart and the tests."""

import jax.numpy as jnp
import make_toy_base
import numpy as np
import pytest
from toy_runs import TOY_BASE, outcome
from toy_texts import TASKS, ToyBaseConfig, toy_config

from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import build_tokenizer
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer

pytestmark = pytest.mark.slow

SHORT = ["--steps", "80", "--settle-steps", "0", "--batch-size", "8", "--learning-rate", "5e-3"]


def demonstration_loss(texts, params, seed=9):
    """Returns the mean negative log-probability of the response tokens of 64 demonstrations (nats)."""
    config = ToyBaseConfig(batch_size=64, scratchpad_rate=0.5, wrong_direct_rate=0.0, wrong_digit_rate=0.0)
    rng = np.random.default_rng(seed)
    tokens, lengths = texts.sample_batch(rng, config, settled=True)
    score = make_scorer(toy_config(len(texts.alphabet)), jnp.float32)
    scored = score(params, [row[:n] for row, n in zip(tokens, lengths, strict=True)])
    return -float(np.concatenate([values[texts.prompt_tokens :] for values in scored]).mean())


@pytest.mark.parametrize(
    "task", ["addition", *(pytest.param(task, marks=pytest.mark.harness) for task in ("swaps", "calculator"))]
)
def test_a_short_fit_learns_and_is_a_directory_that_loads(task, tmp_path):
    texts = TASKS[task]
    out = tmp_path / "base"
    status, printed, _ = outcome(make_toy_base.main, [out, "--task", task, *SHORT])
    assert (status, printed) == (0, f"wrote {out}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"base"}
    policy = read_config(out)
    assert policy == toy_config(len(texts.alphabet))
    assert load_tokenizer(out).encode("0") == build_tokenizer(texts.alphabet).encode("0")
    before = demonstration_loss(texts, init_params(policy, 0))
    assert demonstration_loss(texts, load_params(out, policy)) < 0.8 * before
    weights = (out / "model.safetensors").read_bytes()
    status, printed, _ = outcome(make_toy_base.main, [out, "--task", task, *SHORT])
    assert (status, printed) == (0, f"{out} is already there (use --overwrite to fit it again)\n")
    assert (out / "model.safetensors").read_bytes() == weights


def test_the_committed_base_is_a_whole_fit_of_the_toy():
    """The base knows the scratchpads that it practised: their tokens are nearly sure."""
    policy = read_config(TOY_BASE)
    assert policy == toy_config()
    assert load_tokenizer(TOY_BASE).eos_token_id == policy.eos_token_id == 14
    assert sum(path.stat().st_size for path in TOY_BASE.iterdir()) < 600_000
    assert demonstration_loss(TASKS["addition"], load_params(TOY_BASE, policy)) < 1.0
