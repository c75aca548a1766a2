"""Writes the results of other packages' losses on a small random batch, as golden numbers for the test of our losses.

    python tools/peer_golden.py --sources DIR
    python tools/peer_golden.py --sources DIR --only verl stable-rl    # print only; nothing is written

DIR holds one directory for each peer and version, named PEER-VERSION, with files at the paths that they have in the
peer's package or repository. An unpacked wheel serves (``pip download --no-deps verl==0.9.1``), as do single files out
of a clone (``git show COMMIT:PATH``). ``CASES`` names the directories and the files. The peers need not be installed:
the program compiles single functions out of a file, with torch alone. The golden file holds inputs, results, names,
versions and the SHA-256 of each function's text. It holds no text of a peer.

Each result is computed in float64, unless the peer casts to float32 itself. ``gradient`` is the derivative of the
peer's ``loss`` by the trainer's logits, [sequences, tokens, vocabulary].
"""

from __future__ import annotations
import __future__

import argparse
import ast
import dataclasses
import datetime
import functools
import hashlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

OUTPUT = Path(__file__).parents[1] / "tests" / "gold" / "peer_losses.npz"
LENGTHS = (12, 9, 5, 7)
TOKENS, VOCABULARY, HEAD, SUPPORT = 12, 7, 3, 4
ADVANTAGES = (1.2, -0.8, 0.5, -1.4)
REWARDS = (1.0, 0.0, 0.75, 0.25)


def make_inputs(seed: int = 40) -> dict[str, np.ndarray]:
    """Makes a batch: logits of trainer and sampler, tokens of the sampler, masks, advantages and rewards.

    ``head`` has the sampler's likeliest tokens, likeliest first. ``support`` has the tokens that a cut sampler could
    draw, and ``cut_tokens`` the tokens that it drew. ``holes`` is a mask with tokens of an environment left out.
    """
    rng = np.random.default_rng(seed)
    trainer = 1.5 * rng.standard_normal((len(LENGTHS), TOKENS, VOCABULARY))
    sampler = trainer + 0.7 * rng.standard_normal(trainer.shape)
    order = np.argsort(-sampler, axis=-1)
    tokens = np.argmax(sampler + rng.gumbel(size=trainer.shape), axis=-1)
    cut = np.where(np.argsort(order, axis=-1) < SUPPORT, sampler, -np.inf)
    mask = np.arange(TOKENS) < np.array(LENGTHS)[:, None]
    return {
        "trainer_logits": trainer,
        "sampler_logits": sampler,
        "tokens": tokens,
        "cut_tokens": np.argmax(cut + rng.gumbel(size=trainer.shape), axis=-1),
        "head": order[..., :HEAD],
        "head_with_token": with_token(order[..., :HEAD], tokens),
        "support": order[..., :SUPPORT],
        "mask": mask,
        "holes": mask & (rng.random(mask.shape) < 0.7),
        "advantages": np.broadcast_to(np.array(ADVANTAGES)[:, None], mask.shape).copy(),
        "rewards": np.array(REWARDS),
    }


