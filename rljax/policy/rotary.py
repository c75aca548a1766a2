"""Rotary position embeddings of queries and keys, in the half-split form of transformers, and their frequencies.

Models with a longer context scale the frequencies. The formulas are those of transformers 5
(``modeling_rope_utils.py``) and vLLM: ``linear`` divides all frequencies, ``llama3`` only low ones (Llama 3.1), and
``yarn`` mixes divided and plain ones over a ramp and scales cosines and sines (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rljax.errors import check_at_least, check_finite

if TYPE_CHECKING:
    from rljax.policy.config import PolicyConfig

_NAMES = {"kind": "rope_type", "original_length": "original_max_position_embeddings"}
"""The keys of a ``config.json`` that differ from the names of our fields."""
_LENGTH = _NAMES["original_length"]
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""The keys that each supported ``rope_type`` must have."""
_OPTIONAL = {
    "llama3": (_LENGTH,),
    "yarn": (_LENGTH, "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
}
_TYPES = {"truncate": (bool,), _LENGTH: (int,)}
"""The types of the values that are not any number."""
BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
"""The keys of rotary settings beside the scaling: the base, and the share of a head that turns."""


@dataclass(frozen=True)
class RopeScaling:
    """The settings of a scaled rotary embedding. A field that the kind does not use has its default."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float  # the divisor of a scaled frequency
    original_length: int = 1  # the longest sequence before the scaling (tokens)
    low_freq_factor: float = 1.0  # llama3: original_length / this is the wavelength from which on all is scaled
    high_freq_factor: float = 4.0  # llama3: original_length / this is the wavelength up to which nothing is scaled
    beta_fast: float = 32.0  # yarn: the turns within original_length from which on nothing is scaled
    beta_slow: float = 1.0  # yarn: the turns within original_length up to which all is scaled
    truncate: bool = True  # yarn: whether the ends of the ramp are whole indices of frequencies
    attention_factor: float = 1.0  # yarn: the factor of cosines and sines

    def __post_init__(self) -> None:
        check_at_least(self, 1, "factor", "original_length")
        check_finite(
            self, "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"
        )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"low_freq_factor must be positive and below high_freq_factor, got {self.low_freq_factor}")
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(f"beta_slow must be positive and at most beta_fast, got {self.beta_slow}")
        if not self.attention_factor > 0:
            raise ValueError(f"attention_factor must be positive, got {self.attention_factor}")


def read_rope(rope: Mapping[str, Any], longest: int) -> RopeScaling | None:
    """Reads ``rope_parameters`` or ``rope_scaling`` of a ``config.json`` as transformers does.

    Returns None if nothing is scaled. The base and the ``partial_rotary_factor`` are not read. ``longest`` is the
    original length (tokens) for settings that name none.

    Raises:
      ValueError: No policy here computes the setting. The message names the key and its value.
    """
    given = {name: value for name, value in rope.items() if value is not None and name not in BESIDE_SCALING}
    kind = given.pop("rope_type", given.get("type", "default"))
    if kind not in list(_NEEDED):
        why = " (its angles depend on the other sequences of a batch)" if kind == "dynamic" else ""
        raise ValueError(f"rope_type = {kind!r:.60} is not supported{why}")
    known = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))
    for name, value in given.items():
        if name not in known and value != {"type": kind}.get(name):
            raise ValueError(f"{name} = {value!r:.60} is not supported with rope_type = {kind!r}")
        if name in known and (type(value) not in _TYPES.get(name, (int, float)) or value < 0):
            raise ValueError(f"{name} cannot be {value!r:.60}")
    if missing := [name for name in _NEEDED[kind] if name not in given]:
        raise ValueError(f"rope_type = {kind!r} has no {missing[0]}")
    if kind == "default":
        return None
    if _LENGTH in known and type(length := given.get(_LENGTH, longest)) is not int:
        raise ValueError(f"{_LENGTH} cannot be {length!r:.60}")
    fields: dict[str, Any] = {"original_length": length} if _LENGTH in known else {}
    fields |= {name: given[name] for name in known if name in given and name in RopeScaling.__dataclass_fields__}
    scaling = RopeScaling(kind=kind, **fields)
    if kind == "yarn" and "attention_factor" not in given:
        scaling = replace(scaling, attention_factor=_attention_factor(given))
    return scaling


def _attention_factor(given: Mapping[str, Any]) -> float:
    """Returns the factor of cosines and sines that a ``yarn`` has if it names none."""

    def of_scale(scale: float) -> float:
        return 0.1 * scale * math.log(given["factor"]) + 1.0

    first, second = given.get("mscale"), given.get("mscale_all_dim")
    return of_scale(first) / of_scale(second) if first and second else of_scale(1.0)


def described_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the ``rope_parameters`` of a ``config.json``."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    known = {"kind", *_NEEDED[scaling.kind], *_OPTIONAL.get(scaling.kind, ())}
    fields = {name: (value, _NAMES.get(name, name)) for name, value in asdict(scaling).items()}
    return {"rope_theta": theta} | {key: value for name, (value, key) in fields.items() if {name, key} & known}


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Returns the angles by which heads turn from one position to the next, float32 [head_dim / 2] (radians).

    transformers computes them in float32. At a long range, their last bit changes the angle visibly.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = np.float32(1.0) / np.float32(theta) ** exponents
    if scaling is None:
        return plain
    scaled = plain / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return scaled
    kept = _kept_of_llama3(plain, scaling) if scaling.kind == "llama3" else _kept_of_yarn(head_dim, theta, scaling)
    return scaled * (1 - kept) + plain * kept


def _kept_of_llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Returns the share of each frequency that is not scaled: a ramp over the number of turns."""
    turns = np.float32(scaling.original_length) * plain / np.float32(2 * math.pi)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    return np.clip((turns - low) / (high - low), np.float32(0), np.float32(1))


def _kept_of_yarn(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns the share of each frequency that is not scaled: a ramp over the index of the frequency."""

    def index(turns: float) -> float:
        return head_dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low + 0.001 * (high == low))
    return np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))


Tables = tuple[Float[Array, "b t k"], Float[Array, "b t k"]]
"""The cosines and the sines of a row's angles, float32. Both halves of the last axis are equal."""
Rotate = Callable[[Float[Array, "b t h k"], Tables], Float[Array, "b t h k"]]


def rotary_tables(
    positions: Int[Array, "b t"], head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Tables:
    """Computes the cosines and sines of ``positions``. ``theta`` is the base of the frequencies."""
    turns = jnp.asarray(frequencies(head_dim, theta, scaling))
    angles = positions[..., None].astype(jnp.float32) * turns[None, None]
    angles = jnp.concatenate([angles, angles], axis=-1)
    factor = 1.0 if scaling is None else scaling.attention_factor
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Float[Array, "b t h k"], tables: Tables) -> Float[Array, "b t h k"]:
    """Rotates heads in float32. The result has the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    return _sum(wide, jnp.concatenate([-second, first], axis=-1), *tables).astype(x.dtype)


def rotation(config: PolicyConfig, positions: Int[Array, "b t"], how: Rotate = rotate) -> Callable[[Array], Array]:
    """Returns the function that rotates heads [b, t, h, k] of a policy to the ``positions`` of their tokens."""
    turning = config.rotary_dim
    tables = rotary_tables(positions, turning, config.rope_theta, config.rope_scaling)
    if turning == config.head_dim:
        return lambda heads: how(heads, tables)
    return lambda heads: jnp.concatenate([how(heads[..., :turning], tables), heads[..., turning:]], axis=-1)


@jax.custom_vjp
def rotate_by_product(x: Float[Array, "b t h k"], tables: Tables) -> Float[Array, "b t h k"]:
    """Rotates bfloat16 heads with the same bits as :func:`rotate`. A product with a matrix exchanges their halves.

    XLA's TPU compiler copies float32 heads three times to exchange halves without a product. The matrix has the values
    0, 1 and -1, so its product is exact. The tables get no gradient.
    """
    return _rotated_by_product(x, *tables)


def _rotated_by_product(x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    zero, one = np.zeros((half, half)), np.eye(half)
    turn = jnp.asarray(np.block([[zero, one], [-one, zero]]), x.dtype)
    turned = jnp.einsum("bthk,kl->bthl", x, turn, preferred_element_type=jnp.float32)
    return _sum(x.astype(jnp.float32), turned, cos, sin).astype(x.dtype)


def _sum(x: Array, turned: Array, cos: Array, sin: Array) -> Array:
    return x * cos[:, :, None, :] + turned * sin[:, :, None, :]


def _rotate_fwd(x: Array, tables: Tables) -> tuple[Array, Tables]:
    return rotate_by_product(x, tables), tables


def _rotate_bwd(tables: Tables, cotangent: Array) -> tuple[Array, None]:
    cos, sin = tables
    return _rotated_by_product(cotangent, cos, -sin), None  # the transpose of a rotation turns back


rotate_by_product.defvjp(_rotate_fwd, _rotate_bwd)
