"""Servers that round weights or cache to 8 bits: refused where nobody named it, else verified and sampled from."""

import pytest
from toy_runs import comparable, complete_beside, tiny
from vllm_processes import ONE_THREAD

from rljax.rollout.servers.vllm.server import ServerConfig, start
from rljax.rollout.types import VerifyConfig

pytestmark = [pytest.mark.vllm, pytest.mark.harness]
FORMS = [
    ("kv_cache", "--kv-cache-dtype", "fp8_e4m3"),
    ("kv_cache", "--kv-cache-dtype", "fp8_e5m2"),
    ("weights", "--quantization", "int8_per_channel_weight_only"),
    ("weights", "--quantization", "fp8_per_channel"),
]


@pytest.mark.parametrize(("key", "option", "form"), FORMS, ids=[form for _, _, form in FORMS])
def test_form(key, option, form, toy_base, vllm_interpreter, tmp_path):
    config = ServerConfig(
        str(toy_base),
        vllm_interpreter,
        max_model_len=512,
        max_num_seqs=64,
        log_path=tmp_path / "server.log",
        extra_args=(option, form),
        extra_env=ONE_THREAD,
    )
    with start(config, timeout_s=540) as server:
        words = tiny(toy_base, tmp_path / "run", 3, "--rollout.engine", "vllm", "--rollout.urls", server.url)
        words += ["--data.batch-size", "8"]
        status, said = complete_beside(server, words)
        what, plain = {"kv_cache": ("cache", "auto"), "weights": ("weights", "none")}[key]
        expected = f"the server's form of the {what} is {form}, expected {plain}: set rollout.server_form.{key}"
        line = f"error: {server.url}: {expected} = {form}, or start the server without {option}"
        assert (status, said.strip()) == (2, line)
        status, said = complete_beside(server, [*words, f"--rollout.server-form.{key.replace('_', '-')}", form])
        assert status == 0, said
        rows = comparable(tmp_path / "run")
        limits = VerifyConfig()
        for row in rows:
            measured, band = row["publish/verify_abs_diff_mean"], row["publish/verify_band"]
            print(form, measured, band, row["mismatch/logprob_abs_diff_mean"], row["mismatch/k3_kl"])
            assert measured < band
            assert limits.rounded_floor <= band <= limits.rounded_ceiling
