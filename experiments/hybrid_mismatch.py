"""Splits the mismatch of a hybrid into form, dtype of the state and path. This design was written before any run.

    XLA_FLAGS=--xla_allow_excess_precision=false python experiments/hybrid_mismatch.py jax FILE
    python experiments/hybrid_mismatch.py vllm FILE --widths 256
    python experiments/hybrid_mismatch.py cache FILE.json --widths 256
    python experiments/hybrid_mismatch.py tables FILE

**Subject.** Random Qwen3.5 policies of four blocks (three delta nets, one attention), of width 256 and 512, with seeds
0, 1 and 2: six models. Their heads are slow: A is between 1e-4 and 1e-2, so a head remembers hundreds of tokens.
Weights have the standard deviation 1/sqrt(width), and the head 2.5 times that. Each model gets four sequences of 2,048
random tokens. The first 64 are the prompt, and the other 1,984 are scored.

**Arms.** *Path*: prefill (the sequence at once) or decode (a token at a time, after the prompt), both with the embedded
engine. *Form* of the rule in a prefill: chunked (64 tokens) or recurrent; a decode has only the recurrent one. *State*:
float32, or rounded to bfloat16 wherever it is handed on: after each token, and after each chunk. That makes six arms.
The model computes in bfloat16, and in a second part in float32 (prefill only), which shows the rounding of the state
alone. The surroundings are the same in all arms: the rule is between barriers, XLA keeps every rounding to bfloat16
(the flag), and the head is float32. The arm *control* has another program with the rule's bits; its gap must be 0.

*vllm*: a real vLLM on a CPU with the models of width 256 in bfloat16, started once with each dtype of the state. Its
decode of the same tokens is compared with its own prefill.

*cache*: on a CPU a prefix cache needs chunked prefill, which ends the engine at a seeded prompt of 129 tokens. So this
part is greedy and without seeds, and in no test. Each model of width 256 continues two prompts of 700 and two of 1,300
tokens by 256. A server with the cache answers twice, and one without it once. The gaps are those of the second answer
to the first, and of the first to the server without the cache, over the tokens before two answers differ. The first is
expected to be 0: the state that the cache keeps has the dtype of the state in the decode.

**Outcome.** The gap of a token is the absolute difference of two log-probabilities in nats: an arm's, and that of the
reference. The reference is the trainer's form: prefill, chunked, float32 state. For vLLM it is its own prefill. Gaps
are shown by position, in eighths of 256 tokens.

**Tests.** The unit is a model, because sequences of one model share its weights. Primary: the share of the gap that the
state's dtype explains in a decode, 1 - gap(float32)/gap(bfloat16), over all scored tokens. It is given for each model,
with the median and the exact interval of the sign test, which is the range of the six models (97%). The same holds
for the growth of each arm: the gap of the last eighth over the gap of the second one. Gaps by width have a bootstrap
interval (95%) that draws models, and then sequences. Expected: the share is above 0.25 in all models; the gap of a
decode grows with a bfloat16 state and not with a float32 state; the form matters less than the state's dtype.
All models count. A failed run is repeated with the same seed, and no arm is added to the tests after a look.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
from peer_steps import Case, policy_of
from real_gaps import k3, median_interval

from rljax.compare.scorers import score_column
from rljax.errors import ConfigError, run_cli
from rljax.policy import delta_net
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.model import Params, init_params
from rljax.record.token_dumps import make_dump
from rljax.rollout.embedded import JaxEngine, make_functions
from rljax.rollout.servers.process import environment_python
from rljax.rollout.servers.vllm import server as vllm
from rljax.sharding import MeshConfig, make_mesh

WIDTHS, SEEDS, SEQUENCES, TOKENS, PROMPT, PIECE = (256, 512), (0, 1, 2), 4, 2048, 64, 256
STATES = ("float32", "bfloat16")
REFERENCE = ("prefill", "chunked", "float32")
ARMS = [
    REFERENCE,
    ("prefill", "control", "float32"),
    ("prefill", "chunked", "bfloat16"),
    *(("prefill", "recurrent", state) for state in STATES),
    *(("decode", "recurrent", state) for state in STATES),
]
FLAG = "xla_allow_excess_precision=false"
Vectors = list[np.ndarray]  # the log-probabilities of the scored tokens of each sequence, float32 [TOKENS - PROMPT]
Rule = Callable[[delta_net.DeltaTokens, jax.Array], tuple[jax.Array, jax.Array]]


def config_of(width: int) -> PolicyConfig:
    policy = policy_of(Case(width, vocab=1024, value_heads=width // 64))
    return dataclasses.replace(policy, initializer_range=width**-0.5, tie_word_embeddings=False)


def params_of(width: int, seed: int) -> Params:
    params = init_params(config_of(width), seed)
    return params | {"lm_head": 2.5 * params["lm_head"]}


def tokens_of(seed: int) -> list[np.ndarray]:
    return [*np.random.default_rng(seed).integers(0, 1024, (SEQUENCES, TOKENS)).astype(np.int32)]


def rule_of(form: str, state_dtype: str) -> Rule:
    """Returns the rule in a form, between barriers. It rounds the state wherever the form hands it on."""
    rule, size = (delta_net.recurrent, 1) if form == "recurrent" else (delta_net.chunked, delta_net.CHUNK)
    kept = jnp.finfo(state_dtype)

    def run(tokens: delta_net.DeltaTokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, state = jax.lax.optimization_barrier((tokens, state))
        b, t = tokens.starts.shape
        pieces = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(b, t // size, size, *x.shape[2:]), 1, 0), tokens)

        def step(state: jax.Array, piece: delta_net.DeltaTokens) -> tuple[jax.Array, jax.Array]:
            y, state = rule(piece, state)
            return jax.lax.reduce_precision(state, kept.nexp, kept.nmant), y

        state, y = jax.lax.scan(step, state, pieces)
        y = jnp.moveaxis(y, 0, 1).reshape(b, t, *y.shape[3:])
        if form == "control":
            y = y * (1.0 + 0.0 * jnp.sum(state))  # times 1, which the compiler cannot know
        return jax.lax.optimization_barrier((y, state))

    return run


@contextlib.contextmanager
def ruled(form: str, state_dtype: str) -> Iterator[None]:
    """Replaces the rule in engines that are made and first used in the block."""
    rules = {"recurrent": rule_of("recurrent", state_dtype), "chunked": rule_of(form, state_dtype)}
    make_functions.cache_clear()
    with mock.patch.multiple(delta_net, **rules):
        yield


def arm_scores(arm: tuple[str, str, str], width: int, dtype: str) -> dict[int, Vectors]:
    """Returns the log-probabilities of an arm by seed. The seeds share a compilation."""
    path, form, state_dtype = arm
    found = {}
    with ruled("chunked" if path == "decode" else form, state_dtype):
        longest = TOKENS if path == "prefill" else PROMPT
        mesh = make_mesh(MeshConfig(1, 1))
        engine = JaxEngine(config_of(width), jnp.dtype(dtype), longest, mesh=mesh, lm_head_dtype=jnp.float32)
        for seed in SEEDS:
            engine.publish(params_of(width, seed), 0)
            sequences = tokens_of(seed)
            if path == "prefill":
                found[seed] = [engine.score_prefill([ids])[0][PROMPT - 1 :] for ids in sequences]
            else:
                found[seed] = engine.score([x[:PROMPT] for x in sequences], [x[PROMPT:] for x in sequences])
    return found


def served_scores(width: int, seed: int, state_dtype: str) -> dict[str, Vectors]:
    """Returns the log-probabilities of a new vLLM server, of its prefill and of its decode."""
    sequences, names = tokens_of(seed), [str(i) for i in range(SEQUENCES)]
    mask = np.arange(TOKENS) >= PROMPT
    dump = make_dump(names, sequences, [mask] * SEQUENCES, {})
    with tempfile.TemporaryDirectory() as directory:
        save_params(directory, params_of(width, seed), config_of(width), jnp.bfloat16)
        python, extra = str(environment_python("vllm")), ["--mamba-ssm-cache-dtype", state_dtype]
        serving = vllm.VllmConfig(directory, python, "bfloat16", max_model_len=TOKENS + 1, extra_args=extra)
        with vllm.start(serving) as process:
            scored = {
                path: score_column(f"{kind}:{process.url}", dump, batch_size=SEQUENCES)[0]
                for path, kind in (("prefill", "vllm"), ("decode", "vllm-decode"))
            }
    return {path: [vector[mask] for vector in vectors] for path, vectors in scored.items()}


def greedy_answers(config: vllm.VllmConfig, prompts: Sequence[np.ndarray], times: int) -> list[list[dict[str, Any]]]:
    """Returns a new server's answer to each prompt, each time: ids, log-probabilities and cached prompt tokens."""

    def answer(url: str, ids: np.ndarray) -> dict[str, Any]:
        asked = {"model": "policy", "prompt": ids.tolist(), "max_tokens": 256, "temperature": 0, "logprobs": 0}
        asked |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=300).raise_for_status().json()
        (choice,) = reply["choices"]
        cached = (reply["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {"ids": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"], "cached": cached}

    with vllm.start(config) as process:
        return [[answer(process.url, ids) for ids in prompts] for _ in range(times)]


