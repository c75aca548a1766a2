"""A taskset and an environment of verifiers with several turns, between which a user says "9+"."""

import asyncio

import verifiers.v1 as vf


class TurnsTaskConfig(vf.TaskConfig):
    rewards_fail: bool = False
    seconds: float = 0.0
    """The seconds that scoring takes."""


class TurnsTask(vf.Task[vf.TaskData, vf.State, TurnsTaskConfig]):
    @vf.reward
    async def length(self, trace) -> float:
        if self.config.rewards_fail:
            raise RuntimeError("no reward today")
        await asyncio.sleep(self.config.seconds)
        return float(sum(len(message.content or "") for message in trace.assistant_messages))


class TurnsTasksetConfig(vf.TasksetConfig):
    task: TurnsTaskConfig = TurnsTaskConfig()


class TurnsTaskset(vf.Taskset[TurnsTask, TurnsTasksetConfig]):
    def load(self):
        for i in range(4):
            yield TurnsTask(vf.TaskData(prompt=f"{i}+1="), self.config.task)


class TurnsEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()
    turns: int = 3
    both: bool = False
    """Whether a second agent plays, too, so that there is no single trained agent unless it is ``fixed``."""
    fixed: bool = False
    """Whether the second agent is not trained. It then plays before the first one, too, with a longer prompt."""


class TurnsEnv(vf.Env[TurnsEnvConfig]):
    async def setup(self, agents):
        agents.other.trainable = not self.config.fixed

    async def run(self, task, agents):
        if self.config.fixed:
            await agents.other.run(TurnsTask(vf.TaskData(prompt="9+9+9+"), task.config))
        async with agents.agent.interaction(task) as chat:
            segment = await chat.turn()
            for _ in range(self.config.turns - 1):
                if segment.terminated:
                    break
                segment = await chat.turn("9+")
        if self.config.both:
            await agents.other.run(task)


__all__ = ["TurnsEnv", "TurnsTaskset"]
