"""The loop of several turns: tokens, masks and limits are recounted, and a failure costs only its own trajectory."""

from contextlib import closing, contextmanager

import counting_environments as environments
import numpy as np
import pytest
import tokenizers
from records import response

from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import build_tokenizer
from rljax.errors import StoppedWaitingError
from rljax.rollout.engine import RolloutEngine, Samples
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.episodes.hosts import EnvironmentHosts
from rljax.rollout.types import SamplingParams
from rljax.run.episodes import Episodes
from rljax.run.sampling import Sampler, rollout_row
from rljax.run.stop import StopRequest

TOKENIZER = build_tokenizer()
STOP = TOKENIZER.eos_token_id
PARAMS = SamplingParams(24, 1.0, (STOP,))


class Scripted(RolloutEngine):
    """An engine that answers each turn with digits and a stop token. It keeps the tokens of each request, by round."""

    def __init__(self, digits=lambda tokens: 2):
        self.digits, self.asked = digits, []

    def answer_round(self, requests, sampling, *, seed):
        self.asked.append([request.tokens.tolist() for request in requests])
        return Samples(self.respond(requests), {"time/generate_s": 1.0})

    def respond(self, requests):
        for key, turn, tokens, max_tokens in requests:
            whole = np.append(TOKENIZER.encode("7" * self.digits(tokens)), np.int32(STOP))
            ids = whole[:max_tokens]
            logprobs = -np.arange(1.0, len(ids) + 1, dtype=np.float32)
            is_cut = len(ids) < len(whole)
            yield response((key, turn - 1), ids, logprobs, len(self.asked), prompt=tokens, truncated=is_cut)


@contextmanager
def sampling(environment, engine, *, n=1, params=PARAMS, stop=None, tokenizer=TOKENIZER, **config):
    hosts = EnvironmentHosts(f"counting_environments:{environment.__name__}", EpisodeConfig(call_timeout_s=1.0))
    parts = engine, tokenizer, hosts, EpisodeConfig(**config)
    with closing(Episodes(*parts, max_prompt_tokens=8, stop=stop or StopRequest())) as source:
        yield Sampler(source, params, n)


def sample(problems, *parts, **options):
    with sampling(*parts, **options) as sampler:
        return sampler.sample(problems, 1)


def problem(prompt, answer, **more):
    return {"prompt": prompt, "answer": answer, **more}


def test_tokens_and_masks_recounted():
    engine = Scripted()
    problems = [problem("1+1=", "1"), problem("2+2=", "3", columns={"opening": "9=", "answer": "no"})]
    rollouts = sample(problems, environments.Doubling, engine, n=2)
    seven, three = TOKENIZER.encode("7")[0], TOKENIZER.encode("2")[0]
    turn, text = [seven, seven, STOP], [three, three]  # the decoded turn has two characters
    assert rollouts.responses[0][1].response.tolist() == turn
    long = rollouts.responses[1][0]
    assert long.response.tolist() == turn + text + turn + text + turn
    assert long.turns.tolist() == [1, 1, 1, 0, 0, 2, 2, 2, 0, 0, 3, 3, 3]
    np.testing.assert_array_equal(long["rollout_logprobs"][[0, 1, 2, 3, 4, 5]], np.float32([-1, -2, -3, 0, 0, -1]))
    assert long["version"].tolist() == [1] * 5 + [2] * 5 + [3] * 3
    assert (long.length, long.truncated, long.prompt.tolist()) == (9, False, TOKENIZER.encode("9=").tolist())
    assert rollouts.rewards.tolist() == [[2, 2], [6, 6]]
    assert {"turns/limited": 0, "reward/errors": 0, "time/generate_s": 3.0}.items() <= rollouts.row.items()
    # Each turn's prompt is all tokens before it. Nothing is encoded again.
    first, second, third = engine.asked
    assert [len(round_of) for round_of in engine.asked] == [4, 2, 2]
    assert first[0] == TOKENIZER.encode("1+1=").tolist()
    assert second[0] == first[2] + turn + text
    assert third[0] == second[0] + turn + text


