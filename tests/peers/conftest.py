"""Settings for tests in other projects' packages, whose own code promotes ranks."""

import jax
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "peers":
            item.add_marker(pytest.mark.peers)


@pytest.fixture(autouse=True)
def rank_promotion_allowed():
    """Allows rank promotion in the packages' own threads, too: ``jax.numpy_rank_promotion`` changes one thread."""
    before = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Returns the directory of a random Qwen3 of 4,000 weights, with a tokenizer whose words are w0 to w29."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("tiny")
    words = {name: i for i, name in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(30))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(words), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    ends = {"eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
    config = Qwen3Config(**sizes, **heads, **ends, initializer_range=0.5, dtype="float32")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path
