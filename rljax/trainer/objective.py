"""The loss of a step: policy loss, importance correction and KL penalty of packed micro-batches, and its gradient.

A loss is a sum of weighted token terms over a denominator. Rejection and normalisation change the denominator, and only
the whole batch shows by how much. So each micro-batch is divided by a provisional denominator, which is known before
the step and keeps float16 gradients in range. ``rescaling`` then turns the summed gradient into the gradient of the
loss. If the weights are normalised, it also divides by their mean. A KL penalty must not be divided, so it is
multiplied by the mean in advance. Then ``old_logprobs`` must be known before the loss.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.algorithms.correction_choice import CorrectionConfig, correct, gradient_divisor
from rljax.algorithms.likely_tokens import (
    LikelyTokens,
    centering_losses,
    read_likely_tokens,
    read_sides,
    region_weights,
    token_row,
)
from rljax.algorithms.losses import LossConfig, aggregation_weights, kl_penalty, policy_loss
from rljax.mismatch import Statistics
from rljax.mismatch.correction import finalize_correction
from rljax.mismatch.regions import moment_bound
from rljax.policy.head import TokenScores
from rljax.policy.model import Params
from rljax.sharding import constrain
from rljax.trainer.measure import balance_loss
from rljax.trainer.packing import PackedBatch


class BatchNumbers(NamedTuple):
    """The numbers that a micro-batch's loss needs of the whole batch. The defaults are for a loss that needs none."""

    mean_weight: Float[Array, ""] | float = 1.0  # the mean weight that ``rescaling`` will divide by
    largest_distance: Any = None  # the bound of a region of the kind "moment", float32 []


NO_NUMBERS = BatchNumbers()


