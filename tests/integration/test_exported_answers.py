"""The exported policy of a run answers as the evaluation says."""

import json

import numpy as np
import pytest
from toy_runs import comparable, completed, printed, tiny

from rljax import evaluate
from rljax.commands import export
from rljax.data.toy import addition_problems, addition_reward

pytestmark = pytest.mark.slow


@pytest.mark.harness
def test_exported_policy_answers_as_the_evaluation_says(toy_base, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run_dir, exported = tmp_path / "run", tmp_path / "exported"
    evaluated = ("--eval.every", "1", "--eval.max-response-tokens", "36")
    completed(tiny(toy_base, run_dir, 1, "--optimizer.learning-rate", "2e-4", *evaluated))
    printed(export.main, [run_dir, exported])
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    problems = addition_problems("eval")
    ids = torch.tensor([tokenizer.encode(p["prompt"], add_special_tokens=False) for p in problems])
    with torch.no_grad():
        answers = model.generate(ids, do_sample=False, max_new_tokens=36)[:, ids.shape[1] :]
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    score = np.mean([addition_reward(p, text, False) for p, text in zip(problems, texts, strict=True)])
    assert score > 0.1
    assert abs(score - comparable(run_dir)[-1]["eval/toy/accuracy"]) <= 0.02
    out = printed(evaluate.main, ["--path", exported])
    assert abs(json.loads(out)["accuracy"] - score) <= 0.02
