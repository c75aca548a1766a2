"""Plays the other program of ``rollout.trajectories``: samples the toy task, scores it, and sends rows to a run.

python examples/external_rollouts.py RUN_DIR http://127.0.0.1:PORT    sends groups to the trainer over HTTP
python examples/external_rollouts.py RUN_DIR DIRECTORY                writes files of rows into a directory

It samples with the embedded engine. The weights are those of the newest checkpoint in RUN_DIR, or the model's. With
--server URL it asks a vLLM server instead, to which the run publishes its weights (rollout.engine: vllm). If
RLJAX_API_KEY_FILE names a file, requests bring the key in it.
"""

import argparse
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from rljax.data.prompts import prompt_ids
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import addition_problems
from rljax.evaluate import find_policy
from rljax.rewards.resolve import resolve_reward
from rljax.rollout.build import load_jax_engine
from rljax.rollout.types import Response, SamplingParams
from rljax.sharding import MeshConfig, make_mesh
from rljax.weights.access import find_client_key_file, read_api_key


def rows_of(group, problem, prompt, responses, tokenizer, reward):
    """Returns one row for each response to a problem. Rows with one ``group`` are compared with each other."""
    for response in responses:
        text = tokenizer.decode(response.response)
        yield {
            "group": group,
            "prompt_ids": prompt.tolist(),
            "token_ids": response.response.tolist(),
            "mask": [True] * len(response.response),  # the policy sampled all of them
            "logprobs": response["rollout_logprobs"].tolist(),
            "reward": reward(problem, text, response.truncated),
            "version": response["version"].tolist(),
            "truncated": response.truncated,
        }


def use_newest_policy(run, engine, version, mesh):
    """Gives the engine the newest checkpoint of the run unless it has that ``version``. Returns its version."""
    try:
        policy = find_policy(run)
        if policy.step != version:
            engine.publish(policy.load(mesh), policy.step)
        return policy.step
    except (OSError, ValueError, RuntimeError):
        return version  # There is no checkpoint yet, or it was just deleted.


def ask_server(url, prompts, count, sampling, seed):
    """Returns responses of a vLLM server: token ids, log-probabilities, and the weight version of each part."""

    def ask_one(place):
        number, sample = divmod(place, count)
        settings = {
            "max_tokens": sampling.max_response_tokens,
            **{"temperature": sampling.temperature, "top_p": 1.0, "top_k": 0},
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "seed": seed * 1000 + place,
        }
        body = {"token_ids": prompts[number].tolist(), "sampling_params": settings}
        reply = ask(f"{url}/inference/v1/generate", json.dumps(body).encode(), {"content-type": "application/json"})
        (choice,) = reply["choices"]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        # A run names its versions RUN.NUMBER; "default" are the weights that the server was started with.
        versions = []
        for span in choice["weight_versions"]:
            version = 0 if span["version"] == "default" else int(span["version"].rpartition(".")[2])
            versions += [version] * (span["end"] - span["start"])
        arrays = {"rollout_logprobs": logprobs, "version": versions}
        is_cut = choice["finish_reason"] == "length"
        return Response.of(
            prompts[number], choice["token_ids"], arrays, prompt_index=number, sample_index=sample, truncated=is_cut
        )

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(ask_one, range(len(prompts) * count)))


def ask(url, content=None, headers=None):
    """Returns the trainer's reply, a JSON object, or None if it has no room. Ends if nothing answers for 5 minutes."""
    headers = dict(headers or {})
    if (key_file := find_client_key_file(None)) is not None:
        headers["authorization"] = f"Bearer {read_api_key(key_file)}"
    for _ in range(600):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, content, headers)) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code == 429:
                return None
            if error.code != 503:  # a server is paused while it gets new weights
                raise SystemExit(f"refused: {error.read().decode().strip()}") from error
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"nothing answers at {url}")


def wait_for_room(place, groups):
    """Waits until the trainer has room for so many groups, so that they are sampled with its newest policy."""
    while (told := ask(f"{place}/policy"))["waiting_groups"] + groups > (most := told["max_waiting_groups"]):
        if groups > most:
            raise SystemExit(f"the trainer takes at most {most} groups at once, not {groups}: give --at-once {most}")
        time.sleep(0.1)


def send(place, name, rows):
    """Sends rows to the trainer, again while it has no room, or writes them into a file by a rename."""
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
    parser.add_argument("--server", help="the URL of a vLLM server that samples")
    parser.add_argument("--groups", type=int, default=4096, help="the number of groups to send")
    parser.add_argument("--group-size", type=int, default=8, help="rollout.group_size of the run")
    parser.add_argument("--at-once", type=int, default=16, help="the number of groups that are sampled together")
    wanted = parser.parse_args()
    tokenizer, mesh = load_tokenizer(wanted.model), make_mesh(MeshConfig(1, 1))
    engine = None if wanted.server else load_jax_engine(wanted.model, "bfloat16", 8)
    reward, version = resolve_reward("addition"), 0
    sampling = SamplingParams(36, 1.0, (tokenizer.eos_token_id,))
    problems = addition_problems("train")
    started = f"{time.time_ns():020d}"  # a program that is started again sends under other names
    for first in range(0, wanted.groups, wanted.at_once):
        numbers = range(first, min(first + wanted.at_once, wanted.groups))
        if "://" in wanted.place:
            wait_for_room(wanted.place, len(numbers))
        if engine is not None:
            version = use_newest_policy(wanted.run, engine, version, mesh)
        chosen = [problems[i % len(problems)] for i in numbers]
        prompts = [prompt_ids(problem, tokenizer) for problem in chosen]
        groups = [[] for _ in chosen]
        if engine is None:
            responses = ask_server(wanted.server, prompts, wanted.group_size, sampling, first)
        else:
            responses = engine.generate(prompts, wanted.group_size, sampling, seed=first)
        for response in responses:
            groups[response.prompt_index].append(response)
        rows = []
        for i, (problem, prompt) in enumerate(zip(chosen, prompts, strict=True)):
            rows += rows_of(f"problem {first + i}", problem, prompt, groups[i], tokenizer, reward)
        send(wanted.place, f"{started}-{first:06d}", rows)
        mean = np.mean([row["reward"] for row in rows])
        newest = rows[-1]["version"][-1]
        print(f"sent groups {first} .. {numbers[-1]} of version {newest}, mean reward {mean:.3f}")


if __name__ == "__main__":
    main()