def with_token(ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns the ids; a missing sampled token takes the last place, as in TRL's reports."""
    found = (ids == tokens[..., None]).any(-1)
    return np.concatenate([ids[..., :-1], np.where(found, ids[..., -1], tokens)[..., None]], axis=-1)


class Batch:
    """The inputs in torch, with the log-probabilities p of the trainer (differentiable) and q of the sampler."""

    def __init__(self, inputs: dict[str, np.ndarray]) -> None:
        """Converts the arrays, and computes log-probabilities of sampled tokens, head and support."""
        arrays = {name: torch.tensor(array) for name, array in inputs.items()}
        self.logits = arrays["trainer_logits"].requires_grad_()
        self.mask, self.holes, self.advantages = arrays["mask"], arrays["holes"], arrays["advantages"]
        self.rewards, self.weights = arrays["rewards"], self.mask.double()
        p, q = self.logits.log_softmax(-1), arrays["sampler_logits"].log_softmax(-1)
        self.p, self.q = (self.take(x, arrays["tokens"]) for x in (p, q))
        self.old = self.p.detach()
        self.collision = p.detach().exp().square().sum(-1)
        self.head, self.head_with_token = arrays["head"], arrays["head_with_token"]
        self.everything = torch.arange(VOCABULARY).expand(p.shape)
        self.all_p, self.all_q = p, q
        ids, cut = arrays["support"], arrays["cut_tokens"]
        self.support_p, self.support_q = (
            x.gather(-1, ids) - x.gather(-1, ids).logsumexp(-1, keepdim=True) for x in (p, q)
        )
        place = (ids == cut[..., None]).int().argmax(-1)
        self.cut_p, self.cut_q = (self.take(x, place) for x in (self.support_p, self.support_q))

    def take(self, logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the log-probability of each token, [sequences, tokens]."""
        return logprobs.gather(-1, tokens[..., None]).squeeze(-1)


class Peer(NamedTuple):
    """The functions of one peer, compiled from its files."""

    functions: SimpleNamespace  # the functions by name
    digest: str  # the SHA-256 of their text


class Case(NamedTuple):
    """One function of a peer with one setting."""

    source: str  # the directory of the peer: name and version
    files: dict[str, tuple[str, ...]]  # the names of the functions by file, in the order in which they are compiled
    settings: dict[str, Any]  # what the test needs in order to choose our setting
    run: Callable[..., dict[str, Any]]  # a function of (functions, batch, **settings) that returns the results


def compile_functions(root: Path, files: dict[str, tuple[str, ...]]) -> Peer:
    """Compiles functions, classes and methods from files; it drops their decorators other than ``dataclass``.

    A name "Class.method" yields the method as a plain function.

    Raises:
      LookupError: A file does not define a name.
    """
    space: dict[str, Any] = {
        "torch": torch,
        "np": np,
        "nn": torch.nn,
        "math": math,
        "defaultdict": defaultdict,
        "dataclass": dataclasses.dataclass,
        "LossOutputs": SimpleNamespace,
        "AlgoConfig": type("AlgoConfig", (), {}),
        "SAFETY_BOUND": 20.0,
        "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": {"token_k1", "token_k2", "token_k3"},
        "SUPPORTED_ROLLOUT_RS_OPTIONS": {"seq_max_k2", "seq_max_k3", "seq_mean_k3", "token_k3"},
        "compute_rs_metrics": lambda **_: {},
        "apply_off_policy_correction": lambda loss, old, rollout, mask, config: (loss, mask, {}),
    }
    digest = hashlib.sha256()
    for file, names in files.items():
        text = (root / file).read_text(encoding="utf-8")
        for name in names:
            node = find(ast.parse(text).body, name.split("."))
            if node is None:
                raise LookupError(f"{root / file} does not define {name}")
            digest.update((ast.get_source_segment(text, node) or "").encode())
            node.decorator_list = [d for d in node.decorator_list if isinstance(d, ast.Name) and d.id == "dataclass"]
            code = compile(
                ast.Module([node], []), file, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True
            )
            exec(code, space)
        space.setdefault("verl_F", SimpleNamespace()).__dict__.update(space)
    return Peer(SimpleNamespace(**space), digest.hexdigest())


def find(body: Sequence[ast.stmt], parts: Sequence[str]) -> Any:
    """Returns the definition of a dotted name, or None."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == parts[0]:
            return find(node.body, parts[1:]) if len(parts) > 1 else node
    return None


def centering(f: Any, b: Batch, mode: str, low: float, high: float, head: str, style: str) -> dict[str, Any]:
    """Computes score centering.

    miles returns the whole loss of a token; verl and molt return the term that is subtracted.
    """
    ids = b.head if head == "top" else b.everything
    p, q = b.all_p.gather(-1, ids), b.all_q.gather(-1, ids)
    if style == "loss":
        flat = [x[b.mask] for x in (b.p, p, b.q, q)]
        kind = {"none": "none", "truncate": "tis", "band": "mis"}[mode]
        loss, numbers = f.score_centering_loss(
            *flat,
            torch.ones_like(flat[1], dtype=torch.bool),
            b.advantages[b.mask],
            mode=kind,
            tis_clip=high,
            mis_low=low,
            mis_high=high,
        )
        return {"loss": loss.sum(), "trainer_mass": numbers["sc_train_head_mass"]}
    if style == "weights":
        weights = {
            "none": torch.ones_like,
            "truncate": lambda r: r.clamp(max=high),
            "band": lambda r: torch.where((r >= low) & (r <= high), r, torch.zeros_like(r)),
        }
        term = f.score_centering_correction(p, q, weights[mode])[0]
    else:
        kind = {"none": "none", "truncate": "trunc", "band": "mask"}[mode]
        term = f.score_centering_correction(p, q, mode=kind, low=low, high=high)[0]
    return {"loss": (b.advantages * term * b.weights).sum()}


def dppo(f: Any, b: Batch, kind: str, bound: float, cap: float, style: str, **_: Any) -> dict[str, Any]:
    """Computes the divergence region of DPPO: the loss of verl, Stable-RL and SkyRL, and the mask of TRL."""
    config = SimpleNamespace(
        clip_ratio=bound,
        clip_ratio_low=None,
        clip_ratio_high=None,
        global_batch_info={},
        get=lambda name, default=None: cap if name == "clip_ratio_c" else default,
        dppo=SimpleNamespace(dppo_type=kind, delta_low=bound, delta_high=bound),
        off_policy_correction=None,
    )
    top = {
        "current_topk_logps": b.all_p.detach().gather(-1, b.head_with_token),
        "sampling_topk_logps": b.all_q.gather(-1, b.head_with_token),
    }
    if style == "trl":
        self = SimpleNamespace(epsilon_low=bound, epsilon_high=bound, divergence_type=kind)
        keep = f._compute_divergence_mask(self, b.old, b.q, b.advantages, b.weights, **top)
        return {"keep": keep}
    if style == "verl":
        run = f.compute_policy_loss_dppo_tv if kind == "binary_tv" else f.compute_policy_loss_dppo_kl
        return {"loss": run(b.q, b.p, b.advantages, b.mask, "token-mean", config)[0] * b.weights.sum()}
    if style == "skyrl":
        loss = f.dppo_policy_loss(b.p, b.old, b.advantages, config, b.weights, b.q)[0]
        return {"loss": loss}
    with torch.no_grad():
        kl, tv = f.compute_topk_kl(b.logits.detach(), b.head_with_token, b.all_q.gather(-1, b.head_with_token))
    loss, _ = f.compute_policy_loss_with_mask(
        b.old,
        b.p,
        b.advantages,
        b.mask,
        "token-mean",
        config,
        rollout_log_prob=b.q,
        topk_kl=kl,
        topk_tv=tv,
        entropy=b.old,
        loss_mode=f"dppo_{kind}",
    )
    return {"loss": loss * b.weights.sum(), "divergence": kl if kind.endswith("kl") else tv}


def prime(f: Any, b: Batch, kind: str, **settings: Any) -> dict[str, Any]:
    """Computes prime-rl's losses: the two-sided region, alone and with score centering over a support, and the band."""
    is_cut = settings.get("score_centering", False)
    config = SimpleNamespace(adv_tau=1.0, **{"score_centering": False, **settings})
    inputs = SimpleNamespace(
        trainer_logprobs=b.cut_p if is_cut else b.p,
        inference_logprobs=b.cut_q if is_cut else b.q,
        advantages=b.advantages,
        loss_mask=b.mask,
        loss_weights=None,
        trainer_mask_logprobs=b.support_p if is_cut else None,
        inference_mask_logprobs=b.support_q if is_cut else None,
    )
    return {"loss": getattr(f, kind)(config).loss(inputs).loss}


def penalty(f: Any, b: Batch, epsilon: float) -> dict[str, Any]:
    """Computes the smooth penalty of DRPO."""
    losses, _ = f._drpo_loss(new_logp=b.p, old_logp=b.q, advantages=b.advantages, epsilon=epsilon)
    return {"loss": (losses * b.weights).sum()}


def binary_kl(f: Any, b: Batch, bound: float) -> dict[str, Any]:
    """Computes AReaL's rejection of tokens by the binary KL in both directions (KPop)."""
    config = SimpleNamespace(metric="binary_kl", level="token", action="mask", upper=bound, lower=None, agg="mean")
    result = f.apply_rejection_sampling(b.old, b.q, b.weights, None, config)
    return {"keep": result.loss_mask, "weights": result.behave_imp_weight}


def second_moment(f: Any, b: Batch, bound: float) -> dict[str, Any]:
    """Computes the loss of AReaL's M2PO, with the ratio of trainer and sampler as the weight of each token."""
    keep = f._apply_m2po_masking(b.q, b.old, b.mask, bound)
    weights = SimpleNamespace(metric="ratio", level="token", action="clamp", upper=1e9, lower=None, agg="mean")
    logprobs = {"logprobs": b.p, "proximal_logprobs": b.old, "old_logprobs": b.q}
    loss, _ = f.ppo_actor_loss_fn(
        **logprobs, advantages=b.advantages, eps_clip=0.2, loss_mask=keep, rejection_sampling=weights
    )
    return {"loss": loss, "keep": keep}


def gates(f: Any, b: Batch, gating: str, level: str, low: float, high: float) -> dict[str, Any]:
    """Computes OpenRLHF's filter of tokens or sequences.

    It is by ratio, by binary KL (sampler || trainer) or by probability difference.
    """
    loss = f.PolicyLoss(
        clip_eps_low=1.0,
        clip_eps_high=1e9,
        is_correction_level=level,
        is_correction_gating=gating,
        is_correction_threshold=[low, high],
    )
    return {"loss": loss(b.p, b.old, b.advantages, b.weights, b.q)[0] * b.weights.sum()}


def rejection(f: Any, b: Batch, option: str, bound: float) -> dict[str, Any]:
    """Computes verl's rejection of sequences."""
    keep, _ = f.compute_rollout_rejection_mask(b.old - b.q, b.weights, option, bound)
    return {"keep": keep}


def multiplicative(f: Any, b: Batch, bound: float) -> dict[str, Any]:
    """Computes NeMo-RL's rejection of sequences by the mean of exp|log ratio|, which tunix has, too."""
    first = functools.partial(torch.nn.functional.pad, pad=(1, 0))  # the function reads from the second position on
    data = {"token_mask": first(b.weights), "sample_mask": torch.ones(len(LENGTHS)).double()}
    data |= {"prev_logprobs": first(b.old), "generation_logprobs": first(b.q)}
    f.compute_and_apply_seq_logprob_error_masking(data, b.rewards, bound)
    return {"keep": data["sample_mask"][:, None] * b.weights}


def pop(f: Any, b: Batch, low: float, high: float) -> dict[str, Any]:
    """Computes the weight of each token in the band of slime and miles (IcePop)."""
    arguments = SimpleNamespace(tis_clip_low=low, tis_clip=high)
    ones = torch.ones_like(b.old[b.mask])
    logs = {"train_log_probs": [b.old[b.mask]], "rollout_log_probs": [b.q[b.mask]]}
    weights = torch.zeros_like(b.old)
    weights[b.mask] = f.icepop_function(arguments, pg_loss=ones, loss_masks=[], **logs)[0]
    return {"weights": weights}


def baseline(f: Any, b: Batch, groups: Sequence[int], weighted: bool, holes: bool) -> dict[str, Any]:
    """Computes verl's optimal token baseline."""
    mask = (b.holes if holes else b.mask).double()
    last = TOKENS - 1 - mask.flip(-1).argmax(-1)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(LENGTHS)), last] = b.rewards
    run = f.compute_multi_turn_optimal_token_baseline_advantage if holes else f.compute_optimal_token_baseline_advantage
    ratios = (b.old - b.q).exp().clamp(max=2.0) if weighted else None
    return {"advantages": run(rewards, mask, np.array(groups), b.old, b.collision, ratios)[0]}


