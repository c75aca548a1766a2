"""Measures the work of the trainer's host in a step of 1,024 responses, as shares of the modelled step of Qwen3-4B.

    python experiments/bench_host.py --json benchmarks/host_side.json

The lengths are a mix of bench_packing.py with at most 8,192 tokens. The modelled step is the roofline of the update on
8 H100 (benchmarks/compile.json): the compiled products at the cards' peak. A real step is longer, and sampling is not
in it. A part's time is this process's processor time, with all threads and the kernel's work; it is the median over the
rounds. Other programs may run at the same time. The table also has the wall time. "Beside" parts run while other
responses are sampled. The step waits for all other parts, and for the last response to be read and turned into text.
With the likeliest tokens a quarter of the responses is measured, and the times are those of all. ``read`` has them for
a loss that reads them (score centering), ``kept`` for dumps alone.

Cards are not needed. The time to send the packed rows to them is the sum of several parts. The calls of ``place_used``
are measured on eight simulated devices with rows of a few tokens. The copies to the memory that cards read from are
measured as copies to memory that is in use. The time of the links is modelled: bytes over their rate. The step waits
for the sum, though the copies go on beside the calls. Prints a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tokenizers
from bench_packing import COUNT, GROUP, MIXES, responses_of
from bench_top_parse import PROMPT as PROMPT_IDS
from bench_top_parse import make_rows, own_reply

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.data.prompts import DataConfig
from rljax.data.tokenizer import Tokenizer
from rljax.mismatch.histogram import bin_edges
from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.record.writers import Recorder
from rljax.rewards.resolve import resolve_reward, score
from rljax.rollout.build import policy_functions
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import Response, RolloutConfig, SamplingParams, Tops, VersionSpan
from rljax.run.config import Config, RunConfig
from rljax.run.rollout_files import write_rollouts
from rljax.run.sampling import Rollouts, rollout_row, training_sequences
from rljax.run.training import make_pack
from rljax.sharding import MeshConfig, make_mesh, named_sharding, replicated
from rljax.trainer.micro_batches import BATCH_AXES, PARTS, place_batch, place_used
from rljax.trainer.packing import PackedBatch, PackingConfig
from rljax.trainer.update import TrainerValues

ROOT = Path(__file__).parents[1]
COMPILED = "4B, 8 H100"  # the row of benchmarks/compile.json: micro-batches of 8 rows of 9,216 tokens
LAYERS, VOCABULARY = 36, 151_936  # the shape of Qwen3-4B
PROMPT, ROWS, ROW_TOKENS, ROW_KEYS, K, READ_TOKENS = 512, 8, 9216, 150, 20, 8192
CARDS = 8
LINK = 5e10  # bytes a second from the host to one card, over 16 lanes of PCIe 5
FEW = 16  # tokens of a row when only the calls are measured
SMALLER = 4  # with the likeliest tokens, one in four responses is measured
WORDS = 151_643  # tokens of Qwen3's tokenizer without special tokens
EOS = "<|im_end|>"
CASES = {"none": 0, "read": K, "kept": K}
"""The number of likeliest tokens of each position, by their purpose."""
WAITED, BESIDE, ASKED, ON_CPU = "waited for", "beside sampling", "where asked for", "on a CPU, in place of the cards"
LINKS = f"rows sent to {CARDS} cards: links, modelled"
REWARDED = 16  # responses that are scored to time the reward
REWARDS = "rewards of mathematics, in other processes"
LAST = ("replies read and checked", "texts for the rewards")
"""The parts of the last response, for which the step waits once."""


class Part(NamedTuple):
    """A function to time."""

    run: Callable[[], object]
    times: float = 1.0  # the number of its calls in a step
    kind: str = WAITED  # when it runs
    fixed: bool = False  # whether its cost does not depend on the number of responses


def modelled_seconds(micro_batches: int) -> float:
    """Returns the modelled seconds of the update with this number of full micro-batches."""
    roofline = json.loads((ROOT / "benchmarks/compile.json").read_text())[COMPILED]["roofline"]
    return micro_batches * roofline["micro_batch_s"]["total"] + roofline["step_s"]["total"]


def make_tokenizer(rng: np.random.Generator) -> Tokenizer:
    """Makes a byte-level tokenizer with as many tokens as Qwen3's, each of one to seven random letters."""
    vocabulary = {one: place for place, one in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    letters = rng.choice(list("abcdefghijklmnopqrstuvwxyz"), (WORDS * 3, 7))
    lengths, spaced = rng.integers(1, 8, len(letters)), rng.integers(0, 2, len(letters))
    for word, length, space in zip(letters, lengths, spaced, strict=True):
        vocabulary.setdefault("Ġ" * int(space) + "".join(word[:length]), len(vocabulary))
        if len(vocabulary) == WORDS:
            break
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(made, {"eos_token": EOS})


def make_rollouts(rng: np.random.Generator, lengths: Sequence[int], k: int) -> Rollouts:
    """Makes responses in which some tokens are frequent, as in text; ``k`` is the number of likeliest tokens."""
    responses = []
    for i, length in enumerate(lengths):
        ids = np.minimum(rng.zipf(1.2, length), WORDS - 1).astype(np.int32)
        logprobs = -rng.exponential(0.5, length).astype(np.float32)
        tops = None
        if k:
            tops = Tops(ids[:, None] + np.arange(k, dtype=np.int32), logprobs[:, None] - np.arange(k, dtype=np.float32))
        spans = (VersionSpan(0, 0, length),)
        responses.append(Response(*divmod(i, GROUP), ids, logprobs, length == READ_TOKENS, spans, None, tops))
    prompts = [rng.integers(0, WORDS, PROMPT).astype(np.int32) for _ in range(len(lengths) // GROUP)]
    groups = [responses[i : i + GROUP] for i in range(0, len(lengths), GROUP)]
    return Rollouts(prompts, groups, rng.integers(0, 2, (len(groups), GROUP)).astype(np.float32))


def read_part(k: int, tokens: int, longest: int) -> Part:
    """Returns the reading of all replies of rljax's endpoint, timed by one of them with ``longest`` tokens."""
    body = own_reply(make_rows(np.random.default_rng(0), longest), k)
    request = Request(PROMPT_IDS, SamplingParams(longest, reported=k), vocab_size=VOCABULARY)
    wire = VllmBackend()
    return Part(
        lambda: check_completion("", wire.completion(ROLLOUTS, body, request), request, VOCABULARY),
        tokens / longest,
        BESIDE,
    )


def reward_part(tokenizer: Tokenizer, rollouts: Rollouts) -> Part:
    """Returns the scoring of responses by the reward of mathematical answers, timed by some of them."""
    reward = resolve_reward("math")
    chosen = rollouts.all()[:REWARDED]
    texts = [(tokenizer.decode(one.token_ids) + r" \boxed{\frac{1}{2}}", one.truncated) for one in chosen]
    problem = {"prompt": "", "answer": "0.5"}
    tokens = sum(one.length for one in chosen)
    return Part(
        lambda: [score(reward, problem, text, truncated) for text, truncated in texts],
        rollouts.num_tokens / tokens,
        BESIDE,
    )


def publish_part() -> Part:
    """Returns the calls with which a publish begins: the checksums of a policy of as many tensors, all of them small.

    The time of its arithmetic belongs to the devices.
    """
    shape = PolicyConfig(256, 64, 128, LAYERS, 4, 2, 16, tie_word_embeddings=True)
    functions, params = policy_functions(shape, "bfloat16"), init_params(shape, 0)
    return Part(lambda: functions.checksums(params), fixed=True)


def sent_part(array: np.ndarray, used: int) -> np.ndarray:
    """Returns the micro-batches of an array of a batch that ``place_used`` sends to devices, as one view."""
    size = -(-len(array) // PARTS)
    return array[: min(-(-used // size) * size, len(array))]


def sent_bytes(batch: PackedBatch) -> int:
    """Returns the bytes of a batch that travel to all cards together."""
    return sum(sent_part(array, int(batch.used)).nbytes for array in jax.tree.leaves(batch) if array.ndim)


def copy_part(batch: PackedBatch) -> Part:
    """Returns the copies of the rows of each card, part by part, to memory that has been written before."""
    arrays = [sent_part(array, int(batch.used)) for array in jax.tree.leaves(batch) if array.ndim]
    size = -(-len(batch.tokens) // PARTS)
    memory = [np.ones_like(array[:size, 0]) for array in arrays]

    def work() -> None:
        for array, staging in zip(arrays, memory, strict=True):
            for first in range(0, len(array), size):
                for card in range(CARDS):
                    part = array[first : first + size, card]
                    np.copyto(staging[: len(part)], part)

    return Part(work)


def calls_part(batch: PackedBatch) -> Part:
    """Returns the calls that send a batch to all devices of this process, with rows of a few tokens."""
    few = jax.tree.map(lambda array: np.array(array[:, :, :FEW]) if array.ndim else array, batch)
    mesh = make_mesh(MeshConfig())
    where = named_sharding(mesh, BATCH_AXES, few.tokens.shape), replicated(mesh)
    return Part(lambda: jax.block_until_ready(place_used(few, *where)), fixed=True)


class Step(NamedTuple):
    """The step that is measured."""

    parts: dict[str, Part]  # the functions to time
    sent: int  # the bytes that are sent to all cards


def make_step(lengths: Sequence[int], case: str, directory: str) -> Step:
    """Makes the functions to time, for a step of a case of ``CASES``."""
    rng, longest, k = np.random.default_rng(0), max(lengths), CASES[case]
    rollout = {"group_size": GROUP, "max_response_tokens": longest, "top_logprobs": k}
    config = Config(
        run=RunConfig(dir=directory),
        data=DataConfig(batch_size=len(lengths) // GROUP, max_prompt_tokens=PROMPT),
        rollout=RolloutConfig(**rollout),  # type: ignore[arg-type]
        packing=PackingConfig(row_tokens=ROW_TOKENS, rows_per_micro_batch=ROWS),
        correction=CorrectionConfig(score_centering=case == "read"),
    )
    tokenizer, rollouts = make_tokenizer(rng), make_rollouts(rng, lengths, k)
    sequences, pack = training_sequences(rollouts, config, 0), make_pack(config, config.num_sequences)
    batch, mesh = pack(sequences), make_mesh(MeshConfig(1, 1), jax.devices()[:1])
    where = named_sharding(mesh, BATCH_AXES, batch.tokens.shape), replicated(mesh)
    row = {f"mismatch/number_{i}": float(rng.normal()) for i in range(ROW_KEYS)}
    counts = {"mismatch/logprob_abs_diff": rng.integers(0, 9, len(bin_edges()) + 1)}
    recorder, step = Recorder(directory, 10**6, progress=False), iter(range(1, 10**6))
    values = TrainerValues([s.rollout_logprobs for s in sequences])

    def files(**every: int) -> Part:
        asked = Config(run=config.run, rollout=RolloutConfig(**rollout, **every))  # type: ignore[arg-type]
        written = (rollouts, sequences, lambda: values, tokenizer)
        return Part(lambda: write_rollouts(asked, 1, 0, *written), kind=ASKED)

    decode = Part(lambda: [tokenizer.decode(one.token_ids) for one in rollouts.all()], kind=BESIDE)
    parts = {
        LAST[0]: read_part(k, rollouts.num_tokens, longest),
        LAST[1]: decode,
        REWARDS: reward_part(tokenizer, rollouts),
        "advantages and sequences": Part(lambda: (rollout_row(rollouts, 0), training_sequences(rollouts, config, 0))),
        "rows and masks": Part(lambda: pack(sequences)),
        f"rows sent to {CARDS} cards: calls": calls_part(batch),
        f"rows sent to {CARDS} cards: copies": copy_part(batch),
        "rows on a CPU device": Part(lambda: jax.block_until_ready(place_batch(batch, *where)), kind=ON_CPU),
        "the row of the record": Part(lambda: recorder.write({"step": next(step)} | row, counts), fixed=True),
        "the start of a publish": publish_part(),
        "a token dump": files(dump_every=1),
        "a transcript": files(transcript_every=1),
    }
    return Step(parts, sent_bytes(batch))


def time_parts(parts: dict[str, Part], rounds: int) -> dict[str, dict[str, Any]]:
    """Measures the median processor and wall seconds of each part in a step; the parts take turns."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
    for part in parts.values():  # programs compile and libraries are imported at the first call
        part.run()
    for _ in range(rounds):
        for name, part in parts.items():
            start = time.process_time(), time.perf_counter()
            part.run()
            ended = time.process_time(), time.perf_counter()
            samples[name].append((ended[0] - start[0], ended[1] - start[1]))
    found = {}
    for name, part in parts.items():
        cpu, wall = np.median(np.array(samples[name]), axis=0).tolist()
        found[name] = {"processor_s": cpu * part.times, "wall_s": wall * part.times, "calls": part.times}
        found[name] |= {"kind": part.kind, "fixed": part.fixed}
    return found


def measure(mix: str, case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the parts of a step with a mix of lengths, and their sums as shares of the modelled step."""
    lengths = np.minimum(responses_of(mix, np.random.default_rng(0)), options.tokens)[: options.responses]
    measured = lengths[: len(lengths) // SMALLER] if CASES[case] else lengths
    scale = float(lengths.sum() / measured.sum())
    with tempfile.TemporaryDirectory() as directory:
        step = make_step(measured.tolist(), case, directory)
        parts = time_parts(step.parts, options.rounds)
    seconds = step.sent / CARDS / LINK
    parts[LINKS] = {"processor_s": seconds, "wall_s": seconds, "calls": 1.0, "kind": WAITED, "fixed": False}
    for part in parts.values():
        for name in () if part["fixed"] else ("processor_s", "wall_s"):
            part[name] *= scale
    tokens = int(lengths.sum())
    step_s = modelled_seconds(math.ceil((tokens + PROMPT * len(lengths)) / (ROWS * ROW_TOKENS)))
    waited = sum(one["processor_s"] for one in parts.values() if one["kind"] == WAITED)
    # The last response to end is one of the longest.
    last = sum(parts[name]["processor_s"] for name in LAST) * int(lengths.max()) / tokens
    elsewhere = (REWARDS, LINKS)
    every = sum(
        one["processor_s"] for name, one in parts.items() if one["kind"] in (WAITED, BESIDE) and name not in elsewhere
    )
    sums = {"the step waits for": waited + last, "this process works in all": every}
    for one in parts.values():
        one["share"] = one["processor_s"] / step_s
    shares = {name: seconds / step_s for name, seconds in sums.items()}
    found = {"mix": mix, "case": case, "k": CASES[case], "tokens": tokens, "sent_bytes": round(step.sent * scale)}
    return found | {"modelled_step_s": step_s, "parts": parts, "shares": shares}


def show(case: dict[str, Any]) -> None:
    """Prints the table of one case."""
    print(
        f"\n{case['mix']}, k = {case['k']} ({case['case']}), {case['sent_bytes'] / 1e6:.0f} MB to the cards\n\n"
        f"| part | | processor ms | wall ms | % of {case['modelled_step_s']:.1f} s |"
    )
    print("|---|---|---|---|---|")
    for name, one in case["parts"].items():
        times = f"{one['processor_s'] * 1e3:.1f} | {one['wall_s'] * 1e3:.1f}"
        print(f"| {name} | {one['kind']} | {times} | {one['share']:.2%} |")
    for name, share in case["shares"].items():
        print(f"| {name} | | {share * case['modelled_step_s'] * 1e3:.1f} | | {share:.2%} |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=COUNT, help=f"responses of a step, a multiple of {GROUP}")
    parser.add_argument("--tokens", type=int, default=READ_TOKENS, help="most tokens of a response")
    parser.add_argument("--mix", nargs="+", default=["after the surge, mean 3,500"], choices=tuple(MIXES))
    parser.add_argument("--case", nargs="+", default=[*CASES], choices=CASES, help="what the likeliest tokens are for")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each part")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    cases = []
    for mix, case in itertools.product(options.mix, options.case):
        cases.append(measure(mix, case, options))
        show(cases[-1])
    if options.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, shared"
        result = {"command": shlex.join(["python", *sys.argv]), "machine": machine, "cases": cases}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", CARDS)
    main()
