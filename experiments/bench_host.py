"""Measures the work of the trainer's host in a step of 1,024 responses of 8,192 tokens, as shares of a modelled step.

    python experiments/bench_host.py --json benchmarks/host_side.json

The modelled step is as fast as possible: rollouts cost nothing, and the update needs 6 N floating-point operations per
token, without attention, at 40% of the dense bfloat16 peak of 8 H100. N is the number of parameters of Qwen3-4B. The
modelled step does not run here. A part's time is the median over the rounds of this process's processor time, with all
threads and the kernel's work, because other programs may run at the same time. The table also has the wall time.
Putting arrays on devices is not counted. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

from rljax.data.prompts import DataConfig
from rljax.data.tokenizer import Tokenizer
from rljax.mismatch.histogram import bin_edges
from rljax.policy.config import PolicyConfig
from rljax.policy.model import abstract_params
from rljax.record.writers import Recorder
from rljax.rollout.servers.vllm.client import GENERATE, VllmBackend
from rljax.rollout.servers.wire import Request, check_completion
from rljax.rollout.types import Response, RolloutConfig, SamplingParams, VersionSpan
from rljax.run.config import Config, RunConfig
from rljax.run.rollout_files import write_rollouts
from rljax.run.sampling import Rollouts, rollout_row, training_sequences
from rljax.run.training import make_pack
from rljax.trainer.packing import PackingConfig, TrainSequence, unpack
from rljax.trainer.update import TrainerValues

QWEN3_4B = PolicyConfig(151936, 2560, 9728, 36, 32, 8, 128, tie_word_embeddings=True)
PEAK, UTILISATION, DEVICES = 989.4e12, 0.4, 8  # dense bfloat16 operations per second of an H100 SXM
PROMPT, GROUP, ROW_KEYS = 512, 16, 150
VOCABULARY = 151643  # tokens of Qwen3's tokenizer without special tokens
EOS = "<|im_end|>"


def modelled_seconds(tokens: int) -> float:
    """Returns the modelled seconds of the update of one step."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(QWEN3_4B)))
    return 6 * parameters * tokens / (PEAK * UTILISATION * DEVICES)


def make_tokenizer(rng: np.random.Generator) -> Tokenizer:
    """Makes a byte-level tokenizer with as many tokens as Qwen3's, each of one to seven random letters."""
    vocabulary = {one: place for place, one in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    letters = rng.choice(list("abcdefghijklmnopqrstuvwxyz"), (VOCABULARY * 3, 7))
    lengths, spaced = rng.integers(1, 8, len(letters)), rng.integers(0, 2, len(letters))
    for word, length, space in zip(letters, lengths, spaced, strict=True):
        vocabulary.setdefault("Ġ" * int(space) + "".join(word[:length]), len(vocabulary))
        if len(vocabulary) == VOCABULARY:
            break
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(made, {"eos_token": EOS})


def reply_body(tokens: np.ndarray, logprobs: np.ndarray) -> bytes:
    """Returns a reply as vLLM sends it from ``/inference/v1/generate`` with ``logprobs`` 0."""
    pairs = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    content = [{"token_id": t, "logprob": x, "rank": 1, "top_logprobs": []} for t, x in pairs]
    spans = [{"version": "v1", "start": 0, "end": len(tokens)}]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "length", "token_ids": tokens.tolist()}
    reply = {"request_id": "generate-0", "choices": [choice | {"weight_versions": spans}], "prompt_logprobs": None}
    return json.dumps(reply, separators=(",", ":")).encode()


