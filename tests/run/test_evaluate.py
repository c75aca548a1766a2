"""Tests of avg@n and pass@k by hand, of the settings that are allowed, and of sampling from servers as they stand."""

import contextlib
import itertools
import json
import math

import numpy as np
import pytest
from opened_clients import quick
from records import response
from scripted_engine import ScriptedEngine

from rljax.data.toy import build_tokenizer
from rljax.errors import ServerGoneError
from rljax.evaluate import EvaluateArguments, find_policy, in_batches, response_limit, write_responses
from rljax.policy.config import PolicyConfig
from rljax.rewards.pool import RewardPool
from rljax.rollout.servers.model import ServedModel
from rljax.rollout.types import SamplingParams
from rljax.run.config import Config, EvalConfig
from rljax.run.config_file import load_config
from rljax.run.evaluation import EVAL_SEED, Evaluation, mean_accuracy, pass_at_k, summarize_scores
from rljax.run.sampling import Sampler, Scored, SingleTurn

SAMPLING = SamplingParams(8, 1.0)
PROBLEMS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}]
# Two of the first problem's three responses are right. None of the second's is right.
RESPONSES = {"1+1=": ("2", "3", "2"), "2+3=": ("4", "44", "444")}


def scored(rewards):
    """Returns scored responses. Response j to problem i has 4 i + j + 1 tokens, and each third one is truncated."""

    def one(i, j):
        return response((i, j), np.zeros(4 * i + j + 1), truncated=j == 2)

    return [Scored(one(i, j), "", reward) for i, row in enumerate(rewards) for j, reward in enumerate(row)]


def test_scores_by_hand():
    responses = scored([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    result = summarize_scores(responses, n=4, pass_k=(1, 2, 4))
    by_sample = sorted(responses, key=lambda one: one.place[::-1])
    assert summarize_scores(by_sample, n=4, pass_k=(1, 2, 4)) == result
    assert result == {
        "accuracy": 0.5,
        "response_length": 6.5,
        "truncated_fraction": 0.25,
        "pass@1": pytest.approx(0.5),
        # 2 of 4 are right, so one of six pairs has no right one: 5/6.
        "pass@2": pytest.approx((5 / 6 + 0 + 1) / 3),
        "pass@4": pytest.approx(2 / 3),
    }
    # A partial reward counts, and solves above a half.
    result = summarize_scores(scored([[0.5, 0.6], [-1.0, 0.1]]), n=2, pass_k=(1, 2))
    assert [result[key] for key in ("accuracy", "pass@1", "pass@2")] == pytest.approx([0.05, 0.25, 0.5])
    # A trajectory without a token has no length.
    silent = Scored(response((0, 1), []), "", math.nan)
    result = summarize_scores([*scored([[1.0]]), silent], n=2)
    assert (result["accuracy"], result["response_length"]) == (0.5, 1.0)
    assert summarize_scores([silent], n=1)["response_length"] == 0.0


@pytest.mark.parametrize("n", [1, 6])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(n):
    for solved, k in itertools.product(range(n + 1), range(1, n + 1)):
        outcomes = [1] * solved + [0] * (n - solved)
        choices = [max(choice) for choice in itertools.combinations(outcomes, k)]
        assert pass_at_k(n, solved, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)
    for numbers in ((n, 0, n + 1), (n, 0, 0), (n, n + 1, 1), (n, -1, 1)):
        with pytest.raises(ValueError, match="pass@k needs 1 <= k <= n"):
            pass_at_k(*numbers)


def breaks(problem, response, truncated):
    if response == "44":
        raise ValueError("no")
    return float(problem["answer"] == response)


def test_an_evaluation_counts_its_own_errors(capsys):
    tokenizer, seeds = build_tokenizer(), []

    def script(prompt, sample, seed):
        seeds.append(seed)
        return RESPONSES[prompt][sample]

    engine = ScriptedEngine(tokenizer, script)
    engine.publish({}, 0)
    with RewardPool(f"{__name__}:breaks", 0) as pool:
        pool.submit(PROBLEMS[0], "44", False)
        pool.pop_metrics()
        config = EvalConfig(n=3, pass_k=(1,), temperature=SAMPLING.temperature)
        sampler = Sampler(SingleTurn(engine, tokenizer, pool), SAMPLING, 3)
        evaluation = Evaluation(config, 1, sampler, {"a": PROBLEMS, "b": PROBLEMS})
        row = evaluation.evaluate()
        assert pool.pop_metrics()["reward/errors"] == 0
        assert evaluation.evaluate() == row
    assert (engine.asked, set(seeds)) == ([["1+1=", "2+3="]] * 4, {EVAL_SEED})
    assert row["eval/a/reward_errors"] == row["eval/b/reward_errors"] == 1
    assert row["eval/a/accuracy"] == row["eval/b/accuracy"] == pytest.approx(1 / 3)
    assert row["eval/b/pass@1"] == pytest.approx(1 / 3)
    assert "could be scored" not in capsys.readouterr().err
    # The mean accuracy leaves the start out.
    assert mean_accuracy({"eval/c/accuracy_at_start": 0.9, **row}) == pytest.approx(1 / 3)
    assert mean_accuracy({"eval/a/accuracy_at_start": 0.9, "reward/mean": 1.0}) is None
    keys = ("accuracy", "pass@1", "response_length", "truncated_fraction", "reward_errors")
    assert set(row) == {f"eval/{name}/{key}" for name in "ab" for key in keys}


@pytest.mark.parametrize("kind", [EvalConfig, EvaluateArguments])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 4}, "temperature = 0 samples the same response each time, but n = 4"),
        ({"n": 4, "temperature": 1.0, "pass_k": (1, 5)}, r"pass_k = \[1, 5\] must be from 1 to n = 4"),
        ({"pass_k": (0,)}, r"pass_k = \[0\] must be from 1 to n = 1"),
        ({"temperature": -0.5}, "temperature must be finite and not negative, got -0.5"),
    ],
)
def test_samples_that_make_no_sense_are_refused(kind, wrong, message):
    with pytest.raises(ValueError, match=message):
        kind(**wrong)


