"""Tabular autoregressive policies small enough to sum over all responses: probabilities, scores, exact gradients.

A policy of vocabulary v and length T is a list of T logit tables; table t is [v**t, v], a row for each prefix of t
tokens, prefixes numbered as base-v integers. Parameters enter the logits through features: table t of features is
[v**t, v, p], d logit / d parameter.
"""

import itertools

import numpy as np


def every_response(vocabulary, length, end=None):
    """(tokens, mask), both [n, length]; a response ends after its first ``end`` token, and is padded with it."""
    tokens = np.array(list(itertools.product(range(vocabulary), repeat=length)))
    if end is None:
        return tokens, np.ones(tokens.shape, bool)
    ended_before = np.cumsum(tokens == end, axis=1) - (tokens == end) > 0
    canonical = np.all(~ended_before | (tokens == end), axis=1)
    return tokens[canonical], ~ended_before[canonical]


def random_tables(rng, vocabulary, length, scale=1.0):
    return [scale * rng.standard_normal((vocabulary**t, vocabulary)) for t in range(length)]


def shifted(tables, other, scale=1.0):
    return [a + scale * b for a, b in zip(tables, other, strict=True)]


def free_features(vocabulary, length):
    """Each logit a parameter of its own: (v + ... + v**length) of them, in the order of the tables."""
    sizes = [vocabulary ** (t + 1) for t in range(length)]
    blocks = np.split(np.eye(sum(sizes)), np.cumsum(sizes)[:-1])
    return [block.reshape(vocabulary**t, vocabulary, -1) for t, block in enumerate(blocks)]


def log_softmax(logits):
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def prefixes(tokens, vocabulary):
    """[n, length] number of the prefix before each token."""
    number = np.zeros(tokens.shape, int)
    for t in range(1, tokens.shape[1]):
        number[:, t] = number[:, t - 1] * vocabulary + tokens[:, t - 1]
    return number


def token_logprobs(tables, tokens):
    """[n, length], nats."""
    where = prefixes(tokens, tables[0].shape[1])
    return np.stack([log_softmax(table)[where[:, t], tokens[:, t]] for t, table in enumerate(tables)], axis=1)


def token_scores(tables, features, tokens):
    """[n, length, p], d log pi(token) / d parameters: the feature of the token less its mean under the policy."""
    where = prefixes(tokens, tables[0].shape[1])
    out = []
    for t, (table, feature) in enumerate(zip(tables, features, strict=True)):
        mean = np.einsum("sv,svp->sp", np.exp(log_softmax(table)), feature)
        out.append(feature[where[:, t], tokens[:, t]] - mean[where[:, t]])
    return np.stack(out, axis=1)


def probabilities(logprobs, mask):
    """[n], of whole responses."""
    return np.exp(np.sum(np.where(mask, logprobs, 0), axis=1))


def gradient_of(function, tables):
    """Gradient of a real function of the logits by complex steps, in the order of the tables; exact to rounding."""
    step, found = 1e-30, []
    for t, table in enumerate(tables):
        for at in np.ndindex(table.shape):
            moved = [np.array(other, complex) for other in tables]
            moved[t][at] += 1j * step
            found.append(function(moved).imag / step)
    return np.array(found)
