"""The example verifiers_rollouts plays environments of verifiers, and a real receiver of a trainer takes its rows."""

import math
import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from generate_server import VERSIONS, routes_of
from toy_runs import start, tiny
from waiting import free_port, until

from rljax.data.prompts import DataConfig
from rljax.data.tokenizer import load_tokenizer
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.score import make_scorer
from rljax.record.rows import read_rows
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.external.queue import TrajectoryQueue
from rljax.rollout.external.receiver import Receiver
from rljax.rollout.external.rows import RowLimits
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.run.config import Config, ModelConfig
from rljax.run.config_file import config_to_yaml
from rljax.tokens import as_stored

pytestmark = pytest.mark.verifiers
ROOT = Path(__file__).parents[3]
TOY = ROOT / "rljax/configs/toy-base"
EOS = 14
TURNS = {"taskset": {"id": "turns_env"}}
ADDER = {"taskset": {"id": "adder_env"}, "renderer": {"parser": "adder_env:calls"}}


class Trainer:
    """The receiver of a trainer with policy 1, and the example beside it. ``groups`` groups may wait."""

    def __init__(self, python, tmp_path, server, settings, *, n, groups, room=60, model=TOY, routes=None, **limits):
        (tmp_path / "rows").mkdir()
        self.file, self.run_dir, self._python = tmp_path / "environment.yaml", tmp_path, python
        self.file.write_text(yaml.safe_dump(settings))
        turn = {"max_turn_tokens": limits.pop("max_turn_tokens", 0)}
        prompt = limits.pop("max_prompt_tokens", 64)
        episode = EpisodeConfig(**{"tool_timeout_s": 60.0, "call_timeout_s": 120.0} | turn | limits)
        sizes = RowLimits(16, 64, SamplingParams(room, reported=2, stop_token_ids=(EOS,)), episode.max_rows, routes)
        self.queue = TrajectoryQueue(tmp_path / "rows", sizes, group_size=n, max_staleness=1)
        self.queue.start(1, 1)
        facts = {"group_size": n, "batch_size": groups, "max_staleness": 0}
        self.receiver = Receiver("http://127.0.0.1:0", self.queue, max_groups=groups, facts=facts)
        self.receiver.start()
        served = {"engine": "vllm", "urls": (server.url,), "trajectories": self.receiver.url, "group_size": n}
        replay = "none" if routes is None else "r3"
        rollout = RolloutConfig(
            **served, max_response_tokens=room, top_logprobs=2, router_replay=replay, episode=episode
        )
        config = Config(model=ModelConfig(path=str(model)), data=DataConfig(max_prompt_tokens=prompt), rollout=rollout)
        (tmp_path / "config.yaml").write_text(config_to_yaml(config))

    def start(self, groups):
        return example(self._python, self.run_dir, self.file, "--groups", str(groups))

    def take(self, groups):
        return [one for group in self.queue.take(groups, 2) for one in group]


def example(python, *words):
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "environments")])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [python, str(ROOT / "examples/verifiers_rollouts"), *map(str, words)]
    return subprocess.Popen(words, env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT / "tests", **pipes)


