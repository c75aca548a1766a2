"""The rows into which a run packs its sequences. In rows of *trees*, a prefix that sequences share stands once."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rljax.policy.attention import find_implementation
from rljax.policy.config import PolicyConfig
from rljax.policy.families import state_heads
from rljax.rollout.kinds import can
from rljax.run.config import Config
from rljax.run.config_file import dotted, read_document
from rljax.trainer.packing import max_micro_batches, pack
from rljax.trainer.self_check import other_shape
from rljax.trainer.trees import flat_row_tokens, pack_trees, tree_row_tokens
from rljax.trainer.update import Pack

log = logging.getLogger(__name__)


def settle_prefixes(
    config: Config, policy: PolicyConfig, fault: Callable[[], str] = str, *, says: bool = True
) -> Config:
    """Returns the configuration with ``packing.share_prefixes`` off if this run's sequences cannot share prefixes.

    With ``says`` a line in the log tells why. A run that began with separate rows keeps them. ``policy`` is trained.
    ``fault`` returns the reason why the devices cannot compute rows of trees; empty if they can.
    """
    if not config.packing.share_prefixes:
        return config
    whole = f"the state of a {policy.family} policy passes from each token to the next one in its row"
    reason = whole if state_heads(policy) else why_apart(config) or _began_apart(config) or fault()
    if reason and says:
        log.warning("packing.share_prefixes: off, each sequence has its own copy of its prompt: %s", reason)
    return with_separate_rows(config) if reason else config


def with_separate_rows(config: Config) -> Config:
    """Returns the configuration with ``packing.share_prefixes`` off."""
    return dataclasses.replace(config, packing=dataclasses.replace(config.packing, share_prefixes=False))


def why_apart(config: Config) -> str:
    """Returns the setting that keeps sequences from sharing prefixes, as a reason; empty if they can share."""
    if can(config.rollout.engine, "is_exact"):
        return "the exact engine computes the rows that it sampled"
    if config.mesh.context > 1:
        return f"mesh.context = {config.mesh.context} devices share a row"
    if config.loss.router_balance:
        return "loss.router_balance counts a token as often as it is trained on"
    if config.rollout.router_replay == "r2":
        return "rollout.router_replay = r2 reads the routes of separate rows"
    return ""


def _began_apart(config: Config) -> str:
    """Returns the file that says that the run goes on from one with separate rows; empty if it does not.

    That run is in ``run.dir``, or else ``run.resume`` names it. Perhaps its rljax knew no other rows.
    """
    resumed = () if config.run.resume in ("auto", "never") else (config.run.resume,)
    for run_dir in (config.run.dir, *resumed):
        if (path := Path(run_dir) / "config.yaml").is_file():
            recorded = read_document(path, {})
            known = dict(dotted(recorded)) if isinstance(recorded, dict) else {}
            return "" if known.get("packing.share_prefixes", False) else f"{path} has it off"
    return ""


def shares_prefixes(config: Config) -> bool:
    """Returns whether the rows of the run hold trees, as far as the configuration says."""
    return config.packing.share_prefixes and not why_apart(config)


def tree_rows(config: Config, row_tokens: int) -> int:
    """Returns the length of rows of trees (tokens) of a run whose separate rows have ``row_tokens`` tokens."""
    packing = config.packing
    if packing.row_tokens:
        return row_tokens
    longer = tree_row_tokens(row_tokens, *_sizes(config))
    return longer if not packing.tokens_per_device else max(row_tokens, min(longer, packing.tokens_per_device))


def flat_rows(config: Config, row_tokens: int) -> int:
    """Returns the length (tokens) of flat rows, which hold the responses beside rows of trees; 0 without trees."""
    if not shares_prefixes(config):
        return 0
    if config.rollout.environment is not None or config.rollout.trajectories is not None:
        return row_tokens  # the first prompt of an episode may be short, and all that follows it is its response
    return flat_row_tokens(row_tokens, *_sizes(config))


def has_two_levels(config: Config, policy: PolicyConfig) -> bool:
    """Returns whether trees have only a root and branches: attention of cuDNN and splash takes no deeper trees."""
    dtype = config.precision.compute_dtype
    return find_implementation(config.policy.attention, jax.devices()[0], dtype, policy.head_dim) != "xla"


def _sizes(config: Config) -> tuple[int, int, int]:
    return config.data.max_prompt_tokens, config.rollout.max_response_tokens, config.rollout.group_size


def micro_batch_shape(config: Config, longest: int) -> tuple[int, int]:
    """Returns (rows, tokens) of a micro-batch of sequences of at most ``longest`` tokens."""
    packing, mesh = config.packing, config.mesh
    tokens = packing.resolve_row_tokens(longest, mesh.context)
    return packing.resolve_rows(tokens, mesh.row_ways(jax.device_count()), mesh.context), tokens


def batch_shape(
    config: Config, num_sequences: int | None = None, micro_batch: tuple[int, int] | None = None
) -> tuple[int, int, int]:
    """Returns (micro-batches, rows, tokens) of a batch with room for ``num_sequences`` sequences (None: a step's).

    ``micro_batch`` is the (rows, tokens) of a micro-batch; None: those of the run.
    """
    longest = config.max_sequence_tokens
    rows, tokens = micro_batch or micro_batch_shape(config, longest)
    if shares_prefixes(config) and micro_batch is None:
        longer, ways = tree_rows(config, tokens), config.mesh.row_ways(jax.device_count())
        rows, tokens = max(1, rows * tokens // longer // ways) * ways, longer
    return max_micro_batches(num_sequences or config.num_sequences, longest, tokens, rows), rows, tokens


def make_pack(
    config: Config, policy: PolicyConfig, num_sequences: int, micro_batch: tuple[int, int] | None = None
) -> Pack:
    """Returns a function that packs at most ``num_sequences`` sequences into a batch of shape ``batch_shape``."""
    micro, rows, tokens = batch_shape(config, num_sequences, micro_batch)
    sizes: dict[str, Any] = {"row_tokens": tokens, "rows_per_micro_batch": rows, "micro_batches": micro}
    tops = config.trained_tops > 0
    if flat := flat_rows(config, tokens):
        levels = has_two_levels(config, policy)
        return functools.partial(pack_trees, **sizes, flat_tokens=flat, with_tops=tops, two_levels=levels)
    return functools.partial(pack, **sizes, with_tops=tops)


def other_rows(config: Config) -> tuple[int, int]:
    """Returns (rows, tokens) of a micro-batch that differs in shape from the run's own."""
    return other_shape(*batch_shape(config)[1:], config.mesh.row_ways(jax.device_count()))


def responses_per_update(config: Config) -> int:
    """Returns the largest number of sequences in one update."""
    return config.num_sequences // config.loss.mini_batches