def cache_rows(width: int, seed: int, state_dtype: str) -> list[dict[str, Any]]:
    """Returns a row for each prompt: its cached tokens, and the gaps that the prefix cache makes."""
    prompts = [ids[:n] for n, ids in zip((700, 700, 1300, 1300), tokens_of(seed), strict=True)]
    with tempfile.TemporaryDirectory() as directory:
        save_params(directory, params_of(width, seed), config_of(width), jnp.bfloat16)
        extra = ["--mamba-ssm-cache-dtype", state_dtype, "--enable-prompt-tokens-details"]
        plain = vllm.VllmConfig(directory, str(environment_python("vllm")), "bfloat16", max_model_len=TOKENS)
        cached = [*extra, "--enable-prefix-caching", "--enable-chunked-prefill"]
        first, second = greedy_answers(dataclasses.replace(plain, extra_args=cached), prompts, 2)
        (without,) = greedy_answers(dataclasses.replace(plain, extra_args=extra), prompts, 1)
    rows = []
    for ids, one, two, other in zip(prompts, first, second, without, strict=True):
        row = {"width": width, "seed": seed, "state": state_dtype, "prompt": len(ids)}
        row |= {"cached": [one["cached"], two["cached"]]}
        for name, (a, b) in {"second to first": (two, one), "first to none": (one, other)}.items():
            common = next((i for i, pair in enumerate(zip(a["ids"], b["ids"], strict=True)) if len({*pair}) > 1), 256)
            apart = np.subtract(a["logprobs"][:common], b["logprobs"][:common])
            row[name] = {"tokens": common, "gap": float(np.abs(apart).mean()) if common else None}
        rows.append(row)
    return rows


