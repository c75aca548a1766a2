"""The settings of the program: from the configuration of the run, and from the file of the environment."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rljax.data.tokenizer import load_tokenizer


class EndError(Exception):
    """The program cannot go on. The message is one line."""


def described(name: str) -> dict[str, Any]:
    """Returns the settings of an environment from its name: a YAML or TOML file of settings, or a taskset.

    Raises EndError if the file cannot be read.
    """
    if not name.endswith((".toml", ".yaml", ".yml")):
        return {"taskset": {"id": name}}
    try:
        text = Path(name).read_text(encoding="utf-8")
        found = tomllib.loads(text) if name.endswith(".toml") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EndError(f"{name} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or not isinstance(found.get("taskset"), dict):
        raise EndError(f"{name} must be a mapping with taskset: {{id: NAME}}, got {found!r:.100}")
    return found


def settings_of(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the settings of the environment ``name`` and of its renderer, from the run's configuration."""
    data, episode, given = run["data"], run["rollout"]["episode"], described(name)
    directory = Path(run["model"]["path"]).absolute()
    renderer = {
        "directory": str(directory),
        "stops": stops_of(directory, run["rollout"]["stop_token_ids"]),
        "chat_template": data["chat_template"] is not False,
        "arguments": template_arguments(data),
        **given.pop("renderer", {}),
    }
    limits = {key: episode[key] for key in ("tool_timeout_s", "call_timeout_s")}
    return {"environment": given, "renderer": renderer, "agent": {"max_turns": episode["max_turns"]}, **limits}


def stops_of(directory: Path, more: Sequence[int]) -> list[int]:
    """Returns the tokens that end a turn: those of the model's files, or else of its tokenizer, and ``more``."""
    stops: list[int] = []
    for file in (directory / "config.json", directory / "generation_config.json"):
        found = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        stops += found if isinstance(found, list) else [] if found is None else [found]
    return list(dict.fromkeys([*(stops or [load_tokenizer(directory).eos_token_id]), *more]))


def template_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the chat template. Each word ``NAME=VALUE`` has JSON as its value, or else text."""
    arguments = {} if data["enable_thinking"] is None else {"enable_thinking": data["enable_thinking"]}
    for name, _, value in (word.partition("=") for word in data["chat_template_kwargs"]):
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def read_run(directory: Path, model: str | None) -> dict[str, Any]:
    """Returns the configuration of a run. Raises EndError if no trajectories can be made for it."""
    try:
        run = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    except OSError as error:
        raise EndError(f"{directory}/config.yaml cannot be read ({error.strerror}): start the run first") from error
    rollout = run["rollout"]
    if not str(rollout["trajectories"]).startswith("http://"):
        raise EndError(f"rollout.trajectories of the run must be http://HOST:PORT, got {rollout['trajectories']}")
    if rollout["engine"] != "vllm" or not rollout["urls"]:
        got = f"got {rollout['engine']} and {rollout['urls']}"
        raise EndError(f"the run must have rollout.engine = vllm and its servers in rollout.urls, {got}")
    run["model"]["path"] = model or run["model"]["path"]
    if not Path(run["model"]["path"]).is_dir():
        raise EndError(f"{run['model']['path']} is no directory here: --model must name the model's directory")
    return run
