"""Servers that round weights or cache to 8 bits are refused unless the settings name it. Then a run trains."""

from contextlib import closing

import numpy as np
import pytest
from toy_runs import comparable, complete_beside, tiny
from vllm_checks import OUT_OF_BAND, cache_kept, check_use, rpc
from vllm_processes import FORKED

from rljax.compare.report import compare_columns
from rljax.compare.scorers import score_column
from rljax.errors import VerificationError
from rljax.record.token_dumps import read_dump
from rljax.rollout.servers.verify import ROUNDED_BAND
from rljax.rollout.servers.vllm.server import VllmConfig, start
from rljax.rollout.types import ServerForm
from tests.integration.conftest import Served

pytestmark = [pytest.mark.vllm, pytest.mark.harness]
FORMS = [("kv_cache", "--kv-cache-dtype", "fp8_e5m2"), ("weights", "--quantization", "int8_per_channel_weight_only")]


@pytest.mark.parametrize(("key", "option", "form"), FORMS, ids=[form for _, _, form in FORMS])
def test_form(key, option, form, toy_base, vllm_interpreter, tmp_path):
    sizes = {"max_model_len": 512, "max_num_seqs": 64, "log_path": tmp_path / "server.log"}
    config = VllmConfig(str(toy_base), vllm_interpreter, **sizes, extra_args=(option, form), extra_env=FORKED)
    with start(config, timeout_s=540) as server:
        words = tiny(toy_base, tmp_path / "run", 3, "--rollout.engine", "vllm", "--rollout.urls", server.url)
        words += ["--rollout.dump-every", "3", "--data.batch-size", "8", "--rollout.max-response-tokens", "36"]
        status, said = complete_beside(server, words)
        what, plain = {"kv_cache": ("cache", "auto"), "weights": ("weights", "none")}[key]
        expected = f"the server's form of the {what} is {form}, expected {plain}: set rollout.server_form.{key}"
        line = f"error: {server.url}: {expected} = {form}, or start the server without {option}"
        assert (status, said.strip()) == (2, line)
        status, said = complete_beside(server, [*words, f"--rollout.server-form.{key.replace('_', '-')}", form])
        assert status == 0, said
        rows = comparable(tmp_path / "run")
        for row in rows:
            assert row["publish/verify_abs_diff_mean"] < row["publish/verify_band"]
            assert ROUNDED_BAND[0] <= row["publish/verify_band"] <= ROUNDED_BAND[1]
        assert max(row.get("publish/changed_fraction", 0.0) for row in rows) > 0.1
        dump = read_dump(tmp_path / "run/rollouts/step_000003.parquet")
        assert dump.sources["rollout"].form == f"{form} {what}"
        for column in (f"vllm:{server.url}", f"vllm-decode:{server.url}"):
            dump = dump.with_column(column.partition("://")[0], *score_column(column, dump))
    # Both columns of a pair are of step 3, or both of the server, whose weights the run's last publish moved.
    pairs = compare_columns(dump, same_weights=True).pairs
    of_one_version = [p for p in pairs if p.trainer.startswith("vllm") == p.rollout.startswith("vllm")]
    assert len(of_one_version) == 2
    for pair in of_one_version:
        assert pair.verdict.cause in ("none", "above_bar"), pair.verdict.reason
        assert np.isfinite(pair.metrics["logprob_abs_diff_mean"])


def test_faults_of_use_are_out_of_the_wider_band(make_model, start_server):
    """The server's own scores find a cache of older weights, and the wider band finds a head of older weights."""
    model, cache = make_model(True), "fp8_e4m3"
    with start_server(model, "bfloat16", more=("--kv-cache-dtype", cache)) as server:
        served = Served(server, model, "bfloat16")
        with closing(served.engine(server_form=ServerForm(kv_cache=cache))) as engine:
            sound = engine.publish(model.params, 0)
            assert sound["publish/verify_own_abs_diff_mean"] < sound["publish/verify_own_band"] < 0.1
            for scale, version in ((0.3, 1), (0.05, 3)):  # a big step, and a step inside the band of the rounding
                with cache_kept(engine), pytest.raises(VerificationError, match=OUT_OF_BAND) as stale:
                    engine.publish(model.moved(2, scale), version)
                assert "its cache may hold keys and values of older weights" in str(stale.value)
                engine.publish(model.params, version + 1)
            rpc(served, "sabotage_tied_head", "on")
            with pytest.raises(VerificationError):
                engine.publish(model.moved(3), 5)
            # On some processors the head has a copy of its own.
            if rpc(served, "head_is_stale")[0]["stale"]:
                with pytest.raises(VerificationError, match=OUT_OF_BAND):
                    check_use(engine, server.url, model.moved(3))
