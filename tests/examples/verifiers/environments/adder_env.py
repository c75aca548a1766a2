"""A taskset of verifiers with a tool that adds; ``mode`` makes the tool raise, hang, or end its process."""

import asyncio
import os

import verifiers.v1 as vf


class AdderConfig(vf.SharedToolsetConfig):
    mode: str = "adds"


class Adder(vf.Toolset[AdderConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two digits."""
        if self.config.mode == "raises":
            raise ValueError("9999")
        if self.config.mode == "hangs":
            await asyncio.sleep(600)
        if self.config.mode == "dies":
            os._exit(3)
        return f"{a + b}="


class AdderTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def replies(self, trace) -> float:
        return float(len(trace.tool_messages))


class AdderTasksetConfig(vf.TasksetConfig):
    tools: AdderConfig = AdderConfig()


class AdderTaskset(vf.Taskset[AdderTask, AdderTasksetConfig]):
    def load(self):
        for i in range(4):
            yield AdderTask(vf.TaskData(prompt=f"{i}{i}1+11{i}="), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Adder(config.tools)]


def calls(text):
    """Returns the call of the tool in a text of two digits or more: it adds the first and the last digit."""
    digits = [character for character in text if character.isdigit()]
    return [("add", {"a": int(digits[0]), "b": int(digits[-1])})] if len(digits) > 1 else []


__all__ = ["AdderTaskset"]

if __name__ == "__main__":
    Adder.run()
