"""Two real language models: parity with transformers on real text, their layers, and RL from the packaged files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from toy_runs import ROOT
from transformers_models import torch, transformers

from rljax.compare.layers.differences import compare_layers
from rljax.compare.layers.findings import judge_layers
from rljax.compare.layers.tracers import open_tracer
from rljax.data.tokenizer import load_tokenizer
from rljax.policy.families import read_config
from rljax.policy.hf import SINGLE_NAME, load_params
from rljax.policy.score import make_scorer
from rljax.record.rows import read_rows

pytestmark = [pytest.mark.real_models, pytest.mark.timeout(2400)]
MODELS = Path(os.environ.get("RLJAX_REAL_MODELS", "models")).absolute()
NAMES = ["smollm2-135m", "qwen2.5-coder-0.5b"]
# The largest and the mean difference of a token's log-probability from transformers in float32 (nats), by dtype.
BOUNDS = {"float32": (1e-4, 1e-5), "float16": (0.1, 0.009), "bfloat16": (0.7, 0.05)}


def real_tokens(name, count):
    """Returns the first tokens of a page of this project, int32 [count]."""
    text = (ROOT / "docs/mismatch.md").read_text()
    return np.asarray(load_tokenizer(MODELS / name).encode(text)[:count], np.int32)


@pytest.fixture(scope="module", params=NAMES)
def known(request):
    """Returns a model's name, 1,000 tokens, and transformers' log-probability of each but the first."""
    tokens = real_tokens(request.param, 1000)
    ids = torch.tensor(tokens[None], dtype=torch.int64)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / request.param, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
    return request.param, tokens, logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("dtype", BOUNDS)
def test_logprobs_of_real_text_are_those_of_transformers(known, dtype):
    name, tokens, expected = known
    config = read_config(MODELS / name)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), load_params(MODELS / name, config))
    found = np.asarray(make_scorer(config, dtype)(params, [tokens])[0])[1:]
    gaps = np.abs(found - expected)  # finite, so activations fit float16, whose largest number is 65504
    assert np.isfinite(gaps).all()
    assert gaps.max() < BOUNDS[dtype][0]
    assert gaps.mean() < BOUNDS[dtype][1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_layers_differ_by_rounding_and_a_fault_is_named(name, dtype, tmp_path):
    """In the bad copy a gate is 1.05 times as large. Eager attention, which rounds large scores, would be named."""
    tokens, found = real_tokens(name, 100), {}
    shutil.copytree(MODELS / name, tmp_path / "bad")
    tensors = load_file(tmp_path / "bad" / SINGLE_NAME)
    tensors["model.layers.3.mlp.gate_proj.weight"] *= np.float32(1.05).astype(tensors["model.norm.weight"].dtype)
    save_file(tensors, tmp_path / "bad" / SINGLE_NAME, metadata={"format": "pt"})
    for directory in (MODELS / name, tmp_path / "bad"):
        reference = open_tracer(f"jax:{dtype},logits={dtype}", MODELS / name)
        with reference as ours, open_tracer(f"hf:{dtype}", directory) as tested:
            found[directory.name] = judge_layers(compare_layers(ours, tested, tokens, effects=0))
    assert found[name].sentence == "rounding, evenly"
    assert [finding.place for finding in found["bad"].findings] == ["layer 3, gate projection"]


def run_program(cwd, *words, statuses=(0,)):
    """Runs a program of rljax to its end. Returns what it printed."""
    command = [sys.executable, "-m", "rljax", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode in statuses, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def train(name, directory, *words):
    """Trains 3 steps from the packaged configuration into ``directory/run``. Returns the rows and what it printed."""
    words = ["--model.path", MODELS / name, "--run.dir", directory / "run", "--run.steps", "3", *words]
    said = run_program(directory, "train", name, *words, "--data.batch-size", "2", "--eval.every", "0")
    rows = read_rows(directory / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    return rows, said


@pytest.mark.parametrize("name", NAMES)
def test_three_steps_of_the_packaged_configuration(name, tmp_path):
    rows, said = train(name, tmp_path)
    assert "packing.share_prefixes: off" not in said
    assert all(0 < row["mismatch/logprob_abs_diff_mean"] < 0.09 for row in rows)
    assert max(row["reward/mean"] for row in rows) > 0


TOOL = """
import re
from rljax.rollout.episodes.tool_calls import ToolCall
from rljax.rollout.episodes.tool_environment import ToolEnvironment

class Adder(ToolEnvironment):
    tools = {"add": "operator:add"}
    scored_by = "reasoning_gym"
    asked = False

    def parse(self, response):
        found = None if self.asked else re.search(r"(\\d+) *[+-] *(\\d+)", response)
        self.asked = True
        return [ToolCall("add", [int(found[1]), int(found[2])])] if found else []
"""
HALF, LONG = "--rollout.dtype float16 --precision.compute-dtype float16", "--rollout.max-response-tokens 96"
SHORT = "--rollout.max-response-tokens 32 --packing.row-tokens 160 --packing.rows-per-micro-batch 8"
FORMS = {  # the settings of a run, the largest mean gap (nats), and bounds of the largest value of a metric
    "exact": (f"--rollout.engine exact {SHORT}", 0.0, {"mismatch/kl": (0, 0)}),
    "float16": (HALF, 0.005, {"precision/loss_scale": (2, 2**24)}),
    "centering": ("--rollout.top-logprobs 20 --correction.score-centering true", 0.045, {}),
    "top_p": ("--rollout.top-p 0.95 --rollout.top-k 64", 0.045, {}),
    "refill": ("--rollout.refill true", 0.045, {"rollout/refill_rounds": (1, 4)}),
    "stale": ("--rollout.max-staleness 1", 0.045, {"rollout/staleness": (1, 1)}),
    "apart": ("--rollout.colocated false", 0.045, {}),
    "tool": (f"--rollout.environment tool.py:Adder {LONG}", 0.045, {"turns/tool_calls": (1, 64)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_run_meets_a_real_model(form, tmp_path):
    words, gap, bounds = FORMS[form]
    (tmp_path / "tool.py").write_text(TOOL)
    words = ["--lora.rank", "8", "--rollout.group-size", "4", "--rollout.max-response-tokens", "48", *words.split()]
    rows, _ = train("qwen2.5-coder-0.5b", tmp_path, *words)
    assert max(row["mismatch/logprob_abs_diff_mean"] for row in rows) <= gap
    for metric, (low, high) in bounds.items():
        assert low <= max(row[metric] for row in rows) <= high


def test_every_program_meets_the_run_of_a_real_model(tmp_path):
    """Every dump is read; the exported policy has the log-probabilities of transformers, which loads it."""
    name = "qwen2.5-coder-0.5b"
    train(name, tmp_path, *["--lora.rank", "8", "--rollout.group-size", "4", "--rollout.dump-every", "1"])
    run_program(tmp_path, "view", "run")
    assert "<svg" in (tmp_path / "run/report.html").read_text()
    run_program(tmp_path, "diagnose", "run", statuses=(0, 1))
    run_program(tmp_path, "export", "run", "exported")
    scorers = ["--scorer", "jax:float32", "--scorer", "hf:float32", "--columns", "--second-run", "false"]
    run_program(tmp_path, "compare", "run/rollouts/step_000003.parquet", "--model", "exported", *scorers)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "What is 2 + 3?", "answer": "5"}\n' * 4)
    limits = ["--max-response-tokens", "16", "--path", "run"]
    assert '"accuracy"' in run_program(tmp_path, "evaluate", "--dataset", "sums.jsonl", *limits)
