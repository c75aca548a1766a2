"""The remedies for each cause, in the order in which they fit, with their keys, costs and sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Remedy(NamedTuple):
    """One remedy."""

    name: str
    settings: str  # the keys of rljax, as on a command line; empty if it is not a setting
    cost: str
    source: str  # the page with rljax's own measurement, or the paper


_DECAY = Remedy(
    "a learning rate that decays on the surge of the response length",
    "--schedule.kind length_triggered",
    "nothing a step; learning slows down after the surge",
    "arXiv 2602.01826, figures 7 and 8; rljax's page studies: 16 of 24 runs end well with it, 1 of 18 at the constant "
    "rate, with three seeds",
)
_DECAY_STALE = _DECAY._replace(
    source="rljax's page studies, staleness: of nine stale runs each, eight end well with it, none at the constant "
    "rate, with three seeds"
)
_DECAY_EIGHT = _DECAY._replace(
    source="arXiv 2602.01826, figures 7 and 8; rljax's page studies, cache of 8 bits: 1 of 9 runs "
    "collapses with it, 8 of 9 without; mean reward after the surge +0.37 (corrected p 0.039); page study_late: with a "
    "decay from step 100, which needs no surge, 0 of 9 collapse"
)
_TENTH = Remedy(
    "a tenth of the learning rate from the start",
    "--optimizer.learning-rate RATE/10",
    "nothing a step; slow in arXiv 2602.01826 (figure 4) and in most seeds of rljax's page studies",
    "rljax's page studies, cache of 8 bits: 0 of 9 runs collapse with it, 8 of 9 at the whole rate; page "
    "study, engine of 8 bits: 8 of 8 runs end well with it, 2 of 8 at the whole rate",
)
_TOKEN_TIS = Remedy(
    "truncated importance weights of single tokens",
    "--correction.preset token_tis",
    "a few elementwise operations",
    "arXiv 2602.01826, figure 2: the only weights that prevent the collapse; rljax's page algorithms, large "
    "mismatch: drift 0.063 for 0.97; rljax's page studies: alone it saves 1 of 3 toy runs, with the decay 2 of 3; page "
    "study_collapse: 1 of 4 runs collapses with it, 4 of 4 without",
)
_TOKEN_MIS = Remedy(
    "masked importance weights of single tokens",
    "--correction.preset token_mis",
    "a few elementwise operations; masked tokens teach nothing",
    "rljax's page studies: with the decay 3 of 3 runs end well (engine of 8 bits), alone 1 of 3",
)
_CENTERING = Remedy(
    "score centering",
    "--correction.score-centering true --rollout.top-logprobs 20",
    "8 x 20 bytes on the wire for each response token",
    "arXiv 2609.20807; rljax's page algorithms, large mismatch, k = 2: drift 0.33 for 0.97, no added variance; page "
    "study_collapse: 3 of 4 runs collapse with it, 4 of 4 without",
)
_REGION = Remedy(
    "a trust region of the token's probability",
    "--correction.preset two_sided_tv",
    "a few elementwise operations; tokens outside teach nothing",
    "prime-rl's default loss, after DPPO (arXiv 2602.04879); rljax's page algorithms, large mismatch: drift 0.024 "
    "for 0.97; page study_collapse: with one_sided_tv 3 of 4 runs collapse and one never learns",
)
_FLOAT16 = Remedy(
    "float16 on both sides",
    "--rollout.dtype float16 --precision.compute-dtype float16",
    "nothing a step; dynamic loss scaling, and activations must stay below 65,504",
    "FP16 paper, arXiv 2510.26788: KL 0.32 for 7.64; rljax's page metrics: 1e-3 nats for 7e-3 against vLLM; by arXiv "
    "2602.01826 (figure 13) the collapse stays; page study_collapse: 2 of 4 runs collapse with it",
)
_HEAD = Remedy(
    "the LM head in float32 on both sides",
    "--precision.lm-head-dtype float32 (a vLLM server: --head-dtype float32)",
    "a slower head: its products in float32",
    "rljax's page vllm: a gap that only the heads make falls from 1.5e-2 to 1e-6; of vLLM's whole gap 12% to 14% is "
    "the head's",
)
_EXACT = Remedy(
    "an engine without mismatch, as a test of the cause",
    "--rollout.engine exact",
    "sampling becomes many times slower: for small batches",
    "rljax's page exact; VeXact, arXiv 2605.14220; page study_isolation: 1 of 9 runs collapses without any mismatch",
)
_SIXTEEN = Remedy(
    "an engine in 16 bits",
    "--rollout.weight-quantization none --rollout.kv-cache-dtype auto (a server: without its 8-bit flags)",
    "memory and speed of the engine",
    "rljax's page studies, engines: gap per uncertainty 0.013 in bfloat16, 0.045 with fp8 weights, 0.057 to 0.11 with "
    "an fp8 cache; 2 of 3 runs end well at the constant rate for 0 of 3; page study_collapse: 1 of 4 runs collapses, "
    "4 of 4 with an fp8 cache; page study_late: with 16 bits from step 100 3 of 9 collapse, 8 of 9 with the fp8 cache",
)
_FRESH = Remedy(
    "fresher rollouts",
    "--rollout.max-staleness 0 (or 1)",
    "the trainer waits for the engine: about half of the time where both take as long",
    "rljax's page studies, a server ahead: final accuracy 0.78 to 0.84 at age 0, 0.61 to 0.64 at one version, 0.02 to "
    "0.32 at two and four",
)
_DRIFT = Remedy(
    "importance weights of only the drift",
    "--correction.part drift --correction.preset token_tis",
    "one more forward of the batch for each number of versions in it",
    "rljax's page staleness, rljax's page algorithms; not measured in a study yet",
)
_TEMPERATURE = Remedy(
    "one temperature on both sides",
    "--rollout.temperature T (a vLLM server: --logprobs-mode processed_logprobs)",
    "none",
    "rljax's page compare: log-probabilities at two temperatures belong to two distributions; no weight repairs that",
)
_COMPARE = Remedy(
    "a check of what the engine holds",
    "rljax compare TOKENS --model CHECKPOINT --scorer jax:float32 --scorer vllm:URL",
    "minutes, outside the run",
    "rljax's page compare; in rljax every publish is proven by checksums of what each worker loaded (rljax's page "
    "vllm)",
)
_LAYERS = Remedy(
    "the layer and operation at which the engines part",
    "rljax compare TOKENS --model CHECKPOINT --scorer jax:DTYPE --scorer vllm:URL --layers",
    "minutes, outside the run; the server must run eagerly",
    "rljax's page layers: planted faults are named at their place in a real vLLM",
)
_LOOK = Remedy(
    "a look at those tokens",
    "--rollout.dump-every 20 --rollout.top-logprobs 20, then rljax view on the run",
    "a file of tokens every 20 steps",
    "rljax's page view: the worst sequences first, with both sides' likeliest tokens",
)
_LOOK_TURNS = _LOOK._replace(
    settings="--rollout.dump-every 20 --rollout.top-logprobs 20, then rljax view and the chart of distances from the "
    "environment's last token",
    source="rljax's page view; When Speed Kills Stability (Liu and others, 2025): runs with tools collapsed first",
)
_CACHE = Remedy(
    "a key-value cache in the engine's own dtype",
    "--rollout.kv-cache-dtype auto (a server: --kv-cache-dtype auto)",
    "twice the memory of an 8-bit cache",
    "rljax's page studies, fixed weights: with an fp8 cache the gap per uncertainty triples along 28 tokens; in 16 "
    "bits it does not",
)
_GEOMETRIC = Remedy(
    "a band of the mean ratio of a response",
    "--correction.preset geometric_band",
    "a few elementwise operations; responses outside the band teach nothing",
    "rljax's page algorithms; sequence weights alone end well in 0 of 6 toy runs (rljax's page studies)",
)
_REFILL = Remedy(
    "new problems in the place of groups without signal",
    "--rollout.refill true",
    "up to four further rounds of sampling a step",
    "DAPO, arXiv 2503.14476; rljax's page algorithms",
)
_CLIP_HIGH = Remedy(
    "a wider clip above, or a larger temperature",
    "--loss.clip-high 0.28 (with several updates a batch), --rollout.temperature 1.0",
    "none",
    "DAPO, arXiv 2503.14476, section 3.1 (clip-higher); not measured here",
)
_KL = Remedy(
    "a penalty that keeps the policy near its start",
    "--loss.kl k3 --loss.kl-coefficient 0.001",
    "one more forward a step, and the frozen weights in memory",
    "arXiv 2402.03300; not measured here",
)
_REWARD = Remedy(
    "a reward function or environment that does not fail; the log of the run names its error",
    "--data.reward, --rollout.environment",
    "none",
    "rljax's page rewards, where it runs",
)
_GUARD = Remedy(
    "a guard that ends the run before its state is lost",
    '--guard.stop "reward/mean < FLOOR for 20"',
    "none",
    "rljax's page mismatch, a guard on any of them",
)

REMEDIES: Mapping[str, tuple[Remedy, ...]] = {
    "healthy": (),
    "sixteen_bits": (_FLOAT16, _HEAD, _TOKEN_TIS, _DECAY, _EXACT),
    "head_dtype": (_HEAD, _FLOAT16, _TOKEN_TIS),
    "eight_bits": (_SIXTEEN, _TENTH, _DECAY_EIGHT, _TOKEN_MIS, _CENTERING, _TOKEN_TIS),
    "staleness": (_FRESH, _DECAY_STALE, _DRIFT, _CENTERING, _TOKEN_TIS),
    "temperature": (_TEMPERATURE,),
    "extreme_tokens": (_LOOK, _REGION, _TOKEN_MIS, _TOKEN_TIS),
    "after_environment": (_LOOK_TURNS, _REGION, _TOKEN_MIS, _TOKEN_TIS, _DECAY),
    "length_growth": (_CACHE, _DECAY, _GEOMETRIC, _TOKEN_TIS),
    "mismatch_growth": (_TENTH, _DECAY, _TOKEN_TIS, _FLOAT16, _CENTERING),
    "other_weights": (_COMPARE, _LAYERS),
    "not_comparable": (_COMPARE,),
    "missing_numbers": (_LOOK,),
    "failed_rewards": (_REWARD,),
    "entropy_collapse": (_REFILL, _CLIP_HIGH, _KL, _TENTH),
    "high_rate": (_TENTH, _DECAY, _GUARD),
    "cannot_tell": (_EXACT, _LAYERS),
}
"""The remedies by cause, the best fitting first."""
