"""Forced decoding in a real vLLM shows the path that a difference comes from. Its hooks leave others alone."""

import numpy as np
import pytest
from vllm_checks import rpc
from vllm_processes import ONE_THREAD

from rljax.compare.scorers import open_server, score_column
from rljax.record.token_dumps import make_dump
from rljax.rollout.servers.vllm.server import VllmConfig, start
from rljax.rollout.types import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.harness]
PROMPT, RESPONSE, COUNT = 80, 60, 8
FIRST = np.arange(PROMPT, dtype=np.int32)
# With two threads, keys and values are split for an idle thread. Waiting threads do not spin.
THREADS = {**ONE_THREAD, "OMP_NUM_THREADS": "2", "KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "passive"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a random policy, wide enough that bfloat16 rounds differently in another order of sums."""
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers_models import hf_config

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("decoded")
    config = hf_config((509, 256, 512, 4, 4, 2, 64, True, 10_000.0), "Qwen3", max_position_embeddings=1024)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def serve(model, interpreter, tmp_path, **settings):
    sizes = {"max_model_len": 512, "max_num_seqs": 16, "log_path": tmp_path / "server.log", "extra_env": THREADS}
    return start(VllmConfig(str(model), interpreter, **sizes, **settings), timeout_s=540)


def paths(url):
    """Returns decode - prefill of responses, [n, response], for each number n of responses decoded at a time."""
    tokens = np.random.default_rng(7).integers(0, 509, (COUNT, PROMPT + RESPONSE)).tolist()
    mask = [False] * PROMPT + [True] * RESPONSE
    dump = make_dump([str(i) for i in range(COUNT)], tokens, [mask] * COUNT, {})
    prefilled = np.stack([vector[PROMPT:] for vector in score_column(f"vllm:{url}", dump)[0]])
    found = {}
    for n in (1, 2, 8):
        rows = (each[:n] for each in (dump.sequence_ids, dump.token_ids, dump.response_mask))
        decoded, _ = score_column(f"vllm-decode:{url}", make_dump(*rows, {}), batch_size=n)
        found[n] = np.abs(np.stack([vector[PROMPT:] for vector in decoded]) - prefilled[:n])
    return found


def test_decode_alone_differs_by_split_keys_and_values(model, vllm_interpreter, tmp_path):
    with serve(model, vllm_interpreter, tmp_path) as server:
        before = sampled(server.url)
        gaps = paths(server.url)
        tokens, logprobs = before
        with open_server(server.url) as client:
            (again,) = client.decode([FIRST], [tokens], at_once=1)
        np.testing.assert_array_equal(again, logprobs)
        np.testing.assert_array_equal(sampled(server.url)[0], tokens)
    assert 1.8e-3 < gaps[1].mean() < 1.6e-2
    first = PROMPT + int(np.flatnonzero(gaps[1][0])[0])
    assert first >= 96
    assert not gaps[2].any()
    assert not gaps[8].any()


def test_batch_invariant_decode_equals_prefill(model, vllm_interpreter, tmp_path):
    with serve(model, vllm_interpreter, tmp_path, batch_invariant=True) as server:
        assert rpc(server, "rljax_describe")[0]["batch_invariant"] is True
        gaps = paths(server.url)
    assert not any(gap.any() for gap in gaps.values())


def sampled(url):
    """Returns the tokens and log-probabilities of a sampled response, which is then forced."""
    with open_server(url) as server:
        (response,) = server.generate([FIRST], 1, SamplingParams(16), seed=3)
    return response.response, response["rollout_logprobs"]
