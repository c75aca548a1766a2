"""What one family of policies adds to the common decoder: its block, and its ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import nnx

from rljax.policy.config import PolicyConfig
from rljax.policy.layers import Block

COMMON_FIXED = {"hidden_act": "silu", "use_sliding_window": False}
"""What every family's file has, of features that no policy here computes otherwise."""


@dataclass(frozen=True)
class Family:
    """One row of ``families.FAMILIES``.

    Attributes:
      model_type: of the ``config.json``, and ``PolicyConfig.family``.
      architecture: the class of transformers and vLLM.
      block: declares one block of the policy.
      fixed: keys of the file that have one value in every model that this policy computes.
      defaults: what transformers uses where the file has no value, by our names; a ``head_dim`` that is nowhere is
        hidden_size / num_heads.
      fields: our name -> that of the file, of the fields that only this family has.
      aliases: key of the file -> what it is called in other files of this family.
      check: raises ValueError for a shape that the family does not have.
    """

    model_type: str
    architecture: str
    block: Callable[[PolicyConfig, nnx.Rngs], Block]
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[PolicyConfig], None] = lambda config: None