@dataclass(frozen=True)
class Objective:
    """The loss of a batch of ``num_sequences`` responses."""

    loss: LossConfig  # the policy loss and its penalties
    correction: CorrectionConfig  # the correction of the mismatch between sampler and trainer
    num_sequences: int  # the number of responses of a batch
    max_response_tokens: int  # the divisor of a response's sum if loss.sequence_constant is 0
    has_tail: bool = True  # whether the sampler could sample tokens besides the reported ones

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a batch must have ``old_logprobs``, because its loss needs ``batch_numbers``.

        A loss with a penalty and normalised weights needs the mean weight, and a region may need its bound.
        """
        has_penalty = self.loss.kl != "none" or self.loss.router_balance > 0
        return (has_penalty and self.correction.normalize) or self.correction.cuts_batch

    def micro_loss(
        self,
        scores: TokenScores,
        micro: PackedBatch,
        provisional: Float[Array, ""],
        numbers: BatchNumbers = NO_NUMBERS,
        balance: Float[Array, ""] | float = 0.0,
    ) -> tuple[Float[Array, ""], Statistics]:
        """Computes the micro-batch's share of the loss, over the provisional denominator, and its statistics.

        The statistics have no gradient. They are the statistics of the correction, and these sums:

        - ``policy``: the weighted losses, over the provisional denominator;
        - ``kl`` and ``balance``: the KL penalty and the balancing loss, without their coefficients, times the mean
          weight over the provisional denominator;
        - ``clipped``: the number of tokens on the clipped branch;
        - ``loss_tokens``: the number of tokens in the loss after rejection;
        - ``denominator``: the micro-batch's part of the denominator.

        ``scores`` belong to the micro-batch under the trained parameters, with ``tops`` if the correction needs them.
        ``provisional`` is the value of the method of this name, and ``numbers`` the value of ``batch_numbers``.
        ``balance`` is the ``measure.balance_loss`` of the micro-batch, which is weighted by the micro-batch's share of
        the denominator.
        """
        logprobs = scores.logprobs
        where: dict[str, Any] = {"sequence_ids": micro.sequence_ids, "num_sequences": self.num_sequences}
        before = jax.lax.stop_gradient(logprobs) if micro.old_logprobs is None else micro.old_logprobs
        weights, kept, correction = correct(self.correction, *self._sides(before, micro), micro.loss_mask, **where)
        old = micro.rollout_logprobs if self.loss.old_logprobs == "rollout" else before
        staleness = micro.staleness if self.loss.clips_stale else None
        weights, kept, centering, of_tokens = self._correct_tokens(weights, scores, micro, kept, numbers)
        losses, clipped = policy_loss(self.loss, logprobs, old, micro.advantages, kept, staleness=staleness, **where)
        constant = self.loss.sequence_constant or self.max_response_tokens
        share, denominator = aggregation_weights(self.loss.aggregation, kept, constant=constant, **where)
        terms = share * weights * losses
        terms = terms if centering is None else terms + share * centering
        policy = jnp.sum(jnp.where(kept, terms, 0.0)) / provisional
        kl = jnp.float32(0.0)
        if self.loss.kl != "none":
            penalty = kl_penalty(self.loss.kl, logprobs, micro.reference_logprobs, kept)
            kl = jnp.sum(share * penalty) * (numbers.mean_weight / provisional)
        balanced = balance * denominator * (numbers.mean_weight / provisional)
        sums = {
            "policy": policy,
            "kl": kl,
            "balance": balanced,
            "clipped": jnp.sum(jnp.where(kept, clipped, 0.0)),
            "loss_tokens": jnp.sum(kept).astype(jnp.float32),
            "denominator": denominator,
        }
        statistics = dataclasses.replace(correction, sums=correction.sums | sums | of_tokens)
        loss = policy + self.loss.kl_coefficient * kl + self.loss.router_balance * balanced
        return loss, jax.lax.stop_gradient(statistics)

    def _correct_tokens(
        self, weights: Float[Array, "b t"], scores: Any, micro: PackedBatch, kept: Any, numbers: BatchNumbers
    ) -> tuple[Float[Array, "b t"], Any, Float[Array, "b t"] | None, dict[str, Any]]:
        """Returns the weights within the trust region, the mask, the losses of score centering or None, and sums.

        The sums are for the row. The mask omits tokens of ``kept`` outside the region if these leave the denominator.
        """
        region, centers = self.correction.trust_region, self.correction.score_centering
        if region is None and not centers:
            return weights, kept, None, {}
        compared = jax.lax.stop_gradient(scores.logprobs)
        if region is not None and self.correction.cuts_batch:
            # The bound is of the log-probabilities before the first update.
            compared, region = micro.old_logprobs, dataclasses.replace(region, threshold=numbers.largest_distance)
        sides = read_sides(*self._sides(compared, micro), kept, micro.advantages)
        likely: LikelyTokens | None = None
        if self.correction.needs_tops:
            lists = (scores.tops, micro.top_logprobs, micro.top_ids)
            likely = read_likely_tokens(*lists, micro.tokens, kept, has_tail=self.has_tail)
        sums: dict[str, Any] = {}
        distance, centering = None, None
        if region is not None:
            factor, distance, sums = region_weights(region, sides, likely)
            weights = weights * factor
            # In AReaL's form of M2PO the tokens outside leave the denominator of the loss.
            kept = kept & (factor > 0) if region.kind == "moment" and not region.one_sided else kept
        if centers and likely is not None:
            centering, of_center = centering_losses(self.correction, sides, likely, distance)
            sums = sums | of_center
        return weights, kept, centering, sums

    def _sides(self, before: Any, batch: PackedBatch) -> tuple[Any, Any]:
        """Returns the two log-probabilities whose difference is corrected.

        ``before`` has the trainer's log-probabilities before the first update. A token has no drift if the policy that
        sampled it is not kept.
        """
        if self.correction.part == "whole":
            return before, batch.rollout_logprobs
        stale = (batch.staleness > 0) & jnp.isfinite(batch.behaviour_logprobs)
        behaviour = jnp.where(stale, batch.behaviour_logprobs, before)
        return (behaviour, batch.rollout_logprobs) if self.correction.part == "numerics" else (before, behaviour)

    def provisional(self, batch: PackedBatch) -> Float[Array, ""]:
        """Returns the denominator of the batch if nothing is rejected, or a number near it; at least 1."""
        if self.loss.aggregation == "token_mean":
            return jnp.maximum(jnp.sum(batch.loss_mask), 1).astype(jnp.float32)
        return jnp.float32(self.num_sequences)

    def batch_numbers(self, batch: PackedBatch) -> BatchNumbers:
        """Returns the numbers of the whole batch [m, b, t] that the loss of each micro-batch needs.

        The batch must have ``old_logprobs`` if ``needs_old_logprobs`` is True.
        """
        if not self.needs_old_logprobs:
            return NO_NUMBERS
        arrays = (*self._sides(batch.old_logprobs, batch), batch.loss_mask, batch.sequence_ids, batch.advantages)
        first, second, mask, ids, advantages = (
            constrain(array, None, None, None).reshape(-1, array.shape[-1]) for array in arrays
        )
        where: dict[str, Any] = {"sequence_ids": ids, "num_sequences": self.num_sequences}
        _, kept, statistics = correct(self.correction, first, second, mask, **where)
        numbers, region = BatchNumbers(gradient_divisor(self.correction, statistics)), self.correction.trust_region
        if region is None or not self.correction.cuts_batch:
            return numbers
        bound = moment_bound(jnp, region, *read_sides(first, second, kept, advantages))
        return numbers._replace(largest_distance=bound)

    def rescaling(self, statistics: Statistics, provisional: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the factor that makes the summed gradient the loss's gradient; 0 if every token was rejected."""
        denominator = statistics["denominator"]
        divisor = denominator * gradient_divisor(self.correction, statistics)
        return jnp.where(denominator > 0, provisional / jnp.where(divisor > 0, divisor, 1.0), 0.0)


