"""Measures the mismatch of two ways to compute adapters: merged into the weights, or as separate products.

    python experiments/lora_forms.py --run runs/lora [--serve true]

RUN is a run with ``lora``. Its policy samples responses to toy problems, and the same tokens are scored in the run's
compute dtype. The trainer merges the adapters into the weights. vLLM's own LoRA computes separate products: it rounds
the adapters to 16 bits, rounds their product, and adds it to the rounded product of the weight. ``--serve true`` also
scores with two vLLM servers, one with the merged weights, and one with ``--enable-lora`` and
``/v1/load_lora_adapter``. Prints a Markdown table.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from rljax.data.encoding import prompt_ids
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import addition_problems
from rljax.errors import caller_errors, run_cli
from rljax.evaluate import find_policy
from rljax.mismatch import mismatch_metrics
from rljax.policy.config import PolicyConfig
from rljax.policy.families import FAMILIES, QWEN3
from rljax.policy.hf import save_params
from rljax.policy.layers import MLP, Attention, Block, linear, param
from rljax.policy.lora import LoraConfig
from rljax.policy.model import Params, cast_params
from rljax.policy.peft import save_adapters
from rljax.policy.score import make_scorer
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.servers.vllm.server import ServerConfig, start, vllm_python
from rljax.rollout.types import SamplingParams
from rljax.run.config_file import load_config
from rljax.sharding import MeshConfig, make_mesh

APART = "qwen3_with_adapters"
Scored = list[np.ndarray]


@dataclass(frozen=True)
class Arguments:
    """The options of the program."""

    run: str = "runs/lora"
    """The run directory, with adapters on a dense Qwen3."""
    problems: int = 64
    """The number of prompts, from the toy task's eval split."""
    group_size: int = 8
    """The number of responses to each prompt."""
    serve: bool = False
    """Whether to start two vLLM servers, too (``launch/install_vllm.sh``)."""
    seed: int = 0
    """The seed of the samples."""


# ---- adapters beside the weights -------------------------------------------------------------------------------------


def beside(spec: str, x: Any, weight: Any, a: Any, b: Any) -> Any:
    """Computes x W + round(x A) B with the rounding of vLLM's LoRA in torch; ``b`` must be scaled before."""
    inside = "btr"
    into, back = (f"{part},{rest}" for part, rest in _specs(spec, inside))
    shrunk = jnp.einsum(into, x, a, preferred_element_type=jnp.float32).astype(x.dtype)
    grown = jnp.einsum(back, shrunk, b, preferred_element_type=jnp.float32).astype(x.dtype)
    return linear((spec,), x, (weight,))[0] + grown


def _specs(spec: str, inside: str) -> Iterator[tuple[str, str]]:
    """Splits ``bthk,hkd->btd`` into (``bthk``, ``hkr->btr``) and (``btr``, ``rd->btd``)."""
    x, _, rest = spec.partition(",")
    weight, _, out = rest.partition("->")
    ins = "".join(letter for letter in weight if letter in x)
    yield x, f"{ins}r->{inside}"
    yield inside, f"r{weight.removeprefix(ins)}->{out}"


def adapters_of(rngs: nnx.Rngs, shape: tuple[int, ...], rank: int, inputs: int) -> dict[str, Any]:
    """Declares a and b for a weight of this shape; no checkpoint has them."""
    zeros = functools.partial(param, rngs, init=nnx.initializers.zeros, name="none")
    a, b = (*shape[:inputs], rank), (rank, *shape[inputs:])
    return {"a": zeros(shape=a, logical=("rank",) * len(a)), "b": zeros(shape=b, logical=("rank",) * len(b))}


