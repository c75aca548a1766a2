"""Tabular autoregressive policies so small that tests can sum over all responses: probabilities, scores, gradients.

A policy of vocabulary v and length T is a list of T tables of logits. Table t is [v**t, v], with a row for each prefix
of t tokens. Prefixes are numbered as base-v integers. Parameters enter the logits through features. Table t of the
features is [v**t, v, p], the derivative of each logit by each parameter.
"""

import itertools

import numpy as np


def every_response(vocabulary, length, end=None):
    """Returns (tokens, mask), both [n, length], of all responses. One ends after its first ``end``, which pads it."""
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
    """Returns features with which each logit is its own parameter: (v + ... + v**length) parameters in table order."""
    sizes = [vocabulary ** (t + 1) for t in range(length)]
    blocks = np.split(np.eye(sum(sizes)), np.cumsum(sizes)[:-1])
    return [block.reshape(vocabulary**t, vocabulary, -1) for t, block in enumerate(blocks)]


def log_softmax(logits):
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def prefixes(tokens, vocabulary):
    number = np.zeros(tokens.shape, int)
    for t in range(1, tokens.shape[1]):
        number[:, t] = number[:, t - 1] * vocabulary + tokens[:, t - 1]
    return number


def token_logprobs(tables, tokens):
    where = prefixes(tokens, tables[0].shape[1])
    return np.stack([log_softmax(table)[where[:, t], tokens[:, t]] for t, table in enumerate(tables)], axis=1)


def token_scores(tables, features, tokens):
    """Returns d log pi(token) / d parameters, [n, length, p]: the token's feature minus the mean under the policy."""
    where = prefixes(tokens, tables[0].shape[1])
    out = []
    for t, (table, feature) in enumerate(zip(tables, features, strict=True)):
        mean = np.einsum("sv,svp->sp", np.exp(log_softmax(table)), feature)
        out.append(feature[where[:, t], tokens[:, t]] - mean[where[:, t]])
    return np.stack(out, axis=1)


def probabilities(logprobs, mask):
    return np.exp(np.sum(np.where(mask, logprobs, 0), axis=1))


def gradient_of(function, tables):
    """Returns the gradient of a real function of the logits, in table order, by complex steps (exact to rounding)."""
    step, found = 1e-30, []
    for t, table in enumerate(tables):
        for at in np.ndindex(table.shape):
            moved = [np.array(other, complex) for other in tables]
            moved[t][at] += 1j * step
            found.append(function(moved).imag / step)
    return np.array(found)
