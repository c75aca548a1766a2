"""The families of policies that there are."""

from __future__ import annotations

from rljax.policy import moe, qwen2, qwen3
from rljax.policy.family import Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (qwen2.FAMILY, qwen3.FAMILY, moe.FAMILY)}
"""``model_type`` -> family."""
