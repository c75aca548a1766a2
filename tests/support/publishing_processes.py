"""Processes of one run that only publish, each with its own directory; process 0 follows its standard input.

    python publishing_processes.py INDEX COUNT COORDINATOR STORE HOST DIRECTORY HEARTBEAT_S

Each line is the share of the parameters to change before the next version. Process 0 answers with
DIRECTORY/answers/NUMBER.json: where the version is, or why there is none. It also gathers the whole tensors and writes
their bits to DIRECTORY/truth/NUMBER.npz.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from rljax.distributed.acts import Shared, follow, together
from rljax.distributed.processes import start_processes
from rljax.errors import NotWrittenError
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.model import param_shardings
from rljax.rollout.build import policy_functions
from rljax.rollout.types import RolloutConfig
from rljax.run.acts import SharedPublish
from rljax.sharding import MeshConfig, make_mesh
from rljax.weights.access import find_key_file
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import bits_of
from rljax.weights.writer import make_part_writer

MODEL = Path(__file__).parents[2] / "configs/toy-base"


@jax.jit
def moved(params, key, share):
    """Returns ``params`` with about this share moved by at least a bit of bfloat16, the same on any mesh."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    chosen = [jax.random.uniform(key, leaf.shape) < share for key, leaf in zip(keys, leaves, strict=True)]
    made = [jnp.where(c, leaf * 1.03125, leaf) for c, leaf in zip(chosen, leaves, strict=True)]
    return jax.tree.unflatten(tree, made)


class Move(Shared):
    name = "move"

    @together
    def move(self, state, number: int, share: float):
        state.params = moved(state.params, jax.random.key(number), share)


def main(index, count, coordinator, store, host, directory, heartbeat_s):
    root = Path(directory)
    publish = PublishConfig(store=store, host=host)
    rollout = RolloutConfig(transfer_dir=str(root / f"process_{index}"))
    with start_processes(count, index, coordinator, heartbeat_s=float(heartbeat_s)) as processes:
        config = read_config(MODEL)
        mesh = make_mesh(MeshConfig())
        params = load_params(MODEL, config, param_shardings(config, mesh))
        functions = policy_functions(config, "bfloat16")
        keys, place = find_key_file(None), {"index": index, "coordinator": processes.coordinator}
        parts = make_part_writer(functions.parts, publish, rollout.transfer_dir, api_key_file=keys, **place)
        policy = SimpleNamespace(params=params, take=lambda made: None)
        policy.state = policy  # which the acts read
        act, move = SharedPublish(processes, functions, parts), Move(processes)
        if index:
            follow(processes, [act, move], policy)
            parts.close()
        else:
            more = {"api_key_file": keys, "writer": act, "anchor_every": 3}
            files = WeightDirectory(publish, rollout.transfer_dir, **more)
            for folder in ("truth", "answers"):
                (root / folder).mkdir()
            for number, line in enumerate(sys.stdin):
                move.move(policy, number, float(line))
                truth = {name: bits_of(array) for name, array in act.tensors(policy.params)}
                np.savez(root / f"truth/{number}.npz", **truth)
                try:
                    version = files.write(policy.params, number, act.checksums(policy.params))
                    told = {"source": version.source, "path": str(version.path), "bytes": version.num_bytes}
                    files.drop_old()
                except NotWrittenError as error:
                    told = {"error": str(error)}
                answer = root / f"answers/{number}.json"
                answer.with_suffix(".new").write_text(json.dumps(told))
                answer.with_suffix(".new").rename(answer)
            files.close()
        processes.end(0)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(int(words[0]), int(words[1]), *words[2:])
