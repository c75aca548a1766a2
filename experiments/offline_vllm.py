"""Samples with vLLM's own ``LLM.generate`` and reports its time, for experiments/bench_rollouts.py.

    VLLM_PYTHON experiments/offline_vllm.py [OPTIONS OF A vLLM SERVER]

It runs in vLLM's environment. The options are those of a server, so that both have one configuration. It reads one JSON
object a line: the prompts, and the limit, the seed and the number of log-probabilities of each response. It answers
with one JSON object a line: the number of sampled tokens, and the seconds that ``LLM.generate`` alone took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from vllm import LLM, EngineArgs, SamplingParams
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def sample(llm: LLM, job: dict[str, Any]) -> dict[str, Any]:
    """Returns the number of tokens that the job sampled, and the seconds that it took."""
    shared = {"logprobs": job["logprobs"], "flat_logprobs": job["flat"], "ignore_eos": True, "detokenize": False}
    settings = [
        SamplingParams(temperature=1.0, max_tokens=limit, seed=seed, **shared)
        for limit, seed in zip(job["limits"], job["seeds"], strict=True)
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    begun = time.perf_counter()
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    seconds = time.perf_counter() - begun
    return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs), "seconds": seconds}


def main(arguments: Sequence[str]) -> int:
    """Answers each line of standard input; returns the exit status."""
    if arguments[:1] == ["--help"]:
        print(__doc__)
        return 0
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output is not an answer
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(options))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(sample(llm, json.loads(line))), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
