"""``rljax bench-mismatch``: the numbers of a row, the rows of forms that fail, the continuation, and the tables."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rljax.commands.bench_mismatch import collected, main
from rljax.compare.bench import Form, bench_rows, measure_form, reason_of, without_places
from rljax.errors import ConfigError
from rljax.record.token_dumps import ColumnSource, make_dump, read_dump

SOURCE = ColumnSource("engine 1", "float32")
FORM = Form("transformers", "float32", "forward", 2)
FILES = Path(__file__).parents[2] / "benchmarks" / "mismatch_bench"


def measured(by_size, *, reference=((-1.0, -2.0), (-1.5, -0.5)), source=SOURCE, floors=("shape", "repeat")):
    """Measures two sequences of one prompt token.

    ``by_size`` has the numbers of each call, by the batch size.
    """
    whole = {size: [[[math.nan, *row] for row in rows] for rows in calls] for size, calls in by_size.items()}
    column = {"jax:float32": [[math.nan, *row] for row in reference]}
    sources = {"jax:float32": ColumnSource("jax", "float32", "sha256:aa")}
    dump = make_dump(["a", "b"], [[1, 2, 3]] * 2, [[False, True, True]] * 2, column, sources)
    return measure_form(
        FORM, dump, "jax:float32", lambda size: (list(map(np.float32, whole[size].pop(0))), source), 4, floors
    )


def test_a_row_has_the_numbers_worked_by_hand():
    first = [[-1.25, -1.0], [-1.5, -0.5]]
    row, dump = measured({4: [first, first], 2: [[[-1.5, -1.0], [-1.5, -0.75]]]})
    # The log-ratios of the reference minus the engine are 0.25, -1, 0, 0; their means over the sequences are -0.375 and
    # 0.
    assert row["logprob_abs_diff_mean"] == 1.25 / 4
    assert row["logprob_abs_diff_max"] == 1.0
    assert row["extreme_rate"] == 0.25
    assert row["log_ppl_abs_diff"] == pytest.approx(0.1875)
    assert row["k3_kl"] == pytest.approx((math.exp(0.25) - 1.25 + math.exp(-1.0)) / 4)
    assert (row["token_count"], row["nonfinite_count"]) == (4, 0)
    assert (row["floor_shape"], row["floor_repeat"]) == (0.5 / 4, 0.0)
    assert {"hf:float32", "hf:float32@2"} < set(dump.logprobs)


def test_tokens_that_are_not_finite_are_counted():
    lost = [[-1.0, -np.inf], [np.nan, -0.5]]
    row, _ = measured({4: [lost]}, floors=())
    assert (row["token_count"], row["nonfinite_count"], row["logprob_abs_diff_mean"]) == (2, 2, 0.0)
    cells = bench_rows({"rows": [FORM._asdict() | row]})[1]
    assert cells[:5] == ["transformers", "forward", "float32", "2", "2"]
    assert cells[-1] == "2 tokens are not finite"
    with pytest.raises(ValueError, match="none of the 4 tokens"):
        measured({4: [[[np.nan] * 2] * 2]}, floors=())


def test_another_dtype_or_other_weights_are_refused():
    with pytest.raises(ValueError, match="computes in bfloat16, expected float32"):
        measured({4: [[[-1.0, -1.0]] * 2]}, source=ColumnSource("engine 1", "bfloat16"))
    with pytest.raises(ValueError, match="holds other weights"):
        measured({4: [[[-1.0, -1.0]] * 2]}, source=ColumnSource("engine 1", "float32", "sha256:bb"))


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("no config.json in /home/someone/models/mine", "no config.json in mine"),
        ("vllm:http://10.0.0.7:8000/v1 does not answer", "vllm:URL does not answer"),
        (
            "'/data/x.safetensors': 3 tokens/s, Qwen/Qwen3-0.6B and/or ~/mine/",
            "'x.safetensors': 3 tokens/s, Qwen/Qwen3-0.6B and/or mine",
        ),
        ("--out=/scratch/someone/bench", "--out=bench"),
    ],
)
def test_no_place_of_the_machine_is_told(text, public):
    assert without_places(text) == public


def test_a_reason_is_one_line():
    assert reason_of(ValueError("too long\nby far")) == "too long"
    assert reason_of(MemoryError()) == "MemoryError()"


WORDS = ["toy-base", "--dtypes", "float32", "--sequences", "4", "--batch-size", "2", "--sample", "jax-decode:float32"]


@pytest.mark.slow
def test_a_bench_of_the_toy_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RLJAX_VLLM_VENV", str(tmp_path / "none"))
    words = [*WORDS, "--paths", "forward", "prefill", "--out", str(tmp_path / "bench")]
    assert main([*words, "--engines", "transformers", "vllm", "--lengths", "6", "2000", "--floors", "repeat"]) == 1
    path = tmp_path / "bench" / "bench.json"
    text = path.read_text()
    rows = {Form(row["engine"], row["dtype"], row["path"], row["length"]): row for row in json.loads(text)["rows"]}
    measured_row = rows[Form("transformers", "float32", "forward", 6)]
    assert 0 < measured_row["logprob_abs_diff_mean"] < 1e-5
    assert (measured_row["token_count"], measured_row["floor_repeat"]) == (24, 0)
    assert "positions of the model" in rows[Form("transformers", "float32", "forward", 2000)]["reason"]
    assert rows[Form("vllm", "float32", "prefill", 6)]["reason"].startswith("no vllm environment at none")
    assert str(tmp_path) not in text
    assert "positions of the model" in capsys.readouterr().out

    document = json.loads(text)
    document["running"] = [Form("jax", "float32", "prefill", 6)._asdict()]
    document["rows"][-1] = measured_row | {"seconds": 12345}
    path.write_text(json.dumps(document))
    assert main([*words, "--engines", "jax", "transformers", "--lengths", "6", "--floors", "repeat"]) == 1
    rows = {(row["engine"], row["path"]): row for row in json.loads(path.read_text())["rows"] if row["length"] == 6}
    assert rows["jax", "forward"]["logprob_abs_diff_mean"] == 0
    assert "killed" in rows["jax", "prefill"]["reason"]
    assert rows["transformers", "forward"]["seconds"] == 12345
    columns = read_dump(tmp_path / "bench" / "tokens-6.parquet").logprobs
    assert set(columns) == {"jax:float32", "hf:float32", "jax-decode:float32"}

    with pytest.raises(ConfigError, match="another settings"):
        main([*words, "--seed", "1"])


def test_mistakes_of_the_caller_are_named():
    for words, said in (
        ([], "either MODEL or --collect"),
        (["toy-base", "--lengths", "0"], "--lengths must be at least 1"),
        (["toy-base", "--batch-size", "9"], "--batch-size must be at most --sequences = 8"),
        (["toy-base", "--reference", "vllm:http://x"], "--reference must be jax"),
    ):
        with pytest.raises(ConfigError, match=said):
            main(words)


def test_the_page_has_the_tables_of_all_results():
    page = (FILES.parents[1] / "docs" / "bench_mismatch.md").read_text(encoding="utf-8")
    assert collected(FILES) in page
