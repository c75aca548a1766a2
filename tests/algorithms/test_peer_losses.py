"""Our losses, weights, masks and gradients must agree with the peers' own functions on the same batch.

``tools/peer_golden.py`` ran the peers and wrote the numbers. Its table says which function of which version each case
comes from. The peers' surrogates differ in value where their gradients agree: -A r (ratio) and -A sg(r) log p have the
same gradient. Where a peer uses the ratio, or a floor that changes the value alone, only the gradient is compared.

Ours differs on purpose in these points:

- Stable-RL takes the sampler's k likeliest tokens as reported, and TRL overwrites the last of them with a missing
  sampled token. Ours adds the sampled token. The lists of these cases contain it.
- Where all tokens are listed, miles keeps a floor of 1e-6 for both tails. It changes the value of the loss, but not its
  gradient. Ours has no tail there.
- AReaL applies M2PO to each micro-batch, and keeps at least one token. Ours applies it to the batch. The peer's case
  is one micro-batch.
- verl adds 1e-8 inside the logarithm of the binary KL, and AReaL bounds probabilities by 1e-8. Ours bounds them.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import micro_batch

from rljax.algorithms.advantages import optimal_token_advantages
from rljax.algorithms.correction_choice import CorrectionConfig, correct
from rljax.algorithms.losses import LossConfig
from rljax.trainer.objective import Objective

FILE = np.load(Path(__file__).parents[1] / "gold" / "peer_losses.npz")
CASES = json.loads(str(FILE["about"]))["cases"]
INPUTS = {name.removeprefix("inputs/"): FILE[name] for name in FILE.files if name.startswith("inputs/")}
MASK, ADVANTAGES = INPUTS["mask"], INPUTS["advantages"]
ROWS, TOKENS = MASK.shape
UNCAPPED = 1e9
WEIGHTED = {"level": "token", "mode": "truncate", "threshold": UNCAPPED}


def named(*starts):
    """Returns the cases whose names begin with one of these words."""
    return [name for name in CASES if name.startswith(starts)]


def log_softmax(logits):
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def of_tokens(logprobs, tokens=INPUTS["tokens"]):
    return np.take_along_axis(logprobs, tokens[..., None], -1)[..., 0]


def make_micro(tokens, rollout, ids):
    tops = {}
    if ids is not None:
        tops["top_ids"] = np.where(MASK[..., None], ids, -1).astype(np.int32)
        tops["top_logprobs"] = np.where(MASK[..., None], np.take_along_axis(rollout, ids, -1), -np.inf)
    return micro_batch(tokens, MASK, of_tokens(rollout, tokens), ADVANTAGES, **tops)


def ours(correction, ids=None, *, has_tail=True, cut=False):
    """Returns the sum of our token losses, and its gradients.

    The gradients are by the logits [b, t, v] and by the sampled log-probabilities.
    """
    support = INPUTS["support"] if cut else None
    with jax.enable_x64(True):
        rollout, tokens = INPUTS["sampler_logits"], INPUTS["cut_tokens" if cut else "tokens"]
        allowed = np.ones(rollout.shape, bool)
        if cut:
            allowed = np.any(np.arange(rollout.shape[-1]) == support[..., None], axis=-2)
            ids = support
        micro = make_micro(tokens, log_softmax(np.where(allowed, rollout, -np.inf)), ids)
        objective = Objective(LossConfig(kind="policy_gradient"), correction, ROWS, TOKENS, has_tail=has_tail)

        def loss(logits, shift):
            normalised = jax.nn.log_softmax(jnp.where(allowed, logits, -jnp.inf))
            sampled = jnp.take_along_axis(normalised, tokens[..., None], -1)[..., 0] + shift
            scores = SimpleNamespace(logprobs=sampled, tops=None)
            if ids is not None:
                scores.tops = jnp.take_along_axis(normalised, ids, -1)
            known = micro._replace(old_logprobs=jax.lax.stop_gradient(sampled))
            numbers = objective.batch_numbers(jax.tree.map(lambda array: jnp.asarray(array)[None], known))
            return objective.micro_loss(scores, known, jnp.float32(1), numbers)[0]

        value, gradients = jax.value_and_grad(loss, (0, 1))(
            jnp.asarray(INPUTS["trainer_logits"]), jnp.zeros(MASK.shape)
        )
    return float(value), *map(np.asarray, gradients)


def check(case, result, value, tolerance=2e-6):
    np.testing.assert_allclose(value, FILE[f"{case}/{result}"], rtol=1e-5, atol=tolerance, err_msg=f"{case}/{result}")


@pytest.mark.parametrize("case", named("center/none", "center/truncate", "center/band"))
def test_score_centering_is_the_peers(case):
    settings, listed = CASES[case]["settings"], INPUTS["head"]
    if settings["head"] == "all":
        listed = np.broadcast_to(np.arange(INPUTS["sampler_logits"].shape[-1]), INPUTS["sampler_logits"].shape)
    mode, low = settings["mode"], settings["low"]
    plain = {"level": "token", "mode": mode, "threshold_low": low * (mode == "band"), "threshold": settings["high"]}
    plain = plain if mode != "none" else {}
    has_tail = settings["head"] == "top"
    loss, gradient, _ = ours(CorrectionConfig(**plain, score_centering=True), listed, has_tail=has_tail)
    if settings["style"] != "loss":  # the peer's function is the term that centering adds
        without, of_plain, _ = ours(CorrectionConfig(**plain))
        loss, gradient = loss - without, gradient - of_plain
    check(case, "gradient", gradient)
    if has_tail:
        check(case, "loss", loss, 5e-6)


def correction_of(case):
    """Returns our correction for a case of weights or of a region, and the options of ``ours``."""
    settings, kind = CASES[case]["settings"], case.partition("/")[0]
    low, high = (settings.get(f"ratio_{side}", settings.get(side)) for side in ("low", "high"))
    fields, options = {"mode": "band", "threshold_low": low, "threshold": high}, {}
    if kind == "dppo":
        over, region = settings["kind"].split("_")
        fields = {"region": region, "region_over": {"binary": "token", "topk": "tops"}[over], "region_sides": "away"}
        fields |= {"region_threshold": settings["bound"]}
        fields |= {} if settings["style"] == "skyrl" else {"threshold": settings["cap"]}  # SkyRL does not cap the ratio
        options = {"ids": INPUTS["head_with_token"]}
    elif kind in ("kpop", "moment"):
        fields = {"region": kind, "region_threshold": settings["bound"]}
    elif "eps" in settings:  # prime-rl's region
        fields = {"threshold": settings["max_importance_ratio"], "region": "tv", "region_threshold": settings["eps"]}
        cut = "score_centering" in settings
        fields, options = fields | {"score_centering": cut}, {"cut": cut, "has_tail": not cut}
    elif "epsilon" in settings:
        fields = {"region": "smooth", "region_threshold": settings["epsilon"]}
    elif settings.get("gating", "ratio") != "ratio":
        fields = {"region": settings["gating"].removeprefix("binary_"), "region_threshold": high}
    return CorrectionConfig(**WEIGHTED | fields), options


@pytest.mark.parametrize("case", named("dppo/", "region/", "band/", "gate/", "penalty/", "kpop/", "moment/"))
def test_the_weights_and_regions_are_the_peers(case):
    """AReaL divides the loss of M2PO by the number of tokens that it keeps."""
    results, (correction, options) = CASES[case]["results"], correction_of(case)
    loss, gradient, coefficients = ours(correction, **options)
    if "keep" in results:
        np.testing.assert_array_equal(coefficients != 0, FILE[f"{case}/keep"] > 0)
    if "weights" in results:
        check(case, "weights", -coefficients / ADVANTAGES)
    if "gradient" in results:
        check(case, "gradient", gradient / (FILE[f"{case}/keep"].sum() if case.startswith("moment") else 1))
    if "loss" in results and case.startswith("dppo") and not case.endswith("skyrl"):
        check(case, "loss", loss)


@pytest.mark.parametrize("case", named("reject/"))
def test_a_rejected_sequence_is_the_peers(case):
    settings = CASES[case]["settings"]
    field = {"seq_max_k3": "reject_max_k3", "seq_mean_k3": "reject_k3"}.get(settings.get("option"), "reject_abs_ratio")
    trainer, rollout = (of_tokens(log_softmax(INPUTS[f"{side}_logits"])) for side in ("trainer", "sampler"))
    ids = np.broadcast_to(np.arange(ROWS)[:, None], MASK.shape)
    config = CorrectionConfig(**{field: settings["bound"]})
    kept = correct(config, trainer, rollout, MASK, sequence_ids=ids, num_sequences=ROWS)[1]
    np.testing.assert_array_equal(kept, FILE[f"{case}/keep"] > 0)


@pytest.mark.parametrize("case", named("baseline/"))
def test_the_optimal_token_baseline_is_verls(case):
    settings = CASES[case]["settings"]
    p, q = (log_softmax(INPUTS[f"{side}_logits"]) for side in ("trainer", "sampler"))
    trainer, rollout = of_tokens(p), of_tokens(q)
    collision, ratio = np.sum(np.exp(p) ** 2, axis=-1), np.minimum(np.exp(trainer - rollout), 2.0)
    mask, groups = INPUTS["holes" if settings["holes"] else "mask"], np.array(settings["groups"])
    result = np.zeros(mask.shape)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        own, collisions, ratios = ([x[row][mask[row]] for row in rows] for x in (trainer, collision, ratio))
        ratios = ratios if settings["weighted"] else None
        found = optimal_token_advantages(INPUTS["rewards"][rows], own, collisions, ratios)
        for row, each in zip(rows, found, strict=True):
            result[row, mask[row]] = each
    check(case, "advantages", result)


def test_every_case_decides_some_tokens_each_way():
    kept = {name: FILE[f"{name}/keep"][MASK] > 0 for name in CASES if "keep" in CASES[name]["results"]}
    assert {name for name, values in kept.items() if values.all() or not values.any()} == set()
