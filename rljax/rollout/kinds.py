"""The engines, the abilities of each, and the abilities that the settings of a configuration need.

A server may describe a platform on which it lacks some abilities of its engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from rljax.rollout.types import RolloutConfig

Ability = Literal[
    "serves",  # it samples in servers over HTTP, to which weights are published
    "decodes",  # it decodes in this process, with a cache in a form of its own settings
    "is_exact",  # it samples with the executable that the trainer trains with
    "lags",  # it samples with a copy of the policy, so that the trainer may go on meanwhile
    "updates_in_flight",  # it goes on with responses when new weights come
    "sleeps",  # it gives its devices back while the trainer trains
    "cuts",  # it reports log-probabilities of the distribution after a cut
    "injects",  # its weights and logits can be changed on purpose
    "replays",  # the trainer may take over the experts of a recorded forward
    "reports_routes",  # it reports the experts of each token
    "cache_form",  # it may hold keys and values in another form than the rollout dtype
    "weight_form",  # it may hold weights in another form than the rollout dtype
    "is_invariant",  # it can compute each token with bits that do not depend on the batch
    "decodes_given",  # it decodes given tokens one by one
    "takes_seeds",  # it samples a response again from the same seed
    "cuts_by_share",  # it cuts tokens below a share of the likeliest token's probability
    "scores_alone",  # it scores a sampled token without any likeliest token
    "widens_head",  # its LM head may compute in float32 beside weights of 16 bits
    "samples_cold",  # it samples at a temperature between 0 and 0.01 as given
]

_SERVER: tuple[Ability, ...] = (
    *("serves", "lags", "updates_in_flight", "cache_form", "is_invariant"),
    *("takes_seeds", "scores_alone", "widens_head"),
)
ENGINES: dict[str, frozenset[Ability]] = {
    "exact": frozenset({"is_exact", "cuts", "cuts_by_share", "injects", "samples_cold"}),
    "jax": frozenset(
        {"decodes", "lags", "cuts", "cuts_by_share", "injects", "replays", "reports_routes", "samples_cold"}
    ),
    "vllm": frozenset(
        {*_SERVER, "sleeps", "cuts", "cuts_by_share", "replays", "reports_routes", "weight_form", "decodes_given"}
    ),
    "sglang": frozenset({*_SERVER, "replays", "samples_cold"}),
}
"""The abilities of each engine, by its name in ``rollout.engine``. ``build.py`` makes the engine."""
LACKING: dict[str, frozenset[Ability]] = {
    "tpu": frozenset(
        {
            *("updates_in_flight", "sleeps", "cuts_by_share", "reports_routes", "cache_form", "weight_form"),
            *("is_invariant", "decodes_given", "takes_seeds", "scores_alone", "widens_head"),
        }
    )
}
"""The abilities that servers lack on a platform, by the name of the platform in their description."""


@dataclass(frozen=True)
class Wish:
    """A setting that not every engine can have."""

    key: str  # the setting, below ``rollout``
    needs: Ability  # the ability that the engine needs for it
    is_made: Callable[[RolloutConfig], bool]  # a function that tells whether a configuration has the setting


WISHES = (
    Wish("colocated", "sleeps", lambda c: c.colocated),
    Wish("trajectories", "lags", lambda c: c.trajectories is not None),
    Wish("max_staleness", "lags", lambda c: c.max_staleness > 0),
    Wish("update", "updates_in_flight", lambda c: c.update != "wait"),
    Wish("kv_cache_dtype", "decodes", lambda c: c.kv_cache_dtype != "auto"),
    Wish("decode_tokens", "decodes", lambda c: c.decode_tokens > 0),
    Wish("server_form", "cache_form", lambda c: c.server_form.is_rounded),
    Wish("server_form.weights", "weight_form", lambda c: c.server_form.weights != "none"),
    Wish("batch_invariant", "is_invariant", lambda c: c.batch_invariant),
    Wish("router_replay", "replays", lambda c: c.router_replay != "none"),
    Wish("router_replay = r3", "reports_routes", lambda c: c.router_replay == "r3"),
    Wish("min_p", "cuts_by_share", lambda c: c.min_p > 0),
    Wish("top_k", "cuts", lambda c: c.is_cut),
    Wish("temperature below 0.01", "samples_cold", lambda c: c.temperature < 0.01),
    Wish("inject", "injects", lambda c: c.inject.changes_weights or c.inject.logit_noise > 0),
)
"""The settings that need an ability, in the order in which they are checked."""


def can(engine: str, ability: Ability, platform: str = "") -> bool:
    """Returns whether an engine has an ability, on servers of a ``platform``. Raises ValueError for an unknown name."""
    if engine not in ENGINES:
        raise ValueError(f"the engine must be {_either(ENGINES)}, got {engine!r}")
    return ability in ENGINES[engine] and ability not in LACKING.get(platform, ())


def engines_that(ability: Ability) -> tuple[str, ...]:
    """Returns the names of the engines that have an ability."""
    return tuple(name for name in ENGINES if can(name, ability))


def named_engines(ability: Ability) -> str:
    """Returns the names of the engines that have an ability, for a message: "jax, vllm or sglang"."""
    return _either(engines_that(ability))


if TYPE_CHECKING:
    Engine: TypeAlias = str
    Copying: TypeAlias = str
else:
    Engine = Literal[tuple(ENGINES)]  # the choices of a key that names any engine
    Copying = Literal[engines_that("lags")]  # the choices of a key that names an engine for a policy that nobody trains


def check_wishes(config: RolloutConfig) -> None:
    """Raises ValueError for the first setting that the engine of ``config`` cannot have."""
    for wish in _refused(config):
        works = f"works with rollout.engine = {named_engines(wish.needs)}"
        raise ValueError(f"rollout.{wish.key} {works}, not with {config.engine}")


def platform_differences(config: RolloutConfig, platform: str) -> list[str]:
    """Returns one line for each setting that the engine of ``config`` cannot have on servers of a ``platform``."""
    where = f"{config.engine} on a {platform.upper()}"
    return [f"rollout.{wish.key} does not work with {where}: leave it out" for wish in _refused(config, platform)]


def _refused(config: RolloutConfig, platform: str = "") -> Iterator[Wish]:
    """Yields the settings of ``config`` that its engine cannot have."""
    yield from (wish for wish in WISHES if wish.is_made(config) and not can(config.engine, wish.needs, platform))


def _either(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
