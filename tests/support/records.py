"""Small records for tests: of runs for reports, of tokens, and batches of them."""

import json

import numpy as np

from rljax.record.token_dumps import ColumnSource, make_dump
from rljax.rollout.servers.requests import Completion
from rljax.rollout.types import Response
from rljax.trainer.packing import PackedBatch, TrainSequence

BUCKETS = {"lt_64": (64, 1e-4), "64_to_256": (192, 2e-4), "ge_256": (100, 8e-4)}


def record_row(step, factor=1.0, *, surge=None, period=None):
    """Returns a row whose mismatch is ``factor`` times 1e-3; every second step has an evaluation."""
    surge_step, decay_period = surge if surge and step >= surge else None, period if step >= (surge or 1) else None
    row = {"step": step, "reward/mean": 0.01 * step, "response_length/mean": 7.0 + step}
    row |= {"schedule/learning_rate": 1e-4, "schedule/surge_step": surge_step, "schedule/decay_period": decay_period}
    row |= {"optimizer/grad_norm": 0.5, "policy/entropy": 0.25, "mismatch/log_ppl_abs_diff": 1e-3 * factor}
    for name, (tokens, kl) in BUCKETS.items():
        prefix = f"mismatch_position/{name}/"
        row |= {prefix + "token_count": tokens, prefix + "k3_kl": kl * factor, prefix + "kl": -kl}
    return row | ({"eval/aime24/accuracy": 0.2} if step % 2 == 0 else {})


def study_row(step, reward, surge=None):
    """Returns a row with what the programs of a study read. The surge is called at step ``surge``, if one is given."""
    surge_step = surge if surge and step >= surge else None
    row = {"step": step, "reward/mean": reward, "response_length/mean": 30.0, "mismatch/log_ppl_abs_diff": 0.01}
    row |= {"mismatch/k3_kl": None, "optimizer/grad_norm": 1.0, "optimizer/skipped_updates": 0, "time/step_s": 1.0}
    return row | {"schedule/learning_rate": 1e-4, "schedule/surge_step": surge_step, "is/token_fraction_above": 0.0}


def study_run(last, grad_norm=lambda step: 1.0, steps=100):
    """Returns the rows of a run whose reward is 0.75 up to step 80 and ``last`` after it, with a surge at step 20."""
    return [
        study_row(step, 0.75 if step <= 80 else last, surge=20)
        | {"optimizer/grad_norm": grad_norm(step), "eval/toy/accuracy": 0.5 if step == steps else None}
        for step in range(1, steps + 1)
    ]


def write_record(directory, rows):
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def small_dump():
    """Returns a dump with responses of 1 and 2 tokens whose log-ratios are -0.25, and 0.5 and -1.0."""
    numbers = {"rollout": [[None, -1.0], [None, -1.0, -1.0, None]]}
    numbers["trainer"] = [[None, -1.25], [None, -0.5, -2.0, -1.0]]
    sources = dict.fromkeys(numbers, ColumnSource("jax", "float32", "", 1.0))
    masks = [[False, True], [False, True, True, True]]
    return make_dump(["a", "b"], [[5, 6], [5, 6, 7, 8]], masks, numbers, sources, {})


def full_dump():
    """Returns a dump of responses of 2 and 1 tokens with every kind of column.

    Two likeliest tokens are listed at each. At the last place only one can be sampled.
    """
    numbers, none, nothing = [[None, -0.1, -0.7], [None, None, 0.0]], [-1, -1], [-np.inf, -np.inf]
    columns = {
        "top_ids": [[none, [7, 3], [2, 9]], [none, none, [4, -1]]],
        "top_logprobs": [[nothing, [-0.1, -2.5], [-0.7, -0.8]], [nothing, nothing, [0.0, -np.inf]]],
        "values/advantage": [[None, 1.0, -1.0], [None, None, 0.0]],
    }
    tokens, masks = [[5, 7, 2], [6, 8, 4]], [[False, True, True], [False, False, True]]
    sources = {"rollout": ColumnSource("vllm", "bfloat16", "sha256:12", 0.7, "rollout", cut=True)}
    return make_dump(["a", "b"], tokens, masks, {"rollout": numbers}, sources, {"temperature": 0.7}, columns)


def make_tokens(kind, prompt, tokens, arrays, **facts):
    """Returns a record of the class ``kind``. Arrays [r, ...] of its response that are None are absent."""
    given = {name: array for name, array in arrays.items() if array is not None}
    return kind.of(np.int32(prompt), np.int32(tokens), given, **facts)


def train_sequence(prompt, tokens, rollout_logprobs=None, advantage=0.0, in_loss=True, trajectory=-1, **arrays):
    zeros = np.zeros(len(tokens))
    arrays = {"rollout_logprobs": zeros if rollout_logprobs is None else rollout_logprobs, "staleness": zeros} | arrays
    facts = {"advantage": advantage, "in_loss": in_loss, "trajectory": trajectory}
    return make_tokens(TrainSequence, prompt, tokens, arrays, **facts)


def response(place, tokens, rollout_logprobs=None, version=None, *, prompt=(9,), truncated=False, further=(), **arrays):
    """Returns a response at ``place``, a (prompt, sample). ``version`` is of all tokens, or one for each of them."""
    logprobs = np.full(len(tokens), -1.0) if rollout_logprobs is None else rollout_logprobs
    versions = None if version is None else np.broadcast_to(version, len(tokens))
    arrays = {"rollout_logprobs": logprobs, "version": versions} | arrays
    facts = {"prompt_index": place[0], "sample_index": place[1], "truncated": truncated, "further": further}
    return make_tokens(Response, prompt, tokens, arrays, **facts)


def completion(tokens, rollout_logprobs, *, prompt=(9,), finish_reason="length", spans=None, scores=(), **arrays):
    facts = {"finish_reason": finish_reason, "spans": spans, "prompt_logprobs": scores}
    return make_tokens(Completion, prompt, tokens, {"rollout_logprobs": rollout_logprobs} | arrays, **facts)


def micro_batch(tokens, mask, rollout_logprobs, advantages, **tops):
    """Returns a micro-batch [b, t]. The tokens in ``mask`` are sampled and in the loss.

    ``tops`` may have ``top_ids`` and ``top_logprobs`` [b, t, k], the sampler's likeliest tokens.
    """
    rows, places = np.indices(np.shape(tokens), np.int32)
    sides, none = np.broadcast_arrays(rollout_logprobs, advantages), np.zeros_like(rows)
    return PackedBatch(np.int32(tokens), none + 1, places, rows, mask, mask, *sides, none, None, None, **tops)
