"""An episode that a test plays with an environment in its own process."""

import asyncio


def play(environment, problem, *turns, truncated=False):
    """Returns the replies to the turns, and the reward."""

    async def episode():
        assert await environment.reset(problem) is None
        replies = [await environment.step(turn, truncated) for turn in turns]
        return replies, await environment.reward()

    return asyncio.run(episode())
