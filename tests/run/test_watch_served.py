"""Runs on a server that spoils its replies at single steps: each fault is said in one line, and no other step is."""

import base64
import json
import threading

import numpy as np
import pytest
from toy_runs import TOY_BASE, completed, tiny
from vllm_fake import as_base64

from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.score import make_scorer
from rljax.record.rows import read_rows

LIMIT, RESPONSES = 12, 8


@pytest.fixture(scope="module")
def policy():
    """A function that draws random digits, and gives them the log-probabilities that the toy's base gives them."""
    config = read_config(TOY_BASE)
    params, lock = load_params(TOY_BASE, config), threading.Lock()
    score = make_scorer(config, "float32")

    def draw(prompt, sampling):
        count = sampling["max_tokens"]
        tokens = np.random.default_rng([sampling["seed"] or 0, len(prompt)]).integers(0, 10, count)
        with lock:
            (logprobs,) = score(params, [np.concatenate([prompt, tokens]).astype(np.int32)])
        return tokens.tolist(), logprobs[len(prompt) :].tolist()

    return draw


def changed(change):
    """Returns a fault that changes the log-probabilities of each reply."""

    def fault(replies):
        for reply in replies:
            values = np.frombuffer(base64.b64decode(reply["scores"]["logprobs"]), "<f4")
            reply["scores"]["logprobs"] = as_base64(change(values), "<f4")

    return fault


def one_for_all(replies):
    for reply in replies[1:]:
        reply |= {name: replies[0][name] for name in ("token_ids", "scores")}


def of_others(replies):
    """Gives each response to another prompt's request, which the hash in the reply does not show."""
    contents = [{name: reply[name] for name in ("token_ids", "scores")} for reply in replies]
    for reply, content in zip(replies, contents[RESPONSES // 2 :] + contents[: RESPONSES // 2], strict=True):
        reply |= content


FAULTS = {
    3: (changed(lambda values: np.append(values[1:], values[:1])), "not_comparable: log-probabilities shifted by one"),
    5: (changed(np.zeros_like), "not_comparable: 8 of 8 responses have one log-probability at all their tokens (0 in"),
    7: (one_for_all, "not_comparable: 8 of 8 responses have the tokens and, to the bit, the log-probabilities of a"),
    9: (of_others, "cannot_tell: neither constant, shifted by one, scaled nor permuted; replies of other prompts or"),
}


class Spoiler:
    """Holds the replies of a step back until all are there, and spoils them if the step has a fault."""

    def __init__(self, fake, rows):
        self.sound, self.rows, self.held, self.arrived = fake.lines, rows, {}, threading.Condition()

    def lines(self, asked):
        answered = [line.split(b" ", 2) for line in self.sound(asked)]
        replies = [json.loads(said) for _, _, said in sorted(answered, key=lambda line: int(line[0]))]
        if asked[0]["sampling_params"]["max_tokens"] == LIMIT:  # not a probe
            step = 1 + (len(self.rows.read_text().splitlines()) if self.rows.exists() else 0)
            with self.arrived:
                held = self.held.setdefault(step, [])
                held += replies
                if len(held) == RESPONSES and step in FAULTS:
                    FAULTS[step][0](held)
                self.arrived.notify_all()
                assert self.arrived.wait_for(lambda: len(held) == RESPONSES, timeout=60)
        yield from (f"{number} 200 {json.dumps(reply)}\n".encode() for number, reply in enumerate(replies))


def said_by(fake, policy, run, steps):
    """Returns the output of a run on the server ``fake``, which samples with ``policy``."""
    fake.policy, fake.described = policy, {"shape": json.loads((TOY_BASE / "config.json").read_text())}
    served = ("--rollout.engine", "vllm", "--rollout.urls", fake.url, "--rollout.verify.tokens", "8")
    float32 = ("--rollout.dtype", "float32", "--precision.compute-dtype", "float32")
    return completed(tiny(TOY_BASE, run, steps, *served, *float32), is_sound=False)


def test_each_fault_is_said_in_one_line(fake, policy, tmp_path):
    run, steps = tmp_path / "run", max(FAULTS) + 1
    fake.lines = Spoiler(fake, run / "metrics.jsonl").lines
    output = said_by(fake, policy, run, steps)
    begin = "warning: step "
    said = [line.removeprefix(begin).split(": ", 1) for line in output.splitlines() if line.startswith(begin)]
    assert [int(step) for step, _ in said] == list(FAULTS), output
    for step, words in said:
        assert words.startswith(FAULTS[int(step)][1])
    rows = read_rows(run / "metrics.jsonl")
    counted = [(row["rollout/repeated_responses"], row["rollout/constant_responses"]) for row in rows]
    assert counted == [{5: (0, 8), 7: (8, 0)}.get(step, (0, 0)) for step in range(1, steps + 1)]
    assert [row["mismatch/jump"] for row in rows] == [int(step in FAULTS) for step in range(1, steps + 1)]

    # A run that goes on knows the median of its rows. Alone, a gap of less than half a nat would be no jump.
    def scaled(prompt, sampling):
        tokens, logprobs = policy(prompt, sampling)
        factor = 0.95 if sampling["max_tokens"] == LIMIT else 1.0  # the probes stay sound
        return tokens, [factor * value for value in logprobs]

    said = said_by(fake, scaled, run, steps + 1)
    assert f"warning: step {steps + 1}: temperature: scaled log-probabilities" in said
    assert f"the median of {steps - len(FAULTS)} earlier rows is" in said
    assert 0.02 < read_rows(run / "metrics.jsonl")[-1]["mismatch/logprob_abs_diff_mean"] < 0.5