def test_the_engine_has_room_for_the_longer_response():
    arguments = ["--data.max-prompt-tokens", "10", "--rollout.max-response-tokens", "20"]
    assert load_config(Config, arguments, prog="", description="").max_engine_tokens == 30
    longer = [*arguments, "--eval.max-response-tokens", "50"]
    config = load_config(Config, longer, prog="", description="")
    assert (config.max_engine_tokens, config.max_sequence_tokens) == (60, 30)
    # A prompt must leave room for a token.
    policy = PolicyConfig(24, 32, 64, 2, 4, 2, 8, max_position_embeddings=64)
    assert response_limit(None, policy, 63) == 1
    with pytest.raises(ValueError, match=r"64 tokens, are more than the model's 64 positions"):
        response_limit(None, policy, 64)


def test_a_policy_that_is_not_there_is_named(tmp_path):
    for place in (tmp_path / "nowhere", tmp_path / "damaged/3", "/5"):
        with pytest.raises(ValueError, match="no model at"):
            find_policy(place)
    with pytest.raises(ValueError, match=r"nowhere is not a run directory: it has no config\.yaml"):
        find_policy(tmp_path / "nowhere", best=True)
    (tmp_path / "config.yaml").write_text("run:\n  steps: 3\n")
    with pytest.raises(ValueError, match="has no checkpoints"):
        find_policy(tmp_path)
    with pytest.raises(ValueError, match=r"has no best checkpoint; was it run with checkpoint\.keep_best"):
        find_policy(tmp_path, best=True)
    for more in ({"step": 2}, {"best": True}):
        with pytest.raises(ValueError, match="3 is a checkpoint already: leave out the step and the best one"):
            find_policy(tmp_path / "checkpoints/3", **more)


def test_every_response_is_written_in_order(tmp_path):
    responses = scored([[1, 0], [0, 1]])
    write_responses(tmp_path / "new" / "out.jsonl", PROBLEMS, responses[::-1])
    lines = [json.loads(line) for line in (tmp_path / "new" / "out.jsonl").read_text().splitlines()]
    found = [(line["problem"], line["sample"], line["reward"]) for line in lines]
    assert found == [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)]
    assert (lines[2]["prompt"], lines[2]["answer"]) == ("2+3=", "5")
    assert list(in_batches(range(5), 2)) == [(0, [0, 1]), (2, [2, 3]), (4, [4])]


# ---- servers as they stand ----


@pytest.fixture
def fakes(another):
    servers = [another(), another()]
    for server in servers:
        server.model = server.root = "org/name"
    return servers


@pytest.fixture
def served():
    with contextlib.ExitStack() as stack:

        def start(*servers, **options):
            model = ServedModel([server.url for server in servers], quick(), **options)
            stack.callback(model.close)
            return model

        yield start


def drawn(model, tokens=2):
    prompts = [np.array([3, 4, 5], np.int32), np.array([9], np.int32)]
    return model.generate(prompts, 3, SamplingParams(tokens, 0.7), seed=1)


def test_responses_of_all_servers_come_back_to_their_prompts(fakes, served):
    for fake in fakes:
        fake.delay_s = 0.02
    model = served(*fakes)
    assert (model.info.root, model.info.max_model_len) == ("org/name", 128)
    samples = drawn(model)
    responses = list(samples)
    assert len({(one.prompt_index, one.sample_index) for one in responses}) == len(responses) == 6
    for one in responses:
        assert one.response.tolist() == ([5, 6] if one.prompt_index == 0 else [9, 10])
        assert one.truncated
    assert all("sample" in fake.events for fake in fakes)
    assert samples.metrics["rollout/requests"] == 6
    with pytest.raises(RuntimeError, match="weights cannot be published to a served model"):
        model.publish({}, 1)
    with pytest.raises(ValueError, match=r"prompt 0 has 3 tokens; with 126 of response it must have 1 to 2"):
        list(drawn(model, tokens=126))
    model.close()


def test_no_server_left_ends_the_evaluation_in_bounded_time(fakes, served):
    both, alone = served(*fakes), served(fakes[0], wait_s=0.5)
    fakes[0].stop()
    assert len(list(drawn(both))) == 6  # the other one answers all
    with pytest.raises(RuntimeError, match=r"no vLLM server came back within 0\.5 s"):
        list(drawn(alone))


def test_servers_of_different_models_and_no_servers_are_named(fakes, served):
    fakes[1].root = "another"
    with pytest.raises(ValueError, match="the servers hold different models: org/name and another"):
        served(*fakes)
    fakes[0].stop()
    with pytest.raises(ServerGoneError, match="no answer from"):
        served(fakes[0])
