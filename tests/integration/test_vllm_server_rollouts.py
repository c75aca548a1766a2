"""The vLLM engine works with a real server in each dtype, with tied and untied heads."""

from contextlib import closing

import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.score import make_scorer
from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.vllm
OTHERS = [pytest.param(dtype, marks=pytest.mark.harness) for dtype in ("float16", "float32")]
DTYPES = pytest.mark.parametrize("served", ["bfloat16", *OTHERS], indirect=True)


@DTYPES
def test_engines_agree_after_each_publish(served, prompts):
    """The mismatch is the dtype's own, before and after three big updates. Versions and figures are recorded."""
    measured = []
    with closing(served.engine()) as engine:
        for version in range(4):
            params = served.model.params if version == 0 else served.model.moved(version)
            metrics = engine.publish(params, version)
            samples = engine.generate(prompts, 4, SamplingParams(24), seed=version)
            responses = list(samples)
            assert len(responses) == 20
            assert {(r.prompt_index, r.sample_index) for r in responses} == {(i, j) for i in range(5) for j in range(4)}
            assert all(r["version"].tolist() == [version] * 24 and r.truncated for r in responses)
            measured.append(served.gaps(params, responses))
            assert metrics["publish/seconds"] >= metrics["publish/stall_s"] > 0
            assert metrics["publish/bytes"] > 0
            assert samples.metrics["rollout/requests"] == 20
            assert samples.metrics["rollout/retries"] == 0
            assert 0 <= samples.metrics["rollout/cached_prompt_fraction"] < 1
            assert ("publish/changed_fraction" in metrics) == (version > 0)
    together = np.concatenate(measured)
    print(served.dtype, [(float(gap.mean()), float(gap.max())) for gap in measured])
    if served.dtype == "float32":
        assert together.max() <= 1e-4
    else:
        low, high = {"bfloat16": (1e-4, 5e-2), "float16": (1e-5, 6e-3)}[served.dtype]
        assert low < together.mean() < high


def test_stops_and_greedy(float32, prompts):
    """A stop token ends its response and belongs to it. Greedy log-probabilities are those at temperature 1."""
    stops = tuple(range(0, 256, 5))
    with float32.published() as engine:
        drawn = list(engine.generate(prompts, 4, SamplingParams(30, stop_token_ids=stops), seed=1))
        greedy = list(engine.generate(prompts, 1, SamplingParams(8, temperature=0.0), seed=1))
    assert any(not r.truncated for r in drawn)
    for r in drawn:
        assert not np.isin(r.response[:-1], stops).any()
        assert r.truncated == (r.response[-1] not in stops)
    assert float32.gaps(float32.model.params, [*drawn, *greedy]).max() < 1e-4


def test_logprobs_are_of_the_distribution_sampled_from(float32, prompts):
    """Responses at temperature 0.5 have the trainer's log-probabilities at temperature 0.5."""
    with float32.published() as engine:
        drawn = list(engine.generate(prompts, 2, SamplingParams(16, temperature=0.5), seed=2))
    score = make_scorer(float32.model.config, jnp.float32, temperature=0.5)
    sequences = [r.ids for r in drawn]
    scored = score(float32.model.params, sequences)
    assert max(np.abs(s[-16:] - r["rollout_logprobs"]).max() for s, r in zip(scored, drawn, strict=True)) < 1e-4
