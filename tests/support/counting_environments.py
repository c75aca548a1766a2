"""Environments of several turns that count what the policy did, some of which misbehave, and an episode with one."""

import asyncio

from rljax.rollout.episodes.environment import Reply


class Doubling:
    """An environment of the problem's number of turns. Its reply is the length of the turn, written twice.

    The reward is the number of characters that the policy wrote.
    """

    async def reset(self, problem):
        self.turns, self.seen = int(problem["answer"]), []
        return problem.get("opening")

    async def step(self, response, truncated):
        self.seen.append(response)
        await asyncio.sleep(0.001)
        return Reply(str(len(response)) * 2, len(self.seen) >= self.turns)

    async def reward(self):
        return float(sum(map(len, self.seen)))


class Opening(Doubling):
    async def reset(self, problem):
        self.turns, self.seen = 2, []
        return problem["opening"]


class Failing(Doubling):
    """An environment of two turns that fails in the way that the problem's ``kind`` names."""

    async def reset(self, problem):
        self.kind, self.seen, self.turns = problem["kind"], [], 2
        if self.kind == "reset":
            raise ValueError("no such problem")

    async def step(self, response, truncated):
        reply = await super().step(response, truncated)
        if len(self.seen) == 2 and self.kind == "raises":
            raise RuntimeError("the tool shed is locked")
        if len(self.seen) == 2 and self.kind == "hangs":
            await asyncio.sleep(60)
        return reply

    async def reward(self):
        return float("nan") if self.kind == "unscored" else await super().reward()


def play(environment, problem, *turns, truncated=False):
    async def episode():
        assert await environment.reset(problem) is None
        replies = [await environment.step(turn, truncated) for turn in turns]
        return replies, await environment.reward()

    return asyncio.run(episode())