def rows_of(names: dict[str, Any], scored: Vectors, reference: Vectors) -> list[dict[str, Any]]:
    """Returns a row for each sequence and each piece of 256 positions, with its mean gap, k3 and tokens."""
    rows = []
    for sequence, (own, theirs) in enumerate(zip(scored, reference, strict=True)):
        apart = theirs.astype(np.float64) - own
        for start in range(0, TOKENS, PIECE):
            x = apart[max(start - PROMPT, 0) : start - PROMPT + PIECE]
            numbers = {"gap": np.abs(x).mean(), "k3": k3(x).mean(), "largest": np.abs(x).max()}
            floats = {name: float(value) for name, value in numbers.items()}
            rows.append({**names, "sequence": sequence, "from": start, "tokens": len(x), **floats})
    return rows


def measured(what: str, dtype: str, widths: Sequence[int], seeds: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of each arm of each width, or of each server."""
    names: dict[str, Any] = {"engine": what, "dtype": dtype}
    if what == "vllm":
        for seed, width, state in itertools.product(seeds, widths, STATES):
            scored = served_scores(width, seed, state)
            known = {"width": width, "seed": seed, "path": "decode", "form": "recurrent", "state": state}
            yield rows_of(names | known, scored["decode"], scored["prefill"])
        return
    if FLAG not in os.environ.get("XLA_FLAGS", ""):
        raise ConfigError(f"XLA_FLAGS must have --{FLAG}, so that surroundings round alike")
    arms = [arm for arm in ARMS if dtype == "bfloat16" or arm[0] == "prefill"]
    for width in widths:
        reference: dict[int, Vectors] = {}
        for arm in arms:
            found = arm_scores(arm, width, dtype)
            reference = reference or found
            for seed, scored in found.items():
                known = {"width": width, "seed": seed, **dict(zip(("path", "form", "state"), arm, strict=True))}
                yield rows_of(names | known, scored, reference[seed])


def over_tokens(rows: Sequence[dict[str, Any]], unit: str = "gap") -> float:
    """Returns the mean of ``unit`` over the tokens of the rows."""
    return float(np.average([row[unit] for row in rows], weights=[row["tokens"] for row in rows]))


def bootstrap(rows: Sequence[dict[str, Any]], unit: str = "gap", draws: int = 2000) -> tuple[float, float, float]:
    """Returns the mean of ``unit``, and the ends of its 95% interval: models are drawn, and then sequences."""
    of_sequence: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        of_sequence.setdefault(row["seed"], {}).setdefault(row["sequence"], []).append(row)
    means = np.array([[over_tokens(each, unit) for each in of_model.values()] for of_model in of_sequence.values()])
    rng = np.random.default_rng(0)
    models = rng.integers(0, len(means), (draws, len(means), 1))
    drawn = means[models, rng.integers(0, means.shape[1], (draws, *means.shape))].mean(axis=(1, 2))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return over_tokens(rows, unit), float(low), float(high)


def tables(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the gaps by position, the growth, and the shares of the state's dtype. Arms without a gap are left out."""
    keys = ("engine", "dtype", "path", "form", "state", "width", "seed")
    of_model: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        of_model.setdefault(tuple(row[key] for key in keys), []).append(row)
    of_model = {key: found for key, found in of_model.items() if over_tokens(found)}
    starts = range(0, TOKENS, PIECE)
    print(f"| {' | '.join(keys[:6])} | all | k3 | {' | '.join(map(str, starts))} |\n|{'---|' * (8 + len(starts))}")
    for arm in sorted({key[:6] for key in of_model}):
        here = [row for key, found in of_model.items() if key[:6] == arm for row in found]
        pieces = [[row for row in here if row["from"] == start] for start in starts]
        numbers = [bootstrap(here), bootstrap(here, "k3"), *map(bootstrap, pieces)]
        cells = ("{:.3g} ({:.3g}-{:.3g})".format(*each) for each in numbers)
        print(f"| {' | '.join(map(str, arm))} | {' | '.join(cells)} |")
    growth: dict[tuple[str, ...], list[float]] = {}
    shares: dict[tuple[str, ...], list[float]] = {}
    for key, found in of_model.items():
        first, last = ([row for row in found if row["from"] == start] for start in (PIECE, TOKENS - PIECE))
        growth.setdefault(key[:5], []).append(over_tokens(last) / over_tokens(first))
        other = of_model.get((*key[:4], "float32", *key[5:]))
        for unit in ("gap", "k3") if key[4] == "bfloat16" and other else ():
            share = 1 - over_tokens(other or (), unit) / over_tokens(found, unit)
            shares.setdefault((*key[:4], unit), []).append(share)
    for name, values in (("growth", growth), ("share of the state's dtype", shares)):
        for key, each in sorted(values.items()):
            said = "{:.3g} ({:.3g} to {:.3g})".format(*median_interval(each)) if len(each) > 5 else "too few models"
            print(f"{name}: {', '.join(key)}: {said}; models: {' '.join(f'{value:.3g}' for value in each)}")


def main(argv: Sequence[str]) -> int:
    """Measures one part and writes its rows, or prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["jax", "vllm", "cache", "tables"])
    parser.add_argument(
        "rows",
        type=Path,
        help="Parquet file to which rows are added after each arm, or the file to show; for cache a JSON file",
    )
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the model (bfloat16)")
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="seeds of the models of vLLM (0 1 2)")
    options = parser.parse_args(argv)
    if options.what == "cache":
        servers = itertools.product(options.widths, options.seeds, STATES)
        answers = [row for server in servers for row in cache_rows(*server)]
        options.rows.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
        print(*answers, sep="\n")
        return 0
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(options.rows).to_pylist() if options.rows.exists() else []
    if options.what == "tables":
        tables(rows)
        return 0
    for some in measured(options.what, options.dtype, options.widths, options.seeds):
        rows += some
        print(*(f"{some[0][key]}" for key in ("path", "form", "state", "width", "seed")), f"{over_tokens(some):.3g}")
        sys.stdout.flush()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), options.rows, compression="zstd")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main, sys.argv[1:]))
