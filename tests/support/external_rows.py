"""Rows of trajectories as another program makes them, for a vocabulary of at least 16 tokens."""

import json


def make_row(group, reward, version=0, tokens=(3, 4, 5), **more):
    """Returns a row of one turn whose tokens all have log-probability -1."""
    row = {
        "group": group,
        "prompt_ids": [1, 2],
        "token_ids": list(tokens),
        "mask": [True] * len(tokens),
        "logprobs": [-1.0] * len(tokens),
        "reward": reward,
        "version": version,
    }
    return row | more


def write_file(path, rows):
    """Writes JSONL as a writer should: first under another name, which it then renames."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.rename(path)
