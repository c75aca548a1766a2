"""The file of the scores with which ``rljax prepare`` measures pass rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rljax.errors import ConfigError


class ScoreFile:
    """The rewards of each problem's responses, in a JSONL file that survives an interruption."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Reads the scores so far. Raises ConfigError if they come from other settings."""
        self._path, self.rewards = path, dict[str, list[float]]()
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # the last line may be incomplete
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines:
                self._check(lines[0], settings)
                self.rewards = {line["key"]: line["rewards"] for line in lines[1:]}
                path.write_text(whole, encoding="utf-8")
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")

    def add(self, key: str, rewards: list[float]) -> None:
        """Writes one problem's rewards."""
        self.rewards[key] = rewards
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"key": key, "rewards": rewards}) + "\n")

    def _check(self, there: dict[str, Any], now: dict[str, Any]) -> None:
        differing = [f"{key} ({there.get(key)} there, {now[key]} now)" for key in now if there.get(key) != now[key]]
        if differing:
            raise ConfigError(
                f"{self._path} was scored with other settings: {', '.join(differing)}; "
                "delete it or give another --scores"
            )
