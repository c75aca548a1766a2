"""Runs on a server that spoils its replies at single steps: each fault is said in one line, and no other step is."""

import base64
import json
import threading

import numpy as np
import pytest
from toy_runs import TOY_BASE, complete, tiny
from vllm_fake import as_base64

from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.score import make_scorer

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


def vectors(replies):
    return [np.frombuffer(base64.b64decode(reply["scores"]["logprobs"]), "<f4") for reply in replies]


def changed(change):
    """Returns a fault that changes the log-probabilities of each reply."""

    def fault(replies):
        for reply, values in zip(replies, vectors(replies), strict=True):
            reply["scores"]["logprobs"] = as_base64(change(values), "<f4")

    return fault


def permuted(replies):
    for reply, values in zip(replies, np.roll(vectors(replies), 1, axis=0), strict=True):
        reply["scores"]["logprobs"] = as_base64(values, "<f4")


def one_for_all(replies):
    for reply in replies[1:]:
        reply |= {name: replies[0][name] for name in ("token_ids", "scores")}


def of_others(replies):
    """Gives each response to another prompt's request, which the hash in the reply does not show."""
    contents = [{name: reply[name] for name in ("token_ids", "scores")} for reply in replies]
    for reply, content in zip(replies, contents[RESPONSES // 2 :] + contents[: RESPONSES // 2], strict=True):
        reply |= content


SHARE = "responses have one log-probability at all their tokens"
FAULTS = {
    3: (changed(lambda values: np.append(values[1:], values[:1])), "not_comparable: log-probabilities shifted by one"),
    5: (changed(np.zeros_like), f"not_comparable: 8 of 8 {SHARE} (0 in the first)"),
    7: (changed(lambda values: np.full_like(values, values.mean())), f"not_comparable: 8 of 8 {SHARE} ("),
    9: (one_for_all, "not_comparable: 8 of 8 responses have the tokens and, to the bit, the log-probabilities of a"),
    11: (changed(lambda values: 0.8 * values), "temperature: scaled log-probabilities"),
    13: (permuted, "not_comparable: log-probabilities permuted between responses (mismatch/logprob_abs_diff_mean is "),
    15: (of_others, "cannot_tell: neither constant, shifted by one, scaled nor permuted; replies of other prompts or"),
}


def test_each_fault_is_said_in_one_line(fake, policy, tmp_path):
    run, steps = tmp_path / "run", max(FAULTS) + 1
    sound = fake.lines

    def lines(asked):
        answered = sorted(
            (int(number), json.loads(said)) for number, _, said in (x.split(b" ", 2) for x in sound(asked))
        )
        replies = [reply for _, reply in answered]
        rows = run / "metrics.jsonl"
        step = 1 + (len(rows.read_text().splitlines()) if rows.exists() else 0)
        if step in FAULTS and len(asked) == RESPONSES and asked[0]["sampling_params"]["max_tokens"] == LIMIT:
            FAULTS[step][0](replies)
        yield from (f"{number} 200 {json.dumps(reply)}\n".encode() for number, reply in enumerate(replies))

    fake.policy, fake.lines, fake.described = (
        policy,
        lines,
        {"shape": json.loads((TOY_BASE / "config.json").read_text())},
    )
    served = ("--rollout.engine", "vllm", "--rollout.urls", fake.url, "--rollout.dtype", "float32")
    status, output = complete(tiny(TOY_BASE, run, steps, *served, "--precision.compute-dtype", "float32"))
    assert status == 0, output
    said = dict(
        line.removeprefix("warning: step ").split(": ", 1) for line in output.splitlines() if "warning: step" in line
    )
    assert list(said) == [str(step) for step in FAULTS], output
    for step, (_, words) in FAULTS.items():
        assert said[str(step)].startswith(words)
    print(output)