@pytest.fixture
def trainer(verifiers_python, tmp_path):
    made = []

    def make(*arguments, **options):
        made.append(Trainer(verifiers_python, tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.receiver.close()


@pytest.fixture
def play(trainer):

    def played(server, settings, *, n=2, groups=2, **options):
        made = trainer(server, settings, n=n, groups=groups, **options)
        process = made.start(groups)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return made.take(groups), output

    return played


def check_row(server, row):
    """Checks that the turns of a row are answers of the server to the tokens before them, and unknown between them."""
    assert (row["rollout_logprobs"][~row.sampled] == 0).all()
    assert (row["top_ids"][~row.sampled] == -1).all()
    for number in sorted(set(row.turns.tolist()) - {0}):
        here = np.flatnonzero(row.turns == number)
        answers = server.kept[tuple(row.ids[: row.prompt_length + here[0]].tolist())]
        logprobs = row["rollout_logprobs"][here].tobytes()
        answer = next(one for one in answers if one["rollout_logprobs"].tobytes() == logprobs)
        assert row.response[here].tolist() == answer.response.tolist()
        for name in ("top_ids", "top_logprobs"):
            assert row[name][here].tobytes() == answer[name].tobytes()


def check_scores(row):
    """Checks that the trainer's own forward gives the row's log-probabilities at the sampled tokens."""
    policy = read_config(TOY)
    (own,) = make_scorer(policy, "float32")(load_params(TOY, policy), [row.ids])
    expected = row["rollout_logprobs"][row.sampled]
    np.testing.assert_allclose(own[row.prompt_length :][row.sampled], expected, atol=2e-5)


SERVERS = ["toy_server", pytest.param("vllm_server", marks=pytest.mark.vllm)]


@pytest.mark.parametrize("name", SERVERS)
def test_turns_as_the_server_answered(play, request, name):
    """Each of the four tasks is played once, and each turn's first token is of the version before the others'."""
    server, tokenizer = request.getfixturevalue(name), load_tokenizer(TOY)
    routes = {"routes": (1, 2, 16)} if name == "toy_server" else {}
    played, output = play(server, TURNS, groups=4, **routes)
    assert "failed" not in output
    prompts = sorted(tokenizer.decode(one.response.prompt) for one in played)
    assert prompts == [f"{i}+1=" for i in range(4) for _ in range(2)]
    for one in played:
        row = one.response
        assert set(row.turns.tolist()) == {0, 1, 2, 3}
        assert tokenizer.decode(row.response[~row.sampled]) == "9+9+"
        assert one.reward == len(tokenizer.decode(row.response[row.sampled]))
        check_scores(row)
        if name == "toy_server":
            check_row(server, row)
            np.testing.assert_array_equal(row.columns["routes"], as_stored(routes_of(row.ids)))
            begins = np.flatnonzero(np.diff(row.turns, prepend=0) > 0)
            assert row["version"][begins].tolist() == [0, 0, 0]
            assert set(row["version"][row.sampled].tolist()) == set(range(len(VERSIONS)))


@pytest.mark.parametrize("name", SERVERS)
def test_a_tool_that_adds(play, request, name):
    server, tokenizer, replies = request.getfixturevalue(name), load_tokenizer(TOY), 0
    played, output = play(server, ADDER, n=4, max_turns=4)
    for one in played:
        row, i = one.response, tokenizer.decode(one.response.prompt)[0]
        assert tokenizer.decode(row.prompt) == f"{i}{i}1+11{i}="
        expected, count = "", int(row.turns.max())
        for turn in range(1, count):
            digits = [c for c in tokenizer.decode(row.response[row.turns == turn]) if c.isdigit()]
            expected += f"{int(digits[0]) + int(digits[-1])}="
        assert tokenizer.decode(row.response[~row.sampled]) == expected
        replies += count - 1
        assert one.reward >= count - 1  # the reply to the last turn of a full trajectory is not read
        check_scores(row)
        if name == "toy_server":
            check_row(server, row)
    assert sum(map(int, re.findall(r"(\d+) calls of tools", output))) >= replies > 0
    assert "errors of tools" not in output
    assert "failed" not in output


@pytest.mark.parametrize(("mode", "name"), [("raises", "errors"), ("hangs", "timeouts"), ("dies", "timeouts")])
def test_a_tool_that_misbehaves(play, toy_server, mode, name):
    settings = ADDER | {"taskset": {"id": "adder_env", "tools": {"mode": mode}}}
    late = {} if mode == "raises" else {"tool_timeout_s": 3.0}
    played, output = play(toy_server, settings, max_turns=2, room=300, **late)
    counts = [sum(map(int, re.findall(rf"(\d+) {kind} of tools", output))) for kind in ("calls", name)]
    assert counts[0] == counts[1] > 0
    assert all(math.isfinite(one.reward) for one in played)


@pytest.mark.parametrize(
    ("task", "limits", "why"),
    [
        ({"rewards_fail": True}, {}, "unscored: "),
        ({"seconds": 600.0}, {"call_timeout_s": 5.0}, "timeout: the environment took more than 5 s"),
    ],
)
def test_a_reward_that_raises_or_is_late_fails_the_trajectory(play, toy_server, task, limits, why):
    played, output = play(toy_server, {"taskset": {"id": "turns_env", "task": task}}, groups=1, **limits)
    assert f"2 of 2 failed, such as {why}" in output
    for one in played:
        assert math.isnan(one.reward)
        assert one.response.length > 0
        if not limits:
            check_row(toy_server, one.response)


@pytest.mark.parametrize("max_rows", [1, 3])
def test_turns_that_do_not_extend_the_last(play, toy_server, forgetful_model, max_rows):
    played, output = play(toy_server, TURNS, model=forgetful_model, max_rows=max_rows)
    assert ("rows: it has 3, more than rollout.episode.max_rows = 1" in output) == (max_rows == 1)
    tokenizer = load_tokenizer(TOY)
    for one in played:
        assert math.isnan(one.reward) == (max_rows == 1)
        rows = one.response.rows
        assert len(rows) == max_rows
        for k, row in enumerate(rows):
            assert set(row.turns.tolist()) == {k + 1}
            check_row(toy_server, row)
            if k:
                assert tokenizer.decode(row.prompt) == "9+"


def test_a_trajectory_without_room(play, toy_server):
    """The prompt has 4 tokens, a turn samples 3 and the user writes 2, so the second turn is cut at 8 tokens."""
    settings = TURNS | {"turns": 4, "renderer": {"stops": []}}  # only the limit ends a turn
    played, output = play(toy_server, settings, room=8, max_turn_tokens=3)
    assert "failed" not in output
    for one in played:
        assert one.response.turns.tolist() == [1, 1, 1, 0, 0, 2, 2, 2]
        assert one.response.truncated
        assert one.reward > 0


def test_an_agent_that_is_not_trained_leaves_no_trace(play, toy_server):
    """Each turn of the other agent is cut after a token. Its first prompt is longer than the run's limit."""
    settings = TURNS | {"both": True, "fixed": True, "other": {"sampling": {"max_tokens": 1}}}
    played, output = play(toy_server, settings, max_prompt_tokens=4)
    assert "failed" not in output
    for one in played:
        check_row(toy_server, one.response)
        assert set(one.response.turns.tolist()) == {0, 1, 2, 3}
        assert one.response.truncated == (one.response.response[-1] != EOS)


# The settings of environments that no run can be trained on, the limits of the run, and what the last line says.
REFUSED = [
    (TURNS | {"both": True}, {}, r"^error: .*2 agents of one episode are trained \(agent, other\)"),
    (TURNS | {"agent": {"runtime": {"type": "prime"}}}, {}, r"^error: .*agent\.runtime must run on this .*, got prime"),
    ({"taskset": {"id": "no_such_env"}}, {}, r"^error: .*cannot be loaded: .*no_such_env"),
    (TURNS, {"max_prompt_tokens": 2}, "each of the last 2 groups had a trajectory that failed before its first token"),
]


@pytest.mark.parametrize(("settings", "limits", "message"), REFUSED)
def test_an_environment_that_cannot_be_trained_on(trainer, toy_server, settings, limits, message):
    process = trainer(toy_server, settings, n=2, groups=1, **limits).start(1)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert not limits or "the prompt has 4 tokens, expected 1 to 2" in output
    assert re.search(message, output.splitlines()[-1])


def test_the_next_groups_wait_for_the_next_policy(trainer, toy_server):
    """Two places are free for policy 1. After a step took their groups, no group is begun until policy 2 is there."""
    made = trainer(toy_server, TURNS, n=2, groups=2)
    process = made.start(4)
    try:
        until(lambda: made.queue.counts()[0] == 2)
        made.take(2)
        made.queue.expect(2)
        time.sleep(2.0)
        assert made.queue.counts() == (0, 0, 0)
        made.queue.publish(2)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert made.queue.counts()[0] == 2


@pytest.mark.vllm
def test_a_run_trains_on_environments_of_verifiers(verifiers_python, vllm_server, tmp_path):
    """The run publishes its weights to the server, and the example samples each step's rows with them."""
    url = f"http://127.0.0.1:{free_port()}"
    served = ("--rollout.engine", "vllm", "--rollout.urls", vllm_server.url, "--rollout.dtype", "float32")
    sizes = ("--rollout.max-response-tokens", "60", "--packing.row-tokens", "128")
    dtype = ("--precision.compute-dtype", "float32")
    run = start(tiny(TOY, tmp_path / "run", 3, "--rollout.trajectories", url, *served, *sizes, *dtype))
    try:
        until(lambda: (tmp_path / "run/config.yaml").exists() or run.poll() is not None)
        process = example(verifiers_python, tmp_path / "run", "turns_env", "--groups", "6")
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        said, _ = run.communicate(timeout=300)
        assert run.returncode == 0, said
    finally:
        run.kill()
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["rollout/policy_version"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["rollout/staleness"] == row["rollout/dropped_stale_rows"] == row["rollout/failed_trajectories"] == 0
        assert row["turns/max"] == 3
        assert row["mismatch/logprob_abs_diff_mean"] < 1e-4
