"""The comparison against a real server: sound columns pass, and each comparison of unlike things is told apart."""

import json
from pathlib import Path

import pytest
from opened_clients import call
from vllm_processes import FORKED

from rljax.commands import compare
from rljax.compare.report import compare_columns
from rljax.compare.sampling import SampleConfig, sample_responses
from rljax.compare.scorers import score_column
from rljax.errors import run_cli
from rljax.record.token_dumps import ColumnSource, make_dump, read_dump

pytestmark = pytest.mark.vllm


def test_columns_of_server_trainer_and_embedded_engine_pass(bfloat16, prompts):
    """The columns have equal weights."""
    served, drawn = bfloat16, "vllm-decode:bfloat16"
    masks = [[False] * len(ids) for ids in prompts]
    sound = make_dump([str(i) for i in range(len(prompts))], prompts, masks, {})
    with served.published():
        pass  # an earlier test may have published other weights
    config = SampleConfig(responses=8, max_response_tokens=24, batch_size=40, second_run=True)
    sound = sample_responses(sound, served.model.path, f"vllm-decode:{served.url}", config)
    for spec in ("jax:float32", "jax:bfloat16", "jax-decode:bfloat16", f"vllm:{served.url}"):
        vectors, source = score_column(spec, sound, served.model.path, batch_size=40)
        sound = sound.with_column(spec.partition("://")[0], vectors, source)
    version = call(served.url, "GET", "/version")["version"]
    assert sound.sources["vllm:http"].weights_hash == ""
    assert sound.sources[drawn] == ColumnSource(f"vllm {version} decode", "bfloat16", "", 1.0, "rollout")
    comparison = compare_columns(sound)
    assert len(comparison.pairs) == 10
    for pair in comparison.pairs:
        assert pair.verdict.status == "pass", (pair.trainer, pair.rollout, pair.verdict.reason)
        assert pair.metrics["token_count"] == sum(mask.sum() for mask in sound.response_mask) > 500
        assert pair.metrics["logprob_abs_diff_mean"] < 5e-2
    assert comparison.noise_floor[drawn]["token_count"] > 100


def test_the_program_draws_scores_and_reports(float32, prompts, tmp_path):
    with float32.published():
        pass
    lines = [json.dumps({"prompt_ids": ids.tolist(), "response_ids": []}) for ids in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    arguments = [str(tmp_path / "prompts.jsonl"), "--model", str(float32.model.path), "--max-response-tokens", "16"]
    arguments += [
        "--sample",
        f"vllm-decode:{float32.url}",
        "--scorer",
        f"vllm:{float32.url}",
        "--scorer",
        "jax:float32",
    ]
    assert run_cli(compare.main, [*arguments, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    roles = {name: column["role"] for name, column in report["columns"].items()}
    assert roles == {"jax:float32": "", "vllm:float32": "rollout", "vllm-decode:float32": "rollout"}
    assert set(report["noise_floor"]) == set(report["columns"])


@pytest.mark.harness  # compare/test_bench.py has the rows
def test_a_server_is_started_for_the_rows_that_need_one(vllm_interpreter, monkeypatch, tmp_path):
    """Both paths of one server, and the trainer as the reference, have the same weights and dtype."""
    for name, value in {**FORKED, "RLJAX_VLLM_VENV": str(Path(vllm_interpreter).parents[1])}.items():
        monkeypatch.setenv(name, value)
    specs = ["jax:bfloat16", "vllm:bfloat16", "vllm-decode:bfloat16"]
    words = ["--serve", "--model", "toy-base", "--toy-prompts", "4", "--lengths", "8", "--repeat", "2"]
    words += [word for spec in specs for word in ("--scorer", spec)]
    out = tmp_path / "bench"
    assert run_cli(compare.main, [*words, "--out", str(out)]) == 0
    document = json.loads((out / "bench.json").read_text())
    rows = {(row["engine"], row["path"]): row for row in document["rows"]}
    assert set(rows) == {("jax", "forward"), ("vllm", "prefill"), ("vllm", "decode")}
    for row in rows.values():
        assert (row["token_count"], row["nonfinite_count"], row["reference"]) == (32, 0, "jax:bfloat16")
        assert 0 <= row["floor_repeat"] <= row["logprob_abs_diff_mean"] + 0.02 < 0.1
    assert rows["vllm", "decode"]["program"].startswith("vllm ")
    assert rows["vllm", "decode"]["floor_path"] < 0.016
    columns = read_dump(out / "tokens-8.parquet").logprobs
    assert {"vllm:bfloat16", "vllm:bfloat16@2", "vllm-forced:bfloat16"} < set(columns)
