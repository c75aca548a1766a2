"""Measures the mismatch of each kind of injection on one policy; without injection the exact engine has zero mismatch.

    python experiments/mismatch_dial.py --path configs/toy-base

The executable that would train on the samples scores them. Prints a Markdown table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.data.encoding import prompt_ids
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import addition_problems
from rljax.errors import caller_errors, run_cli
from rljax.mismatch import mismatch_metrics
from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.model import Params, param_shardings
from rljax.rollout.build import make_engine
from rljax.rollout.types import InjectConfig, RolloutConfig, SamplingParams
from rljax.run.config_file import load_config
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.exact import ExactPass, lay_out, micro_of
from rljax.trainer.objective import Objective
from rljax.trainer.packing import TrainSequence
from rljax.trainer.precision import PrecisionConfig

SIZES = (0.001, 0.003, 0.01, 0.03, 0.1)


@dataclass(frozen=True)
class Arguments:
    """The options of the program.

    Attributes:
      path: The Hugging Face directory of a policy of the toy task.
      dtype: The compute dtype of both sides.
      problems: The number of prompts, from the eval split.
      group_size: The number of responses to each prompt.
      max_response_tokens: The longest response, in tokens.
      rows: The rows of the executable.
      seed: The seed of the samples.
    """

    path: str = "configs/toy-base"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    problems: int = 16
    group_size: int = 8
    max_response_tokens: int = 36
    rows: int = 16
    seed: int = 0


def settings() -> Iterator[tuple[str, str, InjectConfig]]:
    """Yields (kind, size, injection) of each row of the table."""
    yield "none", "0", InjectConfig()
    for size in SIZES:
        yield "weight_noise", f"{size:g}", InjectConfig(weight_noise=size)
    for size in SIZES:
        yield "logit_noise", f"{size:g}", InjectConfig(logit_noise=size)
    for dtype in ("float16", "bfloat16"):
        yield "dtype", dtype, InjectConfig(dtype=dtype)  # type: ignore[arg-type]
    for kind in ("int8", "fp8"):
        yield "quantize", kind, InjectConfig(quantize=kind)  # type: ignore[arg-type]


def measure(
    config: RolloutConfig,
    exact: ExactPass,
    policy: PolicyConfig,
    mesh: Mesh,
    params: Params,
    prompts: Sequence[np.ndarray],
    arguments: Arguments,
    stops: tuple[int, ...],
) -> dict[str, Any]:
    """Measures the mismatch of an engine's samples with the executable's log-probabilities of the same tokens."""
    longest = max(map(len, prompts))
    engine = make_engine(
        config,
        policy,
        mesh,
        max_prompt_tokens=longest,
        max_tokens=longest + arguments.max_response_tokens,
        make_executable=lambda: exact,
    )
    engine.publish(params, 0)
    sampling = SamplingParams(arguments.max_response_tokens, 1.0, stops)
    responses = list(engine.generate(prompts, arguments.group_size, sampling, seed=arguments.seed))
    responses.sort(key=lambda r: (r.prompt_index, r.sample_index))
    sequences = [TrainSequence(prompts[r.prompt_index], r.token_ids, r.logprobs, 0.0, True) for r in responses]
    batch, one = lay_out(sequences, exact.rows, exact.row_tokens), exact.scalar(1.0)
    micros = [micro_of(batch, index) for index in range(int(batch.used))]
    trainer = [np.asarray(exact(params, exact.place(micro), one, one, one).scores.logprobs) for micro in micros]
    parts = [np.concatenate(p) for p in (trainer, batch.rollout_logprobs, batch.response_mask)]
    return mismatch_metrics(*parts)


def make_exact(arguments: Arguments, policy: PolicyConfig, mesh: Mesh, prompt_tokens: int) -> ExactPass:
    """Makes the executable that samples and scores."""
    count = arguments.problems * arguments.group_size
    return ExactPass(
        policy,
        mesh,
        precision=PrecisionConfig(compute_dtype=arguments.dtype),
        objective=Objective(LossConfig(), CorrectionConfig(), count, arguments.max_response_tokens),
        rows=arguments.rows,
        row_tokens=prompt_tokens + arguments.max_response_tokens,
    )


def main(argv: Sequence[str]) -> int:
    """Prints the table and returns the exit status."""
    arguments = load_config(Arguments, argv, prog="python experiments/mismatch_dial.py", description=__doc__ or "")
    with caller_errors():
        policy, tokenizer = read_config(arguments.path), load_tokenizer(arguments.path)
        mesh = make_mesh(MeshConfig())
        params = load_params(arguments.path, policy, param_shardings(policy, mesh))
    prompts = [prompt_ids(p, tokenizer) for p in addition_problems("eval", arguments.problems)]
    stops = policy.stop_token_ids or (tokenizer.eos_token_id,)
    exact = make_exact(arguments, policy, mesh, max(map(len, prompts)))
    print(
        "| kind | size | logprob_abs_diff_mean | k3_kl | largest abs(log-ratio) | tokens |\n|---|---|---|---|---|---|"
    )

    def show(kind: str, size: str, config: RolloutConfig) -> None:
        metrics = measure(config, exact, policy, mesh, params, prompts, arguments, stops)
        names = ("logprob_abs_diff_mean", "k3_kl", "logprob_abs_diff_max")
        values = " | ".join(f"{metrics[name]:.2e}" if metrics[name] else "0" for name in names)
        print(f"| {kind} | {size} | {values} | {metrics['token_count']:.0f} |", flush=True)

    for kind, size, inject in settings():
        show(kind, size, RolloutConfig(engine="exact", dtype=arguments.dtype, inject=inject))
    show("none, engine jax", arguments.dtype, RolloutConfig(engine="jax", dtype=arguments.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
