"""Supports of cut distributions for packed batches, and the scores of such distributions from all logits."""

import jax
import jax.numpy as jnp
import numpy as np


def with_supports(batch, vocab_size, k, seed=0):
    """Returns the batch with up to ``k`` ids at each response token; one of them is the token."""
    rng = np.random.default_rng(seed)
    ids = np.full((*batch.tokens.shape, k), -1, np.int32)
    logprobs = np.full(ids.shape, -np.inf, np.float32)
    for place in zip(*np.nonzero(batch.response_mask), strict=True):
        others = np.delete(np.arange(vocab_size), batch.tokens[place])
        size = int(rng.integers(1, k + 1))
        ids[place][:size] = rng.permutation([batch.tokens[place], *rng.permutation(others)[: size - 1]])
        logprobs[place][:size] = np.log(rng.dirichlet(np.ones(size)))
    return batch._replace(top_ids=ids, top_logprobs=logprobs)


def cut_log_softmax(logits, ids):
    """Returns log-softmax rows [..., v] in which all tokens but ``ids`` [..., k] are very unlikely.

    A row without ids is the usual log-softmax.
    """
    support = (jax.nn.one_hot(ids, logits.shape[-1]) > 0).any(-2)  # one_hot is all zeros for -1
    return jax.nn.log_softmax(jnp.where(support | ~support.any(-1, keepdims=True), logits, -1e30))
