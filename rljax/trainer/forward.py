"""The forward of a micro-batch: its scores, the values of its tokens, and the gradients of its loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from rljax.mismatch import Statistics
from rljax.policy.model import Params
from rljax.policy.score import Scores
from rljax.trainer.measure import balance_loss
from rljax.trainer.objective import NO_NUMBERS, BatchNumbers, Objective
from rljax.trainer.packing import PackedBatch

# The sums of a micro-batch: gradients, the statistics of ``Objective.micro_loss`` and the statistics of ``measure``.
MicroSums = tuple[Params, Statistics, dict[str, Statistics]]


def micro_gradients(
    compute: Params,
    micro: PackedBatch,
    objective: Objective,
    score: Any,
    scale: jax.Array,
    provisional: jax.Array,
    numbers: BatchNumbers = NO_NUMBERS,
) -> tuple[Params, Statistics, Scores]:
    """Computes the forward and backward of one micro-batch [b, t].

    ``compute`` has the parameters in the compute dtype, with respect to which the gradient is taken. ``score`` is a
    function of such parameters and a micro-batch. ``scale`` is the factor of the loss. ``Objective`` computes
    ``provisional``, a denominator of the loss, and the ``numbers`` of the whole batch. Returns the gradients in the
    compute dtype, the statistics of the loss, and the scores.
    """

    def loss_fn(compute: Params) -> tuple[jax.Array, tuple[Statistics, Scores]]:
        scores = score(compute, micro)
        balance: jax.Array | float = 0.0
        if objective.loss.router_balance and scores.stats.router is not None:
            balance = balance_loss(scores.stats.router)
        loss, statistics = objective.micro_loss(scores, micro, provisional, numbers, balance)
        return loss * scale, (statistics, scores)

    (_, (statistics, scores)), grads = jax.value_and_grad(loss_fn, has_aux=True)(compute)
    return grads, statistics, scores


class TokenValues(NamedTuple):
    """The values of the tokens of a batch that a forward keeps. A value that was not asked for is None."""

    logprobs: Any  # float32 [m, b, t], the trainer's log-probabilities
    routes: Any = None  # the ``PackedBatch.routes`` that the forward chose
    collision: Any = None  # float32 [m, b, t], the sums of the squared probabilities
    entropy: Any = None  # float32 [m, b, t], the entropies of the scored distributions (nats)
    tops: Any = None  # float32 [m, b, t, k], the trainer's log-probabilities of ``PackedBatch.top_ids``


def values_of(scores: Any, for_dumps: bool) -> TokenValues:
    """Returns the values of tokens from their scores. ``for_dumps``: Whether to keep entropies and ``tops``."""
    values = TokenValues(scores.logprobs)
    return values._replace(entropy=scores.entropy, tops=scores.tops) if for_dumps else values