class AttentionBeside(Attention):
    """Attention whose four layers have adapters as separate products."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs, rank: int):
        super().__init__(c, rngs, norms=True)
        for name, inputs in (("query", 1), ("key", 1), ("value", 1), ("output", 2)):
            for part, leaf in adapters_of(rngs, getattr(self, name)[...].shape, rank, inputs).items():
                setattr(self, f"{name}_{part}", leaf)

    def __call__(self, x: Any, rotate: Any, attention_fn: Any) -> Any:
        """Computes attention with the adapters' products added."""
        q = beside("btd,dhk->bthk", x, self.query[...], self.query_a[...], self.query_b[...])
        k = beside("btd,dgk->btgk", x, self.key[...], self.key_a[...], self.key_b[...])
        v = beside("btd,dgk->btgk", x, self.value[...], self.value_a[...], self.value_b[...])
        q, k = self.query_norm(q), self.key_norm(k)
        mixed, carry = attention_fn(rotate(q), rotate(k), v)
        return beside("bthk,hkd->btd", mixed, self.output[...], self.output_a[...], self.output_b[...]), carry


class MLPBeside(MLP):
    """SwiGLU whose three layers have adapters as separate products."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs, rank: int):
        super().__init__(c, rngs)
        for name in ("gate", "up", "down"):
            for part, leaf in adapters_of(rngs, getattr(self, name)[...].shape, rank, 1).items():
                setattr(self, f"{name}_{part}", leaf)

    def __call__(self, x: Any, routing: Any) -> Any:
        """Computes the MLP with the adapters' products added."""
        gate = beside("btd,df->btf", x, self.gate[...], self.gate_a[...], self.gate_b[...])
        up = beside("btd,df->btf", x, self.up[...], self.up_a[...], self.up_b[...])
        product = nnx.silu(gate) * up
        inside = jnp.max(jnp.abs(product), axis=1).astype(jnp.float32)
        return beside("btf,fd->btd", product, self.down[...], self.down_a[...], self.down_b[...]), inside, None


def params_beside(base: Params, adapters: Params, lora: LoraConfig, dtype: Any) -> Params:
    """Returns the policy's pytree with separate adapters, rounded as vLLM rounds them when it loads them."""
    flat = flatten_dict(cast_params(base, dtype))
    for path, leaf in flatten_dict(adapters).items():
        rounded = leaf.astype(dtype)
        flat[*path[:-2], f"{path[-2]}_{path[-1]}"] = rounded if path[-1] == "a" else rounded * lora.scale
    return unflatten_dict(flat)


# ---- servers ---------------------------------------------------------------------------------------------------------


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        text = reply.read()
    return json.loads(text) if text[:1] in (b"{", b"[") else text


def score_served(url: str, model: str, sequences: Sequence[np.ndarray]) -> Scored:
    """Returns the log-probabilities of whole sequences from a server's ``prompt_logprobs``, 0 at the first token."""
    vectors = []
    for sequence in sequences:
        body = {"model": model, "prompt": sequence.tolist(), "max_tokens": 1, "prompt_logprobs": 0}
        (choice,) = post(f"{url}/v1/completions", body)["choices"]
        pairs = zip(sequence[1:], choice["prompt_logprobs"][1:], strict=True)
        vectors.append(np.float32([0.0, *(scores[str(token)]["logprob"] for token, scores in pairs)]))
    return vectors


@contextlib.contextmanager
def served(model: Path, dtype: Any, *arguments: str) -> Iterator[str]:
    """Starts a vLLM server of ``model`` and yields its URL."""
    python = str(vllm_python())
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    config = ServerConfig(
        str(model), python, dtype, max_model_len=512, extra_args=arguments, extra_env=allowed, log_path=model / "log"
    )
    with contextlib.ExitStack() as stack:
        server = start(config, timeout_s=480)
        stack.callback(server.stop)
        yield server.url


