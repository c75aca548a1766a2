"""Responses sampled for a comparison must have the log-probabilities that scoring gives them."""

import numpy as np
import pytest

from rljax.compare.report import compare_columns
from rljax.compare.sampling import SampleConfig, sample_responses, split_sampler, toy_prompts
from rljax.compare.scorers import score_column
from rljax.data.toy import ALPHABET, build_tokenizer
from rljax.record.token_dumps import make_dump

pytestmark = pytest.mark.slow


PROMPTS = make_dump(["p", "q"], [[1, 2, 5, 9], [4, 5]], [[False, False, True, False], [False, False]], {})


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.harness), 0.7])
def test_drawn_responses_score_as_they_were_drawn(model, temperature):
    config = SampleConfig(responses=4, max_response_tokens=12, temperature=temperature, seed=3)
    dump = sample_responses(PROMPTS, model, "jax-decode:float32", config)
    assert dump.sequence_ids == ("p/0", "p/1", "p/2", "p/3", "q/0", "q/1", "q/2", "q/3")
    for name, ids, mask in zip(dump.sequence_ids, dump.token_ids, dump.response_mask, strict=True):
        np.testing.assert_array_equal(ids[~mask], [1, 2] if name[0] == "p" else [4, 5])
        assert mask.sum() == 12 or (ids[-1] == 3 and 3 not in ids[mask][:-1])
    for column, spec in {"full": "jax:float32", "again": "jax-decode:float32"}.items():
        dump = dump.with_column(column, *score_column(spec, dump, model, temperature=temperature, batch_size=4))
    for pair in compare_columns(dump).pairs:
        assert pair.verdict.status == "pass", pair.verdict.reason
        assert pair.metrics["logprob_abs_diff_max"] < 1e-4
        assert pair.metrics["token_count"] == sum(mask.sum() for mask in dump.response_mask)
        assert pair.metrics["nonfinite_count"] == 0


def test_the_embedded_engine_scores_each_token_or_refuses(model):
    """The sequences have a hole in the mask, a response from the first token on, and no response."""
    ids = [[1, 2, 5, 9, 4], [4, 5, 6], [7, 8]]
    masks = [[False, True, True, False, True], [True] * 3, [False] * 2]
    dump = make_dump(["hole", "whole", "none"], ids, masks, {})
    full, _ = score_column("jax:float32", dump, model)
    decoded, source = score_column("jax-decode:float32", dump, model, batch_size=2)
    assert (source.dtype, source.temperature) == ("float32", 1.0)
    for i, prompt in enumerate([1, 1, 2]):
        assert np.isnan(decoded[i][:prompt]).all()
        np.testing.assert_allclose(decoded[i][prompt:], full[i][prompt:], atol=2e-5, rtol=0)
    for ids, mask, message in (
        ([1, 2], [True, True], "no prompt"),
        ([1, 99, 2], [False, False, True], "no prompt of tokens below 64"),
    ):
        with pytest.raises(ValueError, match=message):
            sample_responses(make_dump(["a"], [ids], [mask], {}), model, "jax-decode:float32")
    for settings in ({"responses": 0}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match=r"responses must be at least 1, got 0|temperature must be positive"):
            SampleConfig(**settings)
    for spec in ("float32", "jax:float32", "jax-decode:int8", "vllm-decode:localhost:80", "x"):
        with pytest.raises(ValueError, match=f"unknown sampler '{spec}'"):
            split_sampler(spec)


def test_toy_prompts_are_the_eval_split_in_the_models_tokens(tmp_path):
    build_tokenizer().save(tmp_path)
    dump = toy_prompts(5, tmp_path)
    assert dump.sequence_ids == tuple(f"held/{i}" for i in range(5))
    assert not any(mask.any() for mask in dump.response_mask)
    texts = ["".join(ALPHABET[token] for token in ids) for ids in dump.token_ids]
    assert all(len(text) == 8 and text[3] == "+" and text[-1] == "=" for text in texts)
    assert len(set(texts)) == 5
    with pytest.raises(ValueError, match="eval split has 200 problems"):
        toy_prompts(201, tmp_path)
