"""The named corrections and the fields of ``CorrectionConfig`` that each of them sets."""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal[
    "none",
    "token_tis",
    "token_mis",
    "sequence_tis",
    "sequence_mis",
    "geometric_band",
    "sequence_band",
    "icepop",
    "icepop_wide",
    "icepop_narrow",
    "vexact",
    "one_sided_tv",
    "one_sided_kl",
    "one_sided_tops_tv",
    "one_sided_tops_kl",
    "two_sided_tv",
    "two_sided_kl",
    "smooth_tv",
    "m2po",
    "m2po_areal",
    "max_k3",
    "abs_ratio",
]

UNCAPPED = 1e9
"""A threshold above every importance ratio, because the exponent of a ratio is clipped at 20."""

_TRUNCATE = {"level": "token", "mode": "truncate"}
_MASK = {"level": "token", "mode": "mask"}
_BAND = {"level": "token", "mode": "band"}
_ONE_SIDED = _TRUNCATE | {"threshold": 20.0, "region_sides": "away"}
_MOMENT = _TRUNCATE | {"threshold": UNCAPPED, "region": "moment", "region_threshold": 0.04}

PRESETS: dict[str, dict[str, Any]] = {
    # Equations 4-6 of arXiv 2602.01826.
    "token_tis": _TRUNCATE | {"threshold": 2.0},
    "token_mis": _MASK | {"threshold": 2.0},
    "sequence_tis": {"level": "sequence", "mode": "truncate", "threshold": 2.0},
    "sequence_mis": {"level": "sequence", "mode": "mask", "threshold": 2.0},
    "geometric_band": {"level": "geometric", "mode": "band", "threshold_low": 0.99, "threshold": 1.01},
    # ``seq-mask-tis`` of NeMo-RL, with its bounds.
    "sequence_band": {"level": "geometric", "mode": "gate", "threshold_low": 0.999, "threshold": 1.002},
    # IcePop, arXiv 2510.18855, with the bounds of AReaL. The wide band is prime-rl's, the narrow one vime's.
    "icepop": _BAND | {"threshold_low": 0.5, "threshold": 5.0},
    "icepop_wide": _BAND | {"threshold_low": 0.2, "threshold": 5.0},
    "icepop_narrow": _BAND | {"threshold_low": 0.5, "threshold": 2.0},
    # The best remedy of arXiv 2605.14220.
    "vexact": _TRUNCATE | {"threshold": 2.0, "reject_k3": 1e-3},
    # DPPO, arXiv 2602.04879. Ratios are at most 20, as in verl and TRL.
    "one_sided_tv": _ONE_SIDED | {"region": "tv", "region_threshold": 0.15},
    "one_sided_kl": _ONE_SIDED | {"region": "kl", "region_threshold": 0.05},
    "one_sided_tops_tv": _ONE_SIDED | {"region": "tv", "region_threshold": 0.15, "region_over": "tops"},
    "one_sided_tops_kl": _ONE_SIDED | {"region": "kl", "region_threshold": 0.05, "region_over": "tops"},
    # The loss "ipo" of prime-rl, with its cap of the ratio.
    "two_sided_tv": _TRUNCATE | {"threshold": 1e4, "region": "tv", "region_threshold": 0.3},
    # KPop, https://ringtech.notion.site/kpop.
    "two_sided_kl": _TRUNCATE | {"threshold": UNCAPPED, "region": "kpop", "region_threshold": 0.1},
    # DRPO, arXiv 2606.09821.
    "smooth_tv": _TRUNCATE | {"threshold": UNCAPPED, "region": "smooth", "region_threshold": 12.5},
    # M2PO, arXiv 2510.01161: Algorithm 1, and the form of AReaL.
    "m2po": _MOMENT | {"region_sides": "away"},
    "m2po_areal": _MOMENT,
    # Trust Region Masking, arXiv 2512.23075. The paper leaves the number open.
    "max_k3": {"reject_max_k3": 0.05},
    # ``seq_logprob_error_threshold`` of NeMo-RL and tunix.
    "abs_ratio": {"reject_abs_ratio": 2.0},
}
"""The fields of each preset, with the numbers of its source."""
