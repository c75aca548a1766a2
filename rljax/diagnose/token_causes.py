"""Names the causes that a token dump shows: those of the verdict of ``compare``, and the noise of a router."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rljax.diagnose.evidence import EFFECTS, LIKELY, POSSIBLE, SURE, Finding

if TYPE_CHECKING:
    from rljax.diagnose.token_facts import TokenFacts

OF_VERDICTS: Mapping[str, str] = {
    **dict.fromkeys(("constant_fill", "off_by_one", "other_rows", "other_base", "no_tokens"), "not_comparable"),
    "left_out": "missing_numbers",
    "temperature": "temperature",
    "after_environment": "after_environment",
    **{cause: cause for cause in ("truncated_sampling", "some_responses", "first_token", "last_tokens", "one_token")},
    "trainer_side": "trainer_side",
    "engine_side": "engine_side",
}
"""The cause that each cause of a verdict of ``compare`` shows."""
DECISIVE = tuple(cause for cause in OF_VERDICTS if cause not in ("left_out", "temperature"))
"""The causes of a verdict that make the other facts of a dump meaningless."""

_FAR_SHARE = 0.01  # the least share of tokens far above the median error; rounding and drift have less
_CUT = 4.0  # the least lack of the mean ratio that lets a cut be possible (standard errors)
_MOST_BIAS = 3.0  # the largest deviation of the mean ratio of noise from 1 (standard errors)


def find_token_causes(tokens: TokenFacts) -> Iterator[Finding]:
    """Yields the cause of the verdict of ``compare`` on the dump, or the noise of a router."""
    verdict = tokens.verdict
    if count := tokens.repeated:
        said = "responses have the tokens and, to the bit, the log-probabilities of one to another prompt"
        yield Finding("not_comparable", SURE, f"{count} {said}")
    if verdict.cause in DECISIVE or verdict.cause == "left_out":
        is_likely = verdict.cause in ("trainer_side", "engine_side")
        yield Finding(OF_VERDICTS[verdict.cause], LIKELY if is_likely else SURE, verdict.reason)
    if tokens.is_beyond or tokens.effect_without >= EFFECTS["bfloat16"] or tokens.is_of_few:
        return
    if tokens.ratio_bias < -_CUT and verdict.cause != "truncated_sampling":
        said = f"the mean ratio is {-tokens.ratio_bias:.1f} standard errors below 1, as below a cut of little mass"
        yield Finding("truncated_sampling", POSSIBLE, said)
    elif tokens.far_share > _FAR_SHARE and abs(tokens.ratio_bias) < _MOST_BIAS:
        yield Finding(
            "router_noise",
            LIKELY,
            f"the median error of the logits is {tokens.effect_without:.2g}, of rounding in 16 bits, and "
            f"{tokens.far_share:.1%} of the tokens have 8 times that or more; the mean ratio is 1, as of noise",
        )
