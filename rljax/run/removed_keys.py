"""The keys that were removed. An old configuration file may still hold them, with the values that are fixed now."""

from __future__ import annotations

from typing import Any

_BAND = "its value is fixed; rollout.verify.factor widens the bands"
_BUCKETS = "the buckets are fixed"
_SELF = "diagnosis.self_every alone says when the trainer is compared with itself"
_RETRY = "the pauses between attempts are fixed; rollout.limits.request_timeout_s bounds a request"

REMOVED: dict[str, tuple[Any, str]] = {
    "run.heartbeat_s": (30.0, "the other processes end 30 s after the last sign of life of one"),
    "data.seed": (0, "the choice of the problems is fixed; run.seed orders them"),
    "rollout.refill_limit": (4, "a step samples up to 4 further batches"),
    "rollout.max_top_bytes": (8 * 2**30, "give a smaller rollout.top_logprobs, data.batch_size or response"),
    "rollout.max_route_bytes": (8 * 2**30, "give a smaller data.batch_size or response"),
    "rollout.router": (None, "list the servers in rollout.urls or rollout.discovery"),
    "rollout.offload_state": (True, "the state leaves the devices whenever rollout.colocated samples on them"),
    "rollout.seeded": (True, "requests have seeds with rollout.update = wait"),
    "rollout.limits.connect_timeout_s": (10.0, "a server has 10 s to accept a connection"),
    "rollout.limits.max_attempts": (6, _RETRY),
    "rollout.limits.backoff_s": (0.25, _RETRY),
    "rollout.limits.max_backoff_s": (8.0, _RETRY),
    "rollout.verify.rounds": (3, _BAND),
    "rollout.verify.floors.bfloat16": (0.02, _BAND),
    "rollout.verify.floors.float16": (0.0025, _BAND),
    "rollout.verify.floors.float32": (1e-5, _BAND),
    "rollout.verify.ceilings.bfloat16": (0.08, _BAND),
    "rollout.verify.ceilings.float16": (0.01, _BAND),
    "rollout.verify.ceilings.float32": (1e-3, _BAND),
    "rollout.verify.mixture_factor": (3.0, _BAND),
    "rollout.verify.rounded_floor": (0.1, _BAND),
    "rollout.verify.rounded_ceiling": (0.6, _BAND),
    "rollout.verify.rounded_prompts": (16, _BAND),
    "rollout.verify.rounded_own_floor": (0.001, _BAND),
    "rollout.verify.seed": (0, "the probes are fixed"),
    "rollout.episode.max_reply_chars": (16384, "what a tool or an environment says is cut after 16384 characters"),
    "rollout.inject.seed": (0, "the noise is fixed; run.seed changes the samples"),
    "publish.in_place": (False, "servers load the weights as in any other run"),
    "publish.anchor_every": (16, "every 16th version is written whole"),
    "publish.straggler_s": (30.0, "a publish waits 30 s for slower servers"),
    "eval.seed": (0, "the seed of an evaluation is fixed"),
    "checkpoint.upload": ("", "give checkpoint.after_save: COMMAND, which copies each checkpoint"),
    "checkpoint.upload_wait_s": (600.0, "the end of a run waits run.grace_s for checkpoint.after_save"),
    "diagnosis.entropy_edges": ([0.01, 0.1, 0.5, 1.0, 2.0], _BUCKETS),
    "diagnosis.staleness_buckets": (4, _BUCKETS),
    "diagnosis.reference_steps": (10, "a rise is measured from the first 10 steps"),
    "diagnosis.self_causes": (["shape", "mesh", "remat"], _SELF),
    "diagnosis.self_responses": (64, _SELF),
}
"""The default of each removed key, and what holds instead or what to do. The default is as a file writes it."""
