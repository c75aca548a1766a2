"""The embedded engine's guesses continue given tokens, and change no sample of the exact engine."""

import numpy as np
import pytest
from small_engines import PROMPTS, exact_pass
from tiny_step import CONFIG

from rljax.policy.model import init_params
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.engine import TurnRequest
from rljax.rollout.exact import ExactEngine
from rljax.rollout.types import InjectConfig, SamplingParams
from rljax.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.slow

ROWS, ROW_TOKENS, WIDTH, LIMIT, N, STOPS = 4, 20, 6, 12, 3, (0, 1)
BATCHES, COARSE = len(PROMPTS) * N // ROWS, {"kv_cache_dtype": "fp8_e5m2"}
MESH, PARAMS = MeshConfig(1, 1), init_params(CONFIG, 0)


def embedded(dtype="float32", mesh=MESH, **options):
    return JaxEngine(CONFIG, dtype, WIDTH, mesh=make_mesh(mesh), **options)


def exact(drafts=None, noise=0.0, mesh=MESH):
    executable = exact_pass(CONFIG, len(PROMPTS) * N, LIMIT, rows=ROWS, row_tokens=ROW_TOKENS, mesh=make_mesh(mesh))
    engine = ExactEngine(executable, inject=InjectConfig(logit_noise=noise), drafts=drafts)
    engine.publish(PARAMS, 5)
    return engine


def settings(temperature=0.8, **asked):
    return SamplingParams(LIMIT, temperature, STOPS, **asked)


def sampled(samples):
    """Returns all that the responses say, and the number of runs of the executable."""
    said = []
    for one in samples:
        arrays = {name: array.tolist() for name, array in one.columns.items()}
        said.append((one.prompt_index, one.sample_index, one.response.tolist(), arrays, one.truncated))
    return said, samples.metrics["rollout/executable_runs"]


@pytest.mark.parametrize(
    ("mesh", "asked", "noise"),
    [
        (MESH, {}, 0.5),  # the noise of the engine is guessed
        pytest.param(MESH, {"temperature": 0.0}, 0.0, marks=pytest.mark.harness),
        (MESH, {"top_k": 4, "top_p": 0.9, "reported": 4}, 0.0),
        # The guesses do not depend on the devices.
        pytest.param(MeshConfig(2, 2), {}, 0.0, marks=[pytest.mark.harness, pytest.mark.mesh]),
    ],
)
def test_right_guesses_need_one_run_for_each_batch(mesh, asked, noise):
    plain, runs = sampled(exact(noise=noise, mesh=mesh).generate(PROMPTS, N, settings(**asked), seed=3))
    drafts = embedded(mesh=mesh, inject=InjectConfig(logit_noise=noise))
    guided, fewer = sampled(exact(drafts, noise, mesh).generate(PROMPTS, N, settings(**asked), seed=3))
    assert guided == plain
    assert {truncated for *_, truncated in plain} == {True, False}
    assert (fewer, runs) == (BATCHES, sum(max(len(one[2]) for one in plain[at : at + ROWS]) for at in (0, 4, 8)))


@pytest.mark.parametrize(("noise", "coarse"), [(0.5, {}), pytest.param(0.0, COARSE, marks=pytest.mark.harness)])
def test_wrong_guesses_are_corrected(noise, coarse):
    """The drafts are coarse, or the noise is not guessed."""
    plain, runs = sampled(exact(noise=noise).generate(PROMPTS, N, settings(), seed=3))
    guided, fewer = sampled(exact(embedded(**coarse), noise).generate(PROMPTS, N, settings(), seed=3))
    assert guided == plain
    assert BATCHES < fewer < runs


def test_later_turns_are_guessed_with_their_own_room():
    """Two of the three prompts are longer than the prompts that the embedded engine expects at first."""
    requests = [TurnRequest(key, 2, np.arange(3 + 2 * key, dtype=np.int32) + 2, 2 + key) for key in (5, 1, 2)]
    plain, runs = sampled(exact().answer_round(requests, settings(), seed=1))
    guided, fewer = sampled(exact(embedded(max_tokens=ROW_TOKENS)).answer_round(requests, settings(), seed=1))
    assert guided == plain
    assert sampled(exact().answer_round(requests, settings(), seed=2))[0] != plain
    assert fewer == 2 < runs  # trajectories 5 and 1 share row 1 of the executable, so there are two batches


def test_a_draft_goes_on_from_the_given_tokens():
    engine = embedded("bfloat16")
    engine.publish(PARAMS, 0)
    responses = list(engine.generate(PROMPTS, 1, settings(), seed=7))
    requests = [TurnRequest(i, 1, prompt, LIMIT) for i, prompt in enumerate(PROMPTS)]
    begun = [one.response[: min(i, one.length - 1)] for i, one in enumerate(responses)]
    numbers = np.arange(len(PROMPTS), dtype=np.int32)[:, None]
    rest = engine.draft(requests, begun, numbers, settings(), seed=7)
    for known, drafted, one in zip(begun, rest, responses, strict=True):
        np.testing.assert_array_equal(np.concatenate([known, drafted]), one.response)
    # Another first token is also kept, and other tokens follow it.
    others = engine.draft(requests, [np.asarray([2], np.int32)] * 4, numbers, settings(), seed=7)
    assert any(a.tolist() != one.response[1:].tolist() for a, one in zip(others, responses, strict=True))
