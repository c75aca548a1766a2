"""Hooks on real torch modules, put there as in a vLLM worker. Some force tokens, where a module is the sampler."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from rljax.rollout.servers.vllm.hooks import ForcedDecoding, Hooks  # noqa: E402
from rljax.rollout.servers.vllm.server import FORCED_TOKENS  # noqa: E402
from rljax.rollout.servers.vllm.taps import Taps  # noqa: E402

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))


class Sampler(torch.nn.Module):
    """A sampler that draws the likeliest token of each row."""

    def forward(self, logits):
        scores, tokens = torch.log_softmax(logits, -1).max(-1, keepdim=True)
        tensors = SimpleNamespace(logprob_token_ids=tokens.clone(), logprobs=scores)
        return SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=tensors)


def worker(*given, done=(), **config):
    """Returns a worker with one request for each entry of ``given``. An entry has the tokens to force, or is None."""
    requests = {
        str(i): SimpleNamespace(
            sampling_params=SimpleNamespace(extra_args=tokens and {FORCED_TOKENS: tokens}), output_token_ids=list(done)
        )
        for i, tokens in enumerate(given)
    }
    runner = SimpleNamespace(sampler=Sampler(), requests=requests, input_batch=SimpleNamespace(req_ids=list(requests)))
    made = ForcedDecoding()
    made.model_runner = runner
    model = SimpleNamespace(enable_trace_replay=config.get("replays", False))
    made.vllm_config = SimpleNamespace(speculative_config=config.get("speculates"), model_config=model)
    return made


def drawn(made):
    output = made.model_runner.sampler(logits=LOGITS.clone())
    scores = output.logprobs_tensors
    assert output.sampled_token_ids.tolist() == scores.logprob_token_ids.tolist()
    return [
        (int(token), round(float(torch.exp(score)), 4))
        for (token,), (score,) in zip(output.sampled_token_ids, scores.logprobs, strict=True)
    ]


def test_a_given_token_takes_the_place_of_the_drawn_one():
    """One token exists already, so the second given token is forced. The other request keeps its own token."""
    made = worker(None, [2, 1], done=[2])
    assert made.rljax_force() == {"way": "extra_args", "reason": ""}
    assert drawn(made) == [(0, 0.5), (1, 0.2)]
    made.model_runner.requests["1"].output_token_ids.append(1)
    assert drawn(made) == [(0, 0.5), (2, 0.7)]


def test_the_hooks_are_there_once():
    """Two clients may ask for them. A request without given tokens is sampled as without hooks."""
    made = worker([1], None)
    for _ in range(2):
        made.rljax_force()
    assert drawn(made) == [(1, 0.25), (2, 0.7)]
    assert count(made.model_runner.sampler) == 2


@pytest.mark.parametrize("tokens", [[3], [-1], ["x"]])
def test_a_token_that_the_model_lacks_ends_the_forcing_alone(tokens, caplog):
    made = worker([1], tokens)
    made.rljax_force()
    assert drawn(made) == [(0, 0.5), (2, 0.7)]
    assert "ValueError" in caplog.text


def test_a_server_that_cannot_says_why():
    assert "speculation" in worker(speculates="ngram").rljax_force()["reason"]
    made = worker(replays=True)
    made.model_runner = SimpleNamespace()
    assert made.rljax_force()["way"] == "trace_decode_token_ids"
    made.vllm_config.model_config.enable_trace_replay = False
    assert "needs --enable-trace-replay" in made.rljax_force()["reason"]


# ---- Any hooks ----


def count(*modules):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for whole in modules for part in whole.modules())


def broken(*args):
    raise KeyError("planted")


def test_an_error_removes_all_hooks_and_the_forward_goes_on():
    first, second, seen = torch.nn.Identity(), torch.nn.Identity(), []
    hooks = Hooks()
    hooks.before(first, lambda args, kwargs: seen.append("before"))
    hooks.after(first, lambda args, output: 2 * output)
    hooks.after(second, broken)
    hooks.after(second, lambda args, output: seen.append("after an error"))
    assert (first(torch.tensor(3.0)), count(first, second), hooks.error) == (6.0, 4, "")
    assert second(torch.tensor(3.0)) == 3.0
    assert (seen, count(first, second), hooks.error) == (["before"], 0, "KeyError: 'planted'")
    assert first(torch.tensor(3.0)) == 3.0
    hooks.remove()


def test_a_model_whose_operations_are_not_known_keeps_no_hook(tmp_path):
    """The model's embedding and block are found, but the block has no attention.

    An error is raised and no hook stays.
    """
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.embed_tokens, model.model.layers = torch.nn.Embedding(2, 2), torch.nn.ModuleList([torch.nn.Identity()])
    with pytest.raises(AttributeError, match="self_attn"):
        Taps(SimpleNamespace(model=model), tmp_path, "a request", 0, 1)
    assert count(model) == 0