MILES = {"miles/backends/training_utils/loss_hub/score_centering.py": ("importance_weights", "score_centering_loss")}
VERL_CENTER = {"verl/trainer/ppo/score_centering.py": ("score_centering_correction",)}
MOLT = {"molt/models/score_centering.py": ("importance_weights", "head_mass", "score_centering_correction")}
MASKED = {"verl/utils/torch_functional.py": ("masked_sum", "masked_mean")}
VERL_DPPO = MASKED | {
    "verl/trainer/ppo/core_algos.py": ("agg_loss", "compute_policy_loss_dppo_tv", "compute_policy_loss_dppo_kl")
}
STABLE = MASKED | {
    "verl/trainer/ppo/core_algos.py": (
        "agg_loss",
        "compute_policy_loss_with_mask",
        "_compute_token_mask_for_policy_loss",
    ),
    "verl/workers/actor/utils.py": ("compute_topk_kl",),
}
UTILS = "skyrl/backends/skyrl_train/utils"
SKYRL = {
    f"{UTILS}/torch_utils.py": ("masked_mean", "safe_exp_delta"),
    f"{UTILS}/ppo_utils.py": ("reduce_loss", "dppo_policy_loss"),
}
TRL = {"trl/experimental/dppo/dppo_trainer.py": ("DPPOTrainer._compute_divergence_mask",)}
PRIME = {
    "src/prime_rl/trainer/rl/loss.py": (
        "_safe_mean",
        "_mismatch_kl_from_log_ratio",
        "_capped_importance_ratio",
        "IPOLoss",
        "IcePopLoss",
    )
}
UNIRL = {"unirl/algorithms/drpo.py": ("_drpo_loss",)}
AREAL = {
    "areal/utils/functional/functional.py": (
        "RejectionSamplingResult",
        "_check_bounds",
        "compute_binary_kl_divergence",
        "apply_rejection_sampling",
    )
}
AREAL_MOMENT = {
    "areal/trainer/ppo/actor.py": ("_get_m2po_loss_mask", "_apply_m2po_masking"),
    "areal/utils/functional/functional.py": (
        "RejectionSamplingResult",
        "_check_bounds",
        "apply_rejection_sampling",
        "ppo_actor_loss_fn",
    ),
}
OPENRLHF = {"openrlhf/models/utils.py": ("masked_mean",), "openrlhf/models/loss.py": ("aggregate_loss", "PolicyLoss")}
VERL_REJECT = MASKED | {
    "verl/trainer/ppo/rollout_corr_helper.py": ("_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask")
}
NEMO = {"nemo_rl/algorithms/grpo.py": ("compute_and_apply_seq_logprob_error_masking",)}
SLIME = {"slime/backends/megatron_utils/loss.py": ("icepop_function",)}
CORRECTIONS = {"miles/backends/training_utils/loss_hub/corrections.py": ("icepop_function",)}
VERL_BASELINE = {
    "verl/trainer/ppo/core_algos.py": (
        "compute_optimal_token_baseline_advantage",
        "compute_multi_turn_optimal_token_baseline_advantage",
    )
}