def make_rollouts(rng: np.random.Generator, count: int, length: int) -> Rollouts:
    """Makes responses of one length, in which some tokens are frequent, as in text."""
    spans = (VersionSpan(0, 0, length),)
    responses = [
        Response(
            *divmod(i, GROUP),
            np.minimum(rng.zipf(1.2, length), VOCABULARY - 1).astype(np.int32),
            -rng.exponential(0.5, length).astype(np.float32),
            True,
            spans,
        )
        for i in range(count)
    ]
    prompts = [rng.integers(0, VOCABULARY, PROMPT).astype(np.int32) for _ in range(count // GROUP)]
    groups = [responses[i : i + GROUP] for i in range(0, count, GROUP)]
    return Rollouts(prompts, groups, rng.integers(0, 2, (len(groups), GROUP)).astype(np.float32))


Part = Callable[[], object]


def make_parts(options: argparse.Namespace, directory: str) -> tuple[dict[str, Part], int]:
    """Returns the functions to time by name, and the number of replies in a step."""
    rng = np.random.default_rng(0)
    config = Config(
        run=RunConfig(dir=directory),
        data=DataConfig(batch_size=options.responses // GROUP, max_prompt_tokens=PROMPT),
        rollout=RolloutConfig(group_size=GROUP, max_response_tokens=options.tokens),
        packing=PackingConfig(rows_per_micro_batch=16),
    )
    tokenizer = make_tokenizer(rng)
    rollouts = make_rollouts(rng, options.responses, options.tokens)
    first = rollouts.all()[0]
    body, wire = reply_body(first.token_ids, first.logprobs), VllmBackend()
    request = Request(rollouts.prompts[0], SamplingParams(options.tokens))
    sequences = training_sequences(rollouts, config, 0)
    pack = make_pack(config, config.num_sequences)
    batch = pack(sequences)
    row = {f"mismatch/number_{i}": float(rng.normal()) for i in range(ROW_KEYS)}
    counts = {"mismatch/logprob_abs_diff": rng.integers(0, 9, len(bin_edges()) + 1)}
    recorder, step = Recorder(directory, 10**6, progress=False), iter(range(1, 10**6))

    def files(of_sequences: list[TrainSequence], **every: int) -> Part:
        rollout = RolloutConfig(group_size=GROUP, max_response_tokens=options.tokens, **every)  # type: ignore[arg-type]
        asked = Config(run=config.run, rollout=rollout)
        logprobs = [s.rollout_logprobs for s in of_sequences]
        return lambda: write_rollouts(asked, 1, 0, rollouts, of_sequences, lambda: TrainerValues(logprobs), tokenizer)

    parts: dict[str, Part] = {
        "a reply read and checked": lambda: check_completion(
            "", wire.completion(GENERATE, body, request), request, QWEN3_4B.vocab_size
        ),
        "a reply by json.loads alone": lambda: json.loads(body),
        "texts for the rewards": lambda: [tokenizer.decode(one.token_ids) for one in rollouts.all()],
        "advantages and sequences": lambda: (rollout_row(rollouts, 0), training_sequences(rollouts, config, 0)),
        "rows and masks": lambda: pack(sequences),
        "the row of the record": lambda: recorder.write({"step": next(step)} | row, counts),
        "log-probabilities by response": lambda: unpack(batch.rollout_logprobs, batch, sequences),
        "a token dump": files(sequences, dump_every=1),
        "a transcript": files(sequences, transcript_every=1),
    }
    return parts, options.responses


def time_parts(parts: dict[str, Part], rounds: int) -> dict[str, dict[str, float]]:
    """Measures the median processor and wall seconds of each part; the parts take turns."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            repeats = 32 if name.startswith("a reply") else 1
            start = time.process_time(), time.perf_counter()
            for _ in range(repeats):
                part()
            ended = time.process_time(), time.perf_counter()
            samples[name].append(((ended[0] - start[0]) / repeats, (ended[1] - start[1]) / repeats))
    medians = {name: np.median(np.array(times), axis=0).tolist() for name, times in samples.items()}
    return {name: {"processor_s": cpu, "wall_s": wall} for name, (cpu, wall) in medians.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=1024, help=f"responses of a step, a multiple of {GROUP}")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each part")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        parts, replies = make_parts(options, directory)
        timed: dict[str, dict[str, Any]] = time_parts(parts, options.rounds)
    model_s = modelled_seconds(options.responses * (PROMPT + options.tokens))
    for name, times in timed.items():
        times["share"] = times["processor_s"] * (replies if name.startswith("a reply") else 1) / model_s
    every_step = ("texts for the rewards", "advantages and sequences", "rows and masks", "the row of the record")
    sums = {
        "every step": sum(timed[name]["share"] for name in every_step),
        "every step, with the replies": sum(timed[name]["share"] for name in (*every_step, "a reply read and checked")),
    }
    print(f"| part | processor ms | wall ms | % of {model_s:.1f} s |\n|---|---|---|---|")
    for name, times in timed.items():
        print(f"| {name} | {times['processor_s'] * 1e3:.2f} | {times['wall_s'] * 1e3:.2f} | {times['share']:.3%} |")
    for name, share in sums.items():
        print(f"| sum of {name} | | | {share:.3%} |")
    if options.json:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared",
            "modelled_step_s": model_s,
            "share_note": "a share of 'a reply ...' is the share of all replies of a step",
            "parts": timed,
            "shares": sums,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
