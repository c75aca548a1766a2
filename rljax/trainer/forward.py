"""The forward of a micro-batch: its scores, the values of its tokens, and the gradients of its loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from rljax.mismatch import Statistics
from rljax.policy.config import PolicyConfig
from rljax.policy.kernels import Kernels
from rljax.policy.model import Params
from rljax.policy.score import Scores, packed_logprobs
from rljax.sharding import constrain, narrow_gradient_sums
from rljax.trainer.measure import balance_loss, replayed_choices
from rljax.trainer.micro_batches import batch_axes
from rljax.trainer.objective import NO_NUMBERS, BatchNumbers, Objective
from rljax.trainer.packing import PackedBatch
from rljax.trainer.state import PrecisionConfig

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


def make_score(
    config: PolicyConfig,
    precision: PrecisionConfig,
    temperature: float,
    kernels: Kernels,
    *,
    cut: bool = False,
    tops: bool = False,
    collision: bool = False,
) -> Any:
    """Returns a function ``score(compute, micro) -> Scores``. Each device gets the scores of all tokens.

    If the sampled distributions are ``cut`` to ``PackedBatch.top_ids``, scores are normalised over these. ``tops`` adds
    the log-probabilities of ``top_ids`` to the scores, and ``collision`` the sums of squared probabilities.
    """

    def score(compute: Params, micro: PackedBatch) -> Scores:
        tokens, top_ids = micro.tokens, micro.top_ids
        if top_ids is not None:
            # Losses need both whole. The policy works on the rows of each device.
            tokens, top_ids = (constrain(x, *batch_axes(x)) for x in (tokens, top_ids))
        elif cut or tops:
            raise ValueError("the batch must have the sampler's likeliest tokens (top_ids) to be scored, got none")
        with narrow_gradient_sums(precision.reduce_dtype == "compute"):
            scores = packed_logprobs(
                compute,
                config,
                *(tokens, micro.segment_ids, micro.positions),
                temperature=temperature,
                lm_head_dtype=precision.head_dtype,
                remat=precision.remat_policy,
                kernels=kernels,
                choices=replayed_choices(micro, config),
                top_ids=top_ids if cut or tops else None,
                cut=cut,
                collision=collision,
                trees=micro.trees,
            )
        of_tokens: dict[str, Any] = {
            name: x for name, x in scores._asdict().items() if name != "stats" and x is not None
        }
        whole: dict[str, Any] = {name: constrain(x, *[None] * x.ndim) for name, x in of_tokens.items()}
        return scores._replace(**whole)

    return score


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