def test_only_first_prompts_begin_with_the_prefix(tmp_path):
    TOKENIZER.save(tmp_path)
    file, pad = tmp_path / "tokenizer.json", TOKENIZER.pad_token_id
    made = tokenizers.Tokenizer.from_file(str(file))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="_ $A", pair="$A $B", special_tokens=[("_", pad)]
    )
    made.save(str(file))
    engine = Scripted()
    problems = [problem("1+1=", "1"), problem("2+2=", "3", opening="9=")]
    rollouts = sample(problems, environments.Doubling, engine, tokenizer=load_tokenizer(tmp_path))
    first, *_ = engine.asked
    assert first == [[pad, *TOKENIZER.encode("1+1=")], [pad, *TOKENIZER.encode("9=")]]
    assert all(pad not in one.response for (one,) in rollouts.responses)


def test_limits_end_a_trajectory():
    problems = [problem("1+1=", "9")]
    turns = sample(problems, environments.Doubling, Scripted(), max_turns=2)
    assert turns.responses[0][0].turns.max() == 2
    assert turns.responses[0][0].response[-1] == STOP  # no text follows the last turn
    assert (turns.row["turns/limited"], turns.responses[0][0].truncated) == (1, True)
    assert turns.rewards[0, 0] == 4  # a limited trajectory is scored
    # Turns have three tokens and texts have two. So 3 + 2 + 3 fill eight, and a text of two more leaves no room.
    tokens = sample(problems, environments.Doubling, Scripted(), params=SamplingParams(10, 1.0, (STOP,)))
    assert len(tokens.responses[0][0].response) == 8
    # With eleven tokens the third turn has one. The limit counts even where the environment ends the trajectory.
    cut = sample([problem("1+1=", "3")], environments.Doubling, Scripted(), params=SamplingParams(11, 1.0, (STOP,)))
    assert cut.responses[0][0].turns.tolist() == [1, 1, 1, 0, 0, 2, 2, 2, 0, 0, 3]
    assert cut.row["turns/limited"] == 1
    short = sample(problems, environments.Doubling, Scripted(), max_turns=2, max_turn_tokens=2)
    assert short.responses[0][0].turns.tolist() == [1, 1, 0, 0, 2, 2]


def test_failed_trajectories_are_counted_and_have_no_reward():
    kinds = ["well", "raises", "hangs", "unscored", "reset"]
    problems = [problem("1+1=", "2", kind=kind) for kind in kinds]
    rollouts = sample(problems, environments.Failing, Scripted())
    assert np.isnan(rollouts.rewards[:, 0]).tolist() == [False, True, True, True, True]
    counts = {"reward/errors": 4, "reward/timeouts": 1, "turns/env_errors": 3, "turns/env_timeouts": 1}
    assert (counts | {"turns/env_deaths": 0}).items() <= rollouts.row.items()
    lengths = [group[0].length for group in rollouts.responses]
    assert lengths == [6, 6, 6, 6, 0]  # sampled tokens stay in the metrics
    assert rollout_row(rollouts, 1)["response_length/mean"] == 6.0  # a trajectory without a token has no length

    # A prompt that is too long fails its trajectory.
    rollouts = sample([problem("1+1=", "1"), problem("1+1=", "1", opening="1" * 9)], environments.Doubling, Scripted())
    assert np.isnan(rollouts.rewards[:, 0]).tolist() == [False, True]
    assert rollouts.row["reward/errors"] == 1


def test_when_every_trajectory_fails_at_once_the_run_ends():
    """A further round or an evaluation may fail at once."""
    problems = [problem("1+1=", "2", kind="reset")] * 2
    with sampling(environments.Failing, Scripted()) as sampler:
        with pytest.raises(RuntimeError, match=r"all 2 trajectories failed before their first token: .*no such proble"):
            sampler.sample(problems, 1)
        assert np.isnan(sampler.sample(problems, 1, round_number=1).rewards).all()
        assert np.isnan([one.reward for one in sampler.scored(problems, 0)]).all()


def test_a_stop_gives_up_what_is_sampled():
    stop = StopRequest()
    stop.gives_up = lambda: True
    with pytest.raises(StoppedWaitingError, match="asked to stop"):
        sample([problem("1+1=", "2")], environments.Doubling, Scripted(), stop=stop)
