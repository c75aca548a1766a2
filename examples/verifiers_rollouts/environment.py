"""An environment of ``verifiers``: it is loaded to run on this machine, and plays one trajectory at a time."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.agent import ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig, runtime_is_local
from verifiers.v1.utils.loaders import default_harness_id, harness_config_type
from verifiers_rollouts import chat
from verifiers_rollouts.chat import FULL, TOOLS
from verifiers_rollouts.renderer import AppendingRenderer
from verifiers_rollouts.shim import MODEL

CHAT = "rljax_chat"
"""The identity of the harness that agents get in place of verifiers' own ``bash``."""

_RENDERER = f"{AppendingRenderer.__module__}:{AppendingRenderer.__name__}"


class UnfitError(Exception):
    """The environment does something that no run can train on."""


def load(settings: Mapping[str, Any]) -> Any:
    """Returns the environment that the settings describe. All parts of it run on this machine.

    Raises ValueError if an agent is to run on another machine or to ask another model. ``verifiers`` may raise other
    errors.
    """
    sys.modules[CHAT] = chat  # verifiers finds a harness by the name of its module
    os.environ["PRIME_INFERENCE_URL"] = "http://127.0.0.1:9"  # By default it would ask a remote host for other models.
    given = settings["environment"]
    config = vf.resolve_env_config(given)
    own_harness = default_harness_id(config.taskset.id)
    for name, role in agent_config_fields(config).items():
        asked = given.get(name) or {}
        changed = {key: value for key, value in settings["agent"].items() if getattr(role, key) is None}
        if not runtime_is_local(role.runtime):
            if "runtime" in asked:
                raise ValueError(f"{name}.runtime must run on this machine, got {role.runtime.type}")
            changed["runtime"] = SubprocessConfig()
        if role.client is not None:
            raise ValueError(f"{name}.client must not be set: the run's own policy answers")
        if role.harness is None and own_harness == "bash":
            harness = {"id": CHAT, "tool_timeout": settings["tool_timeout_s"]}
            changed["harness"] = harness_config_type(CHAT).model_validate(harness)
        config = config.model_copy(update={name: role.model_copy(update=changed)})
    return vf.load_environment(config)


def model_context(settings: Mapping[str, Any], url: str, temperature: float) -> Any:
    """Returns the context in which each trajectory asks the server at ``url`` for its turns."""
    client = vf.TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var="RLJAX_NO_KEY",
        renderer={"name": "custom", "import_path": _RENDERER, **settings["renderer"]},
        renderer_model_name=settings["renderer"]["directory"],
    )
    return ModelContext(model=MODEL, client=client, sampling=vf.Sampling(temperature=temperature))


async def play(environment: Any, task: Any, context: Any, begin: Callable[[Any], None]) -> dict[str, Any]:
    """Runs one trajectory on a task, and returns its end.

    The context is the one of ``model_context``. ``begin`` is called with each trace before the trace asks for a turn.

    Returns:
      A dictionary with ``failure`` (None, or one of timeout, provider, unscored, environment), ``error`` (the message
      of the library), ``reward``, ``rows`` (the token ids of each branch, and whether each was sampled), and ``tools``
      (counts).

    Raises:
      UnfitError: The episode trains more than one agent.
    """
    episode = await environment.run_episode(task, context, on_trace=begin)
    traces = trained(episode.traces)
    if len(traces) > 1:
        names = ", ".join(trace.agent.name for trace in traces)
        raise UnfitError(f"{len(traces)} agents of one episode are trained ({names}); a run trains one")
    trace: Any = traces[0] if traces else None
    failure, error = failure_of(episode, trace)
    return ended(failure, error, traces, None if failure is not None else trace.reward)


def trained(traces: list[Any]) -> list[Any]:
    """Returns the traces of agents that are trained."""
    return [trace for trace in traces if trace.agent.trainable]


def ended(failure: str | None, error: str, traces: list[Any], reward: float | None = None) -> dict[str, Any]:
    """Returns the end of a trajectory, in the form of ``play``.

    The rows and the counts are those of the last trained one of ``traces``.
    """
    traces = trained(traces)
    branches = [branch for trace in traces[-1:] for branch in trace.branches if branch.trainable]
    return {
        "failure": failure,
        "error": error,
        "reward": reward,
        "rows": [[branch.token_ids, branch.sampled_mask] for branch in branches],
        "tools": traces[-1].info.get(TOOLS, {}) if traces else {},
    }


def failure_of(episode: Any, trace: Any) -> tuple[str | None, str]:
    """Returns the kind of failure of an episode, or None, and the message of the library about it."""
    errors = [*episode.errors, *(trace.errors if trace is not None else [])]
    said = f"{errors[-1].type}: {errors[-1].message}" if errors else ""
    if episode.is_timeout or any(each.is_timeout for each in episode.traces):
        return "timeout", said or "a deadline of the environment passed"
    last = trace.calls[-1].error if trace is not None and trace.calls else None
    if last is not None and FULL not in last.message:
        return "provider", f"{last.type}: {last.message}"
    if trace is None or not trace.ok or not episode.ok:
        scored = trace is not None and trace.timing.scoring.start and errors and errors[-1].type == "TaskError"
        return "unscored" if scored else "environment", said
    rewards = list(trace.rewards.values())
    if not rewards or any(reward is None or not math.isfinite(reward.value) for reward in rewards):
        return "unscored", "the episode has no reward"
    return None, ""
