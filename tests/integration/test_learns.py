"""A short run from a practised base earns more reward, and its exported policy answers as the evaluation says."""

import json

import numpy as np
import pytest
from toy_runs import command, comparable, completed, printed

from rljax import evaluate
from rljax.commands import export
from rljax.data.toy import addition_problems, addition_reward

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(toy_base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("learns") / "run"
    options = ("--run.steps", "12", "--optimizer.learning-rate", "2e-4", "--eval.at-start", "true")
    completed(command(toy_base, run_dir, *options))
    return run_dir


def test_reward_and_accuracy_rise(finished):
    rows = comparable(finished)
    rewards = [row["reward/mean"] for row in rows]
    assert np.mean(rewards[-3:]) - np.mean(rewards[:3]) > 0.1
    assert rows[-1]["eval/toy/accuracy"] - rows[0]["eval/toy/accuracy_at_start"] > 0.2


def test_exported_policy_answers_as_the_evaluation_says(finished, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    printed(export.main, [finished, tmp_path])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    problems = addition_problems("eval")
    ids = torch.tensor([tokenizer.encode(p["prompt"], add_special_tokens=False) for p in problems])
    with torch.no_grad():
        answers = model.generate(ids, do_sample=False, max_new_tokens=36)[:, ids.shape[1] :]
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    score = np.mean([addition_reward(p, text, False) for p, text in zip(problems, texts, strict=True)])
    assert abs(score - comparable(finished)[-1]["eval/toy/accuracy"]) <= 0.02
    out = printed(evaluate.main, ["--path", tmp_path])
    assert abs(json.loads(out)["accuracy"] - score) <= 0.02
