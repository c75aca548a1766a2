"""A small policy with its files, for comparisons."""

import pytest

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.model import init_params


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    """Returns the directory of a random policy of 64 tokens, of which token 3 ends a response."""
    config = PolicyConfig(64, 16, 32, 1, 2, 1, 8, tie_word_embeddings=True, initializer_range=0.3, eos_token_id=3)
    path = tmp_path_factory.mktemp("model")
    save_params(path, init_params(config, 0), config)
    return path