def cases() -> dict[str, Case]:
    """Returns all cases by name: remedy, variant and peer."""
    made: dict[str, Case] = {}
    for mode, low, high in (("none", 0.0, 1.0), ("truncate", 0.0, 1.35), ("band", 0.61, 1.5)):
        band = {"mode": mode, "low": low, "high": high}
        for head in ("top", "all"):
            at = f"center/{mode}_{head}"
            settings = {**band, "head": head}
            made[f"{at}/miles"] = Case("miles-857598f", MILES, {**settings, "style": "loss"}, centering)
            if head == "top":
                made[f"{at}/verl"] = Case("verl-c6236f5", VERL_CENTER, {**settings, "style": "weights"}, centering)
                made[f"{at}/molt"] = Case("molt-6df1ef7", MOLT, {**settings, "style": "modes"}, centering)
    for kind, bound in (("binary_tv", 0.094), ("binary_kl", 0.08), ("topk_tv", 0.12), ("topk_kl", 0.1)):
        settings = {"kind": kind, "bound": bound, "cap": 1.5}
        stable = {**settings, "style": "stable"}
        made[f"dppo/{kind}/stable-rl"] = Case("stable-rl-c6af1d1", STABLE, stable, dppo)
        made[f"dppo/{kind}/trl"] = Case("trl-1.1.0", TRL, {**settings, "style": "trl"}, dppo)
        if kind.startswith("binary"):
            made[f"dppo/{kind}/verl"] = Case("verl-0.9.1", VERL_DPPO, {**settings, "style": "verl"}, dppo)
            made[f"dppo/{kind}/skyrl"] = Case("skyrl-0.3.0", SKYRL, {**settings, "style": "skyrl"}, dppo)
    region = {"kind": "IPOLoss", "eps": 0.094, "max_importance_ratio": 1.5}
    made["region/two_sided/prime-rl"] = Case("prime-rl-2026.11", PRIME, region, prime)
    made["region/cut_centered/prime-rl"] = Case("prime-rl-2026.11", PRIME, {**region, "score_centering": True}, prime)
    band = {"kind": "IcePopLoss", "ratio_low": 0.61, "ratio_high": 1.5}
    made["band/prime-rl"] = Case("prime-rl-2026.11", PRIME, band, prime)
    for epsilon in (0.2, 12.5):
        made[f"penalty/{epsilon}/unirl"] = Case("unirl-1a7b501", UNIRL, {"epsilon": epsilon}, penalty)
    made["kpop/areal"] = Case("areal-cbff54d", AREAL, {"bound": 0.08}, binary_kl)
    for bound in (0.04, 0.3):
        made[f"moment/{bound}/areal"] = Case("areal-cbff54d", AREAL_MOMENT, {"bound": bound}, second_moment)
    for gating, high in (("ratio", 1.5), ("binary_kl", 0.08), ("tv", 0.094)):
        low = 0.61 if gating == "ratio" else 0.0
        settings = {"gating": gating, "level": "token", "low": low, "high": high}
        made[f"gate/{gating}/openrlhf"] = Case("openrlhf-0.11.2", OPENRLHF, settings, gates)
    for option, bound in (("seq_max_k3", 1.0), ("seq_mean_k3", 0.216)):
        made[f"reject/{option}/verl"] = Case("verl-0.9.1", VERL_REJECT, {"option": option, "bound": bound}, rejection)
    made["reject/multiplicative/nemo-rl"] = Case("nemo-rl-7ea279a", NEMO, {"bound": 1.38}, multiplicative)
    made["band/slime"] = Case("slime-624b824", SLIME, {"low": 0.61, "high": 1.5}, pop)
    made["band/miles"] = Case("miles-31f1ca9", CORRECTIONS, {"low": 0.61, "high": 1.5}, pop)
    for name, groups, weighted, holes in (
        ("one_group", (0, 0, 0, 0), False, False),
        ("two_groups", (0, 0, 1, 1), False, False),
        ("weighted", (0, 0, 0, 0), True, False),
        ("turns", (0, 0, 0, 0), False, True),
    ):
        settings = {"groups": groups, "weighted": weighted, "holes": holes}
        made[f"baseline/{name}/verl"] = Case("verl-0.9.1", VERL_BASELINE, settings, baseline)
    return made


