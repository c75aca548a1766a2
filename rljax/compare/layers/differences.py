"""The differences of two scorers at each operation: its own error, the error up to it, and the effect of its own error.

The own error of an operation is the relative difference of its values if both scorers get the inputs of the reference's
forward. The error up to it is the difference if each scorer computes everything by itself. This error grows with depth
and does not show where it began.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from rljax.compare.layers.operations import IN_BLOCK, PRODUCTS, Operation, OperationValues, Tracer, logprobs, operations
from rljax.policy.config import PolicyConfig

LIMITS = {"float32": 2e-6, "float16": 6.25e-4, "bfloat16": 5e-3}
"""The largest own error that rounding explains, by the coarser dtype of the two scorers."""
PRODUCT_LIMITS = {"float32": 2e-6, "float16": 1.25e-4, "bfloat16": 1e-3}
"""The limits of products and sums, which round a float32 number once in each scorer."""
OTHER_DTYPE = 2.0  # the factor of the limits where the dtypes of the scorers differ
EXPERTS = 2.0  # the factor of the limits for all experts together: engines round between their products, or do not
ONE_PLACE = 3.0  # the factor of the limits for a single channel and for a single token
BIAS = 0.03  # the factor of the limits for the mean factor's distance from 1: rounding up and down cancels in the mean
BIASES = {"activation": 0.08, "gated_norm": 0.08, "delta_rule": 0.25}
"""``BIAS`` of other operations. A gate's rounding cancels less, and one rounded rate moves a head of a delta net."""
BIAS_NOISE = 5.0  # a scale must also be this many times its standard error, and 1 + 4 / t times that for t tokens
CANCELLING = ("delta_rule",)
"""The kinds of operations without a limit for a single token: a value may be a small difference of large numbers."""
EFFECTS = 12  # the number of operations whose effect on log-probabilities is measured, those nearest to their limits
_NARROW = ("delta_rate", "delta_step")
"""The products with one number for each head. One that is rounded the other way is a large share of a token's error."""
ONCE = (*(kind for kind in PRODUCTS if kind not in _NARROW), "attention_residual", "residual", "embedding", "logits")
"""The kinds of operations whose limits are ``PRODUCT_LIMITS``."""
_TINY = 1e-30


@dataclass(frozen=True)
class OperationDifference:
    """The difference of two scorers at one operation. Errors are relative Euclidean norms."""

    operation: Operation
    own: float  # the own error; NaN if a value of either scorer is not finite
    worst_channel: float  # the own error of the worst channel over all tokens
    worst_token: float  # the own error of the worst token over all channels
    factor: float  # the mean factor between the value and the reference's; rounding leaves it at 1
    limit: float  # the limit of ``own``; ``ratio`` uses parts and multiples of it for the other errors
    ratio: float  # the largest error as a multiple of its limit; above 1, rounding does not explain it
    precisions: tuple[str, str]  # the coarsest dtypes that hold the values of the reference and of the tested scorer
    hint: str = ""  # a fact about the error that helps to find its cause
    up_to: float = float("nan")  # the error of the value when each scorer computes everything by itself
    effect_mean: float | None = None  # the mean change of the reference's log-probabilities by ``own`` (nats)
    effect_max: float | None = None  # the largest change (nats)


@dataclass(frozen=True)
class LayerComparison:
    """The comparison of a tested scorer with a reference, operation by operation, over one sequence."""

    reference: str  # the label of the reference
    tested: str  # the label of the tested scorer
    dtypes: tuple[str, str]  # the dtypes of the reference and of the tested scorer; "" if unknown
    tokens: int  # the number of tokens of the sequence
    logprob_mean: float  # the mean absolute difference of the log-probabilities (nats)
    logprob_max: float  # the largest one (nats)
    differences: list[OperationDifference] = field(default_factory=list)  # in the order of the operations


def compare_layers(reference: Tracer, tested: Tracer, tokens: np.ndarray, effects: int = EFFECTS) -> LayerComparison:
    """Compares two scorers of one policy at each operation, on the sequence ``tokens``, int32 [t] with t of at least 2.

    The values of ``reference`` are fed to ``tested``, whose operations are judged. The effect on the reference's
    log-probabilities is measured for at most ``effects`` operations, those with the largest ``ratio``.
    """
    inputs, free = reference.run(tokens, {}), tested.run(tokens, {})
    theirs, own = reference.run(tokens, inputs), tested.run(tokens, inputs)
    config = reference.config
    known = list(_shown(operations(config), theirs, own))
    names = [each[-1].name for each in known]
    up_to = {name: _relative(free.get(name), inputs[name]) for name in names}
    expected = logprobs(inputs["logits"], tokens)
    gap = np.abs(logprobs(free["logits"], tokens) - expected)
    del free
    dtypes = reference.dtype, tested.dtype
    found = [
        dataclasses.replace(_difference(each, own, theirs, dtypes, config), up_to=up_to[name])
        for each, name in zip(known, names, strict=True)
    ]
    order = sorted(range(len(found)), key=lambda i: found[i].ratio, reverse=True)
    for i in [i for i in order if found[i].own > 0][:effects]:
        changes = [logprobs(_logits(reference, tokens, names[i], values), tokens) for values in (theirs, own)]
        change = np.abs(changes[1] - changes[0])
        found[i] = dataclasses.replace(found[i], effect_mean=float(change.mean()), effect_max=float(change.max()))
    numbers = float(gap.mean()), float(gap.max())
    return LayerComparison(reference.label, tested.label, dtypes, len(tokens), *numbers, found)


