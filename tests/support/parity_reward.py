"""A reward that short responses earn, too: 1 where the number of letters is odd."""


def reward(problem, response, truncated):
    return float(len(response) % 2)
