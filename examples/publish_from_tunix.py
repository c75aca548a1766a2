"""Publishes the weights of another JAX trainer to a vLLM server over HTTP, and proves that the server holds them.

    rljax serve vllm MODEL --port 8000                        where the server runs
    python examples/publish_from_tunix.py MODEL URL           for a server elsewhere also --host ADDRESS

MODEL is the Hugging Face directory of a dense Qwen3. The program loads it into tunix, and twice changes all weights and
publishes them. A trainer needs only ``rljax.weights``: in a checkout ``pip install --no-deps .``, and httpx, msgspec,
numba, numpy, starlette, uvicorn, xxhash and zstandard. For another trainer replace ``NAMES`` and ``tunix_arrays``.

The server's machine pulls the weights at --host, a private address of this machine. Between two machines both sides
need the key in the file that RLJAX_API_KEY_FILE names.
"""

import argparse
import contextlib
import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import ml_dtypes  # noqa: F401  (with it numpy knows bfloat16)
import numpy as np

from rljax.weights.access import find_client_key_file, find_key_file, read_api_key
from rljax.weights.format import PROTOCOL, Checksum
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum, describe_differences, differences

# Names in tunix, names in Hugging Face's files, and the number of axes over which a matrix sums (0: no matrix).
NAMES = (
    (r"embedder\.input_embedding", "model.embed_tokens", 0),
    (r"final_norm\.w", "model.norm", 0),
    (r"lm_head\.w", "lm_head", 1),
    (r"layers\.(\d+)\.(input_layernorm|post_attention_layernorm)\.w", r"model.layers.\1.\2", 0),
    (r"layers\.(\d+)\.attn\.([qk]_norm)\.w", r"model.layers.\1.self_attn.\2", 0),
    (r"layers\.(\d+)\.attn\.([qkv]_proj)\.w", r"model.layers.\1.self_attn.\2", 1),
    (r"layers\.(\d+)\.attn\.o_proj\.w", r"model.layers.\1.self_attn.o_proj", 2),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.kernel", r"model.layers.\1.mlp.\2_proj", 1),
)
SHAPE = {  # the shape's fields in tunix and in config.json
    **{"num_layers": "num_hidden_layers", "vocab_size": "vocab_size", "embed_dim": "hidden_size"},
    **{"hidden_dim": "intermediate_size", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"},
    **{"head_dim": "head_dim", "norm_eps": "rms_norm_eps", "use_tied_embedding": "tie_word_embeddings"},
}


def hf_tensors(arrays, dtype):
    """Yields (Hugging Face name, array) for arrays by their names in tunix. Raises ValueError for an unknown name.

    A matrix of tunix has the axes that it sums over first. Hugging Face has them last, and all heads in one axis.
    """
    for name, array in arrays.items():
        rules = [rule for rule in NAMES if re.fullmatch(rule[0], name)]
        if not rules:
            raise ValueError(f"{name}: expected a parameter of a dense Qwen3 in tunix; add it to NAMES")
        pattern, theirs, axes = rules[0]
        array = np.asarray(array)
        if axes:
            array = array.reshape(np.prod(array.shape[:axes]), -1).T
        yield re.sub(pattern, theirs, name) + ".weight", np.ascontiguousarray(array.astype(dtype))


class Publisher:
    """The versions of a trainer's weights on their way to one server. Close ``files`` at the end."""

    def __init__(self, url, host="127.0.0.1"):
        """Shows the server where versions will be. Raises RuntimeError, with its answer, if it cannot read there."""
        self.url, self.number, key_file = url.rstrip("/"), 0, find_client_key_file(None)
        self.key = {"Authorization": f"Bearer {read_api_key(key_file)}"} if key_file else {}
        self.files = WeightDirectory(PublishConfig(store="http", host=host), api_key_file=find_key_file(None))
        path, text = self.files.probe()
        probe = {"probe_path": str(path), "probe_text": text, "protocol": PROTOCOL, "source": self.files.source}
        self.post("/init_weight_transfer_engine", {"init_info": probe})

    def publish(self, tensors):
        """Makes the server sample from ``tensors``, pairs (Hugging Face name, numpy array) in the server's dtype.

        The server samples while its machine pulls them. It finishes its responses, loads, and shows checksums of what
        it computes with. The first version travels whole, and later ones as their changes.

        Returns the number of proven tensors and of pulled bytes. Raises RuntimeError if the server refuses a step or
        holds other bits; it then stays paused.
        """
        arrays = dict(tensors)
        sums = {name: array_checksum(array) for name, array in arrays.items()}
        version = self.files.write(arrays.items(), self.number, sums)
        self.number += 1
        while None in (pulled := self.ask("rljax_pull", version.path.name)):
            time.sleep(0.1)
        if errors := [answer["error"] for answer in pulled if answer["error"]]:
            raise RuntimeError(f"{self.url} could not pull {version.tag}: {errors[0]}")
        self.post("/pause?mode=wait&clear_cache=true")
        self.post("/start_weight_update")
        self.post("/update_weights", {"update_info": {"path": "", "tag": version.tag}})
        self.post("/finish_weight_update", {"weight_version": version.tag})
        self.post("/reset_prefix_cache")
        workers = self.ask("rljax_checksums")
        if {worker["tag"] for worker in workers} != {version.tag}:
            raise RuntimeError(f"{self.url} has not loaded {version.tag}")
        loaded = [{name: found and Checksum(*found) for name, found in worker["tensors"].items()} for worker in workers]
        if wrong := differences(sums, loaded):
            raise RuntimeError(f"{self.url} does not hold the trainer's weights: {describe_differences(wrong)}")
        self.post("/resume")
        self.files.drop_old()
        return len(sums), max(answer["bytes"] for answer in pulled)

    def ask(self, method, *arguments):
        """Calls a method of rljax's plugin in each worker of the server, and returns their answers."""
        return self.post("/collective_rpc", {"method": method, "args": arguments})["results"]

    def post(self, path, body=None):
        """Sends one request, and returns the JSON of the answer, or {}. Raises RuntimeError if it is refused."""
        headers = {"Content-Type": "application/json", **self.key}
        try:
            request = urllib.request.Request(self.url + path, json.dumps(body or {}).encode(), headers)
            with urllib.request.urlopen(request) as reply:
                return json.loads(reply.read() or b"{}")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self.url}{path}: {error.code} {error.read().decode()[:500]}") from error


def tunix_arrays(directory):
    """Returns the arrays of tunix's Qwen3 by name, float32, with the weights of a Hugging Face directory."""
    import jax
    from flax import nnx
    from tunix.models.qwen3 import model, params

    hf = json.loads(Path(directory, "config.json").read_text())
    theta = hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"]
    shape = model.ModelConfig(rope_theta=theta, **{ours: hf[theirs] for ours, theirs in SHAPE.items()})
    loaded = params.create_model_from_safe_tensors(directory, shape, dtype=jax.numpy.float32)
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(loaded, nnx.Param))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("model", None), ("url", None), ("--host", "127.0.0.1"), ("--dtype", "bfloat16")):
        parser.add_argument(name, default=default)
    options = parser.parse_args()
    publisher, arrays = Publisher(options.url, options.host), tunix_arrays(options.model)
    with contextlib.closing(publisher.files):
        for change in (1.01, 1.0001):  # in place of steps of an optimizer
            arrays, began = {name: array * change for name, array in arrays.items()}, time.monotonic()
            count, pulled = publisher.publish(hf_tensors(arrays, np.dtype(options.dtype)))
            print(f"{count} tensors proven, {pulled} bytes pulled, {time.monotonic() - began:.1f} s")
