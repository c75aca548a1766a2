"""Plays the other program of ``rollout.trajectories``: samples the toy task, scores it, and sends rows to a run.

python examples/external_rollouts.py RUN_DIR http://127.0.0.1:PORT    sends groups to the trainer over HTTP
python examples/external_rollouts.py RUN_DIR DIRECTORY                writes files of rows into a directory

It samples with the embedded engine. The weights are those of the newest checkpoint in RUN_DIR, or the model's.
"""

import argparse
import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import addition_problems
from rljax.evaluate import find_policy
from rljax.rewards.resolve import resolve_reward
from rljax.rollout.build import load_jax_engine
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh


def rows_of(group, problem, prompt, responses, version, tokenizer, reward):
    """Returns one row for each response to a problem; rows with one ``group`` are compared with each other."""
    for response in responses:
        text = tokenizer.decode(response.token_ids)
        yield {
            "group": group,
            "prompt_ids": prompt.tolist(),
            "token_ids": response.token_ids.tolist(),
            "mask": [True] * len(response.token_ids),  # the policy sampled all of them
            "logprobs": response.logprobs.tolist(),
            "reward": reward(problem, text, response.truncated),
            "version": version,
            "truncated": response.truncated,
        }


def ask(url, content=None, headers=None):
    """Returns the reply of the trainer, a JSON object; None: it has no room. Ends when no trainer runs for a minute."""
    for _ in range(120):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, content, headers or {})) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code == 429:
                return None
            raise SystemExit(f"refused: {error.read().decode().strip()}") from error
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"nothing answers at {url}")


def wait_for_room(place, groups):
    """Waits until the trainer has room for so many groups, so that they are sampled with its newest policy."""
    while (told := ask(f"{place}/policy"))["waiting_groups"] + groups > told["max_waiting_groups"]:
        time.sleep(0.1)


def send(place, name, rows):
    """Sends rows to the trainer, again while it has no room; or writes them into a file by a rename."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if "://" not in place:
        partial = Path(place) / f"{name}.partial"
        partial.write_text(lines)
        partial.rename(Path(place) / f"{name}.jsonl")
        return
    # A request that is sent again after a lost answer has the same key, so its rows are not used twice.
    headers = {"content-type": "application/jsonl", "idempotency-key": name}
    while ask(f"{place}/trajectories", lines.encode(), headers) is None:
        time.sleep(0.5)


def main():
    """Samples until as many groups as asked for are sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run directory of the trainer")
    parser.add_argument("place", help="the value of rollout.trajectories")
    parser.add_argument("--model", default="configs/toy-base", help="the model that the run starts from")
    parser.add_argument("--groups", type=int, default=4096, help="the number of groups to send")
    parser.add_argument("--group-size", type=int, default=8, help="rollout.group_size of the run")
    parser.add_argument("--at-once", type=int, default=16, help="the number of groups that are sampled together")
    wanted = parser.parse_args()
    tokenizer, mesh = load_tokenizer(wanted.model), make_mesh(MeshConfig(1, 1))
    engine, reward, version = load_jax_engine(wanted.model, "bfloat16", 8), resolve_reward("addition"), 0
    sampling = SamplingParams(36, 1.0, (tokenizer.eos_token_id,))
    problems = addition_problems("train")
    for first in range(0, wanted.groups, wanted.at_once):
        if "://" in wanted.place:
            wait_for_room(wanted.place, wanted.at_once)
        try:
            policy = find_policy(wanted.run)
            if policy.step != version:
                engine.publish(policy.load(mesh), policy.step)
                version = policy.step
        except (OSError, ValueError, RuntimeError):
            pass  # There is no checkpoint yet, or it was just deleted.
        chosen = [problems[i] for i in range(first, first + wanted.at_once)]
        prompts = [tokenizer.encode(problem["prompt"]) for problem in chosen]
        groups = [[] for _ in chosen]
        for response in engine.generate(prompts, wanted.group_size, sampling, seed=first):
            groups[response.prompt_index].append(response)
        rows = []
        for i, (problem, prompt) in enumerate(zip(chosen, prompts, strict=True)):
            rows += rows_of(f"problem {first + i}", problem, prompt, groups[i], version, tokenizer, reward)
        send(wanted.place, f"groups-{first:06d}", rows)
        mean = np.mean([row["reward"] for row in rows])
        print(f"sent groups {first} .. {first + wanted.at_once - 1} of version {version}, mean reward {mean:.3f}")


if __name__ == "__main__":
    main()
