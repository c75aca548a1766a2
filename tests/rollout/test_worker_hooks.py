"""Hooks on real torch modules, put there as in a vLLM worker, are removed together and raise nothing."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from rljax.rollout.servers.vllm.hooks import Hooks  # noqa: E402
from rljax.rollout.servers.vllm.taps import Taps  # noqa: E402


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
    assert (first(torch.tensor(3.0)), hooks.is_installed, hooks.error) == (6.0, True, "")
    assert second(torch.tensor(3.0)) == 3.0
    assert (seen, hooks.is_installed, hooks.error) == (["before"], False, "KeyError: 'planted'")
    assert count(first, second) == 0
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
