"""Responses drawn for a comparison carry the log-probabilities that scoring them gives."""

import numpy as np
import pytest

from rljax.compare.dump import make_dump
from rljax.compare.report import compare_columns
from rljax.compare.sampling import sample_responses
from rljax.compare.scorers import score_column
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.qwen3 import init_params


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = PolicyConfig(16, 16, 32, 2, 2, 1, 8, tie_word_embeddings=True, initializer_range=0.3, eos_token_id=3)
    path = tmp_path_factory.mktemp("model")
    save_params(path, init_params(config, 0), config)
    return path


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drawn_responses_score_as_they_were_drawn(model, temperature):
    prompts = make_dump(["p", "q"], [[1, 2, 5, 9], [4, 5]], [[False, False, True, False], [False, False]], {})
    options = {"n": 4, "max_response_tokens": 12, "temperature": temperature}
    dump = sample_responses(prompts, model, "float32", **options, seed=3)
    assert dump.sequence_ids == ("p/0", "p/1", "p/2", "p/3", "q/0", "q/1", "q/2", "q/3")
    for name, ids, mask in zip(dump.sequence_ids, dump.token_ids, dump.response_mask, strict=True):
        np.testing.assert_array_equal(ids[~mask], [1, 2] if name[0] == "p" else [4, 5])
        assert mask.sum() == 12 or (ids[-1] == 3 and 3 not in ids[mask][:-1])
    scored = dump.with_column("s", *score_column("jax:float32", dump, model, temperature=temperature))
    (pair,) = compare_columns(scored).pairs
    assert pair.verdict.status == "pass", pair.verdict.reason
    assert pair.metrics["logprob_abs_diff_max"] < 1e-4
    assert pair.metrics["token_count"] == sum(mask.sum() for mask in dump.response_mask)


@pytest.mark.parametrize(
    ("ids", "mask", "options", "message"),
    [
        ([1, 2], [True, True], {}, "no prompt"),
        ([1, 99, 2], [False, False, True], {}, "no prompt of tokens below 16"),
        ([1, 2], [False, True], {"n": 0}, "must be positive, got 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(model, ids, mask, options, message):
    with pytest.raises(ValueError, match=message):
        sample_responses(make_dump(["a"], [ids], [mask], {}), model, "float32", **options)