# ---- the table -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Prints the table and returns the exit status."""
    arguments = load_config(Arguments, argv, prog="experiments/lora_forms.py", description=__doc__ or "")
    with caller_errors():
        policy = find_policy(arguments.run)
        settings, mesh = policy.settings(), make_mesh(MeshConfig(1, 1))
        lora, dtype = settings.lora, settings.precision.compute_dtype
        adapters, merged = policy.load_trained(mesh), policy.load(mesh)
        base = replace(policy, run=None).load(mesh)
        tokenizer = load_tokenizer(policy.hf_path)
    config = policy.config
    sequences, prompts, of_engine = sample(merged, config, dtype, tokenizer, arguments)

    beside_config = replace(config, family=APART)
    FAMILIES[APART] = replace(
        QWEN3,
        model_type=APART,
        block=lambda c, rngs: Block(c, rngs, AttentionBeside(c, rngs, lora.rank), MLPBeside(c, rngs, lora.rank)),
    )
    scored = {
        "embedded engine, merged": of_engine,
        "trainer, merged": make_scorer(config, dtype)(merged, sequences),
        "trainer, apart": make_scorer(beside_config, dtype)(params_beside(base, adapters, lora, dtype), sequences),
    }
    if arguments.serve:
        with tempfile.TemporaryDirectory() as folder:
            scored |= score_by_servers(Path(folder), policy, merged, base, adapters, lora, dtype, sequences)
    tokens = sum(map(len, sequences)) - sum(prompts)
    print(f"\n{len(sequences)} responses, {tokens:,} tokens, {dtype}, rank {lora.rank}\n")
    print("| one | other | mean abs. difference (nats) | 99.9% | largest | k3_kl |\n|---|---|---|---|---|---|")
    for (one, a), (other, b) in itertools.combinations(scored.items(), 2):
        metrics = mismatch_metrics(*padded(a, b, prompts))
        names = ("logprob_abs_diff_mean", "logprob_abs_diff_p999", "logprob_abs_diff_max", "k3_kl")
        print(f"| {one} | {other} | " + " | ".join(f"{metrics[name]:.2e}" for name in names) + " |")
    return 0


def sample(
    merged: Params, config: PolicyConfig, dtype: Any, tokenizer: Any, arguments: Arguments
) -> tuple[list[np.ndarray], list[int], Scored]:
    """Returns the sampled sequences, the lengths of their prompts, and the engine's log-probabilities."""
    problems = addition_problems("eval", arguments.problems)
    texts = [np.asarray(prompt_ids(problem, tokenizer), np.int32) for problem in problems]
    engine = JaxEngine(config, dtype, max(map(len, texts)), mesh=make_mesh(MeshConfig(1, 1)))
    engine.publish(merged, 0)
    sampling = SamplingParams(36, 1.0, (tokenizer.eos_token_id,))
    drawn = list(engine.generate(texts, arguments.group_size, sampling, seed=arguments.seed))
    prompts = [texts[one.prompt_index] for one in drawn]
    sequences = [np.concatenate([prompt, one.token_ids]) for prompt, one in zip(prompts, drawn, strict=True)]
    scored = [np.pad(one.logprobs, (len(prompt), 0)) for prompt, one in zip(prompts, drawn, strict=True)]
    return sequences, [len(prompt) for prompt in prompts], scored


def score_by_servers(
    folder: Path,
    policy: Any,
    merged: Params,
    base: Params,
    adapters: Params,
    lora: LoraConfig,
    dtype: Any,
    sequences: Sequence[np.ndarray],
) -> dict[str, Scored]:
    """Scores the sequences with a server of the merged weights, and with a server that uses vLLM's own LoRA."""
    save_params(folder / "merged", merged, policy.config, dtype, side_files_from=policy.hf_path)
    save_params(folder / "base", base, policy.config, dtype, side_files_from=policy.hf_path)
    save_adapters(folder / "adapter", adapters, policy.config, lora, folder / "base")
    scored = {}
    with served(folder / "merged", dtype) as url:
        scored["vLLM, merged"] = score_served(url, "policy", sequences)
    largest = str(max(8, lora.rank))
    with served(folder / "base", dtype, "--enable-lora", "--max-lora-rank", largest) as url:
        post(f"{url}/v1/load_lora_adapter", {"lora_name": "adapter", "lora_path": str(folder / "adapter")})
        scored["vLLM, its own LoRA"] = score_served(url, "adapter", sequences)
    return scored


def padded(one: Scored, other: Scored, prompts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pads both to [b, t], and returns them with the mask of response tokens."""
    width = max(map(len, one))
    arrays = [np.stack([np.pad(row, (0, width - len(row))) for row in scored]) for scored in (one, other)]
    lengths, index = np.array([len(row) for row in one])[:, None], np.arange(width)[None]
    return arrays[0], arrays[1], (index >= np.array(prompts)[:, None]) & (index < lengths)


if __name__ == "__main__":
    sys.exit(run_cli(main))
