"""Tests of the stop tokens that a run names besides those of the model's files."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from toy_runs import TOY_BASE, comparable, complete, completed, printed, tiny

from rljax.commands import export
from rljax.evaluate import find_policy
from rljax.policy.hf import SINGLE_NAME


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The toy's base with equally likely tokens. Its template ends an answer with the padding token, 15."""
    path = shutil.copytree(TOY_BASE, tmp_path_factory.mktemp("base") / "base")
    tensors = load_file(path / SINGLE_NAME)
    save_file(tensors | {"model.norm.weight": np.zeros_like(tensors["model.norm.weight"])}, path / SINGLE_NAME)
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}_{% endfor %}")
    return path


def test_a_run_stops_at_the_tokens_that_it_names(base, tmp_path):
    """All 16 tokens stop, so each response has one token, in training and in evaluation."""
    every = [str(token) for token in range(16)]
    completed(tiny(base, tmp_path, 1, "--eval.every", "1", "--rollout.stop-token-ids", *every))
    (row,) = comparable(tmp_path)
    assert (row["response_length/max"], row["eval/toy/response_length"]) == (1.0, 1.0)
    assert row["response_length/truncated_fraction"] == row["response_length/missed_stop_fraction"] == 0.0
    assert find_policy(tmp_path).stops(14) == (14, *range(14), 15)
    out = tmp_path / "exported"
    printed(export.main, [tmp_path, out])
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [14, *range(14), 15]
    assert find_policy(out).stops(14) == (14, *range(14), 15)


def test_without_a_name_the_stops_of_template_and_model_stand(base, tmp_path):
    completed(tiny(base, tmp_path / "run", 1))
    (row,) = comparable(tmp_path / "run")
    assert row["response_length/missed_stop_fraction"] > 0.0
    printed(export.main, [tmp_path / "run", tmp_path / "out"])
    assert (tmp_path / "out" / "generation_config.json").exists() is (TOY_BASE / "generation_config.json").exists()


def test_a_stop_token_outside_the_vocabulary_is_refused(tmp_path):
    for word in ("16", "-1"):
        status, output = complete(tiny(TOY_BASE, tmp_path, 1, "--rollout.stop-token-ids", "3", word))
        assert (status, "stop_token_ids" in output, "Traceback" in output) == (2, True, False)