def loss_row(objective: Objective, statistics: Statistics, rescaling: Float[Array, ""]) -> dict[str, jax.Array]:
    """Returns the metrics of the loss for the step's row of metrics."""
    loss = statistics["policy"] + objective.loss.kl_coefficient * statistics["kl"]
    loss = loss + objective.loss.router_balance * statistics["balance"]
    row = {"policy/loss": loss * rescaling, "policy/clip_fraction": statistics.mean("clipped", "loss_tokens")}
    if objective.loss.kl != "none":
        row["policy/reference_kl"] = statistics["kl"] * rescaling
    if objective.loss.router_balance:
        row["policy/router_balance"] = statistics["balance"] * rescaling
    if not objective.correction.is_off:
        row |= {f"correction/{name}": value for name, value in finalize_correction(statistics).items()}
        row |= token_row(objective.correction, statistics)
    return row


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
) -> tuple[Params, Statistics, TokenScores]:
    """Computes the forward and backward of one micro-batch [b, t].

    ``compute`` has the parameters in the compute dtype, with respect to which the gradient is taken. ``score`` is a
    function of such parameters and a micro-batch. ``scale`` is the factor of the loss. ``Objective`` computes
    ``provisional``, a denominator of the loss, and the ``numbers`` of the whole batch. Returns the gradients in the
    compute dtype, the statistics of the loss, and the scores.
    """

    def loss_fn(compute: Params) -> tuple[jax.Array, tuple[Statistics, TokenScores]]:
        scores = score(compute, micro)
        balance: jax.Array | float = 0.0
        if objective.loss.router_balance and scores.stats.router is not None:
            balance = balance_loss(scores.stats.router)
        loss, statistics = objective.micro_loss(scores, micro, provisional, numbers, balance)
        return loss * scale, (statistics, scores)

    (_, (statistics, scores)), grads = jax.value_and_grad(loss_fn, has_aux=True)(compute)
    return grads, statistics, scores


def values_of(scores: TokenScores, for_dumps: bool) -> TokenScores:
    """Returns only the log-probabilities of tokens, and with ``for_dumps`` the entropies and ``tops``, too."""
    values = TokenScores(scores.logprobs)
    return values._replace(entropy=scores.entropy, tops=scores.tops) if for_dumps else values