def _logits(reference: Tracer, tokens: np.ndarray, name: str, values: OperationValues) -> np.ndarray:
    """Computes the logits of the reference after one of its values was replaced."""
    return values[name] if name == "logits" else reference.run(tokens, {name: values[name]})["logits"]


def _shown(
    known: Iterable[Operation], theirs: OperationValues, own: OperationValues
) -> Iterator[tuple[Operation, ...]]:
    """Yields each operation that both scorers show, after the ones that a scorer computes in one kernel with it."""
    joint: tuple[Operation, ...] = ()
    for operation in known:
        joint = (*joint, operation)
        if operation.name in theirs and operation.name in own:
            yield joint
            joint = ()


def _difference(
    joint: Sequence[Operation],
    own: OperationValues,
    theirs: OperationValues,
    dtypes: tuple[str, str],
    config: PolicyConfig,
) -> OperationDifference:
    """Compares the values of the last operation of ``joint``, which both scorers computed from the same inputs."""
    *hidden, operation = joint
    value, expected = own[operation.name], theirs[operation.name]
    sides = {"the reference": expected, "the tested scorer": value}
    if broken := [side for side, each in sides.items() if not np.isfinite(each).all()]:
        nothing = float("nan")
        errors = nothing, nothing, nothing, nothing, nothing
        hint = f"{' and '.join(broken)} gave numbers that are not finite"
        return OperationDifference(operation, *errors, float("inf"), ("", ""), hint)
    precisions = precision(expected), precision(value)
    limit = sum(_limit(each, dtypes, precisions, config) for each in joint)
    gap, wide = np.subtract(value, expected, dtype=np.float64), expected.astype(np.float64)
    channels, tokens = (
        np.linalg.norm(gap, axis=axis) / np.maximum(np.linalg.norm(wide, axis=axis), _TINY) for axis in (0, 1)
    )
    error = _relative(value, expected)
    factor, bias_error = _scale(gap, wide)
    bias = BIASES.get(operation.kind, BIAS)
    bias_limit = max(bias * limit, BIAS_NOISE * (1 + 4 / len(wide)) * bias_error)
    worst = float(channels.max()), float(tokens.max())
    in_one_place = worst[0] if operation.kind in CANCELLING else max(worst)
    ratio = max(error / limit, in_one_place / (ONE_PLACE * limit), abs(factor - 1) / bias_limit)
    hints = [f"with the {IN_BLOCK[each.kind]}" for each in hidden]
    is_rounded = error < max(LIMITS[name] for name in precisions) and abs(factor - 1) <= bias_limit
    if ratio > 1 and is_rounded and not hidden and operation.kind in PRODUCTS:
        hints.append("as of a sum in a lower precision")
    return OperationDifference(operation, error, *worst, factor, limit, ratio, precisions, "; ".join(hints))


def _scale(gap: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Returns the mean factor between two values [t, n], and its standard error.

    The factor is 1 plus the sum of the signed differences over the sum of the expected sizes. Rounding errors of one
    token, or of one channel, may be correlated. So the standard error is the larger one over tokens and channels.
    """
    signed, size = gap * np.sign(expected), np.abs(expected)
    total = max(float(size.sum()), _TINY)
    mean = float(signed.sum()) / total
    left = signed - mean * size
    spread = max(float(np.sqrt((left.sum(axis=axis) ** 2).sum())) for axis in (0, 1))
    return 1.0 + mean, spread / total


def _limit(operation: Operation, dtypes: tuple[str, str], precisions: tuple[str, str], config: PolicyConfig) -> float:
    """Returns the limit of an operation's own error. An unknown dtype counts as equal to the other scorer's."""
    experts = operation.kind == "mlp" and config.num_experts
    known = [dtype for dtype in dtypes if dtype in LIMITS] or ["bfloat16"]
    coarser = max(known, key=lambda dtype: LIMITS[dtype])
    factor = (EXPERTS if experts else 1) * (OTHER_DTYPE if len(set(known)) > 1 else 1)
    once = operation.kind in ONCE and len(set(precisions)) == 1 and factor == 1
    return factor * (PRODUCT_LIMITS if once else LIMITS)[coarser]


def precision(value: np.ndarray) -> str:
    """Returns the coarsest of bfloat16, float16 and float32 that holds every number of a float32 array."""
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        with np.errstate(over="ignore"):
            if np.array_equal(value.astype(dtype).astype(np.float32), value, equal_nan=True):
                return name
    return "float32"


def _relative(value: np.ndarray | None, expected: np.ndarray | None) -> float:
    """Returns the relative difference of two arrays; NaN if one is missing, infinity if one is not finite."""
    if value is None or expected is None:
        return float("nan")
    if not (np.isfinite(value).all() and np.isfinite(expected).all()):
        return float("inf")
    arrays = np.subtract(value, expected, dtype=np.float64), expected.astype(np.float64)
    gap, size = (float(np.linalg.norm(x.ravel())) for x in arrays)
    return gap / max(size, _TINY)
