"""Batches of groups that begin alike, in rows of trees and in separate rows, and batches of cut distributions."""

from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from records import train_sequence

from rljax.trainer.packing import max_micro_batches, pack
from rljax.trainer.trees import pack_trees


def groups(count=5, size=4, *, vocab=24, seed=3, turns=False, tops=0, layers=0):
    """Returns groups of responses to prompts of 1 to 12 tokens; every third group carries no loss."""
    rng = np.random.default_rng(seed)
    made = []
    for group in range(count):
        prompt, shared = rng.integers(0, vocab, rng.integers(1, 13)), rng.integers(0, vocab, 6)
        for i in range(size):
            own = rng.integers(0, vocab, rng.integers(1, 14))
            # Every second response of a group has a beginning in common with the one before it.
            tokens = np.concatenate([shared[: 3 + i], own]) if i < 2 else own
            arrays = {"staleness": rng.integers(0, 3, len(tokens))}
            if turns:
                arrays["turn"] = (rng.random(len(tokens)) < 0.8).astype(np.int32)
            if tops:
                arrays["top_ids"] = np.argsort(rng.random((len(tokens), vocab)))[:, :tops]
                arrays["top_logprobs"] = -4.0 - rng.random((len(tokens), tops))
            noise = rng.normal(-3.0, 0.4, len(tokens))
            s = train_sequence(prompt, tokens, noise, float(rng.normal()), group % 3 != 2, **arrays)
            if layers:
                # The routes of a token depend on nothing but its path, except in the last group.
                text = [crc32(s.ids[: n + 1].tobytes()) + (i if group == count - 1 else 0) for n in range(len(s.ids))]
                own_routes = [np.random.default_rng(each).permuted([[1, 2, 3, 4]] * layers, axis=1) for each in text]
                routes = np.asarray(own_routes, np.uint8)[:, :, :2]
                routes[-1] = 0
                s = s.add({"routes": routes})
            made.append(s)
    return made


def separate(sequences, row=32, rows=2):
    longest = max(len(s.ids) for s in sequences)
    micro = max_micro_batches(len(sequences), longest, row, rows)
    return pack(sequences, row_tokens=row, rows_per_micro_batch=rows, micro_batches=micro)


def in_trees(sequences, row=48, rows=2, flat=40):
    micro = max_micro_batches(len(sequences), 32, row, rows)
    shape = {"row_tokens": row, "rows_per_micro_batch": rows, "micro_batches": micro, "flat_tokens": flat}
    return pack_trees(sequences, **shape)


def tree_tokens(batch):
    return int(np.count_nonzero(batch.trees.ends))


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