def run_case(case: Case, inputs: dict[str, np.ndarray], sources: Path) -> tuple[dict[str, np.ndarray], str]:
    """Runs a peer's function on the batch. Returns its results, the gradient included, and the digest of its text."""
    peer = compile_functions(sources / case.source, case.files)
    batch = Batch(inputs)
    results = case.run(peer.functions, batch, **case.settings)
    if "loss" in results:
        (results["gradient"],) = torch.autograd.grad(results["loss"], batch.logits)
    return {name: value.detach().numpy() for name, value in results.items()}, peer.digest


def main() -> None:
    """Runs the cases and writes the golden file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="directory with the peers' files")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the golden file (default: tests/gold)")
    parser.add_argument("--only", nargs="+", default=[], help="words of the names of the cases to print")
    options = parser.parse_args()
    inputs = make_inputs()
    arrays = {f"inputs/{name}": array for name, array in inputs.items()}
    about: dict[str, Any] = {}
    for name, case in cases().items():
        if options.only and not any(word in name for word in options.only):
            continue
        results, digest = run_case(case, inputs, options.sources)
        arrays |= {f"{name}/{result}": value for result, value in results.items()}
        about[name] = {"source": case.source, "settings": case.settings, "sha256": digest, "results": sorted(results)}
        print(f"{name:36s} {case.source:20s}", {key: float(np.sum(value)) for key, value in results.items()})
    if options.only:
        return
    today = datetime.date.today().isoformat()
    notes = {"day": today, "torch": torch.__version__, "python": sys.version.split()[0], "cases": about}
    np.savez_compressed(options.output, about=np.array(json.dumps(notes)), **arrays)
    print(f"{len(about)} cases are in {options.output}")


if __name__ == "__main__":
    main()
