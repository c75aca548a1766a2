"""``rljax compare --serve``: the numbers of a row, the rows that fail, the continuation, and the tables."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from bench_tables import collected

from rljax.commands.compare import main
from rljax.compare.bench import BenchConfig, BenchForm, bench_rows, measure_form, without_places
from rljax.errors import ConfigError
from rljax.record.token_dumps import ColumnSource, make_dump, read_dump

SOURCE = ColumnSource("engine 1", "float32")
FORM = BenchForm("transformers", "float32", "forward", 2)
FILES = Path(__file__).parents[2] / "benchmarks" / "mismatch_bench"


def measured(by_size, *, source=SOURCE, shape=True, repeat=1, form=FORM, others=None):
    """Measures two sequences of one prompt token. ``by_size`` has the numbers of each call, by the batch size."""
    whole = {size: [[[math.nan, *row] for row in rows] for rows in calls] for size, calls in by_size.items()}
    columns = {"jax:float32": ((-1.0, -2.0), (-1.5, -0.5)), **(others or {})}
    column = {name: [[math.nan, *row] for row in rows] for name, rows in columns.items()}
    sources = {"jax:float32": ColumnSource("jax", "float32", "sha256:aa")}
    dump = make_dump(["a", "b"], [[1, 2, 3]] * 2, [[False, True, True]] * 2, column, sources)

    def score(size):
        return list(map(np.float32, whole[size].pop(0))), source

    config = BenchConfig(Path(), "", (), (2,), second_run=shape, repeat=repeat)
    return measure_form(form, dump, "jax:float32", score, config)


def test_a_row_has_the_numbers_worked_by_hand():
    """The log-ratios are 0.25, -1, 0, 0; their means over the sequences are -0.375 and 0."""
    first = [[-1.25, -1.0], [-1.5, -0.5]]
    row, dump = measured({4: [first, first], 2: [[[-1.5, -1.0], [-1.5, -0.75]]]})
    assert (row["logprob_abs_diff_mean"], row["logprob_abs_diff_max"], row["extreme_rate"]) == (1.25 / 4, 1.0, 0.25)
    assert row["log_ppl_abs_diff"] == pytest.approx(0.1875)
    assert row["k3_kl"] == pytest.approx((math.exp(0.25) - 1.25 + math.exp(-1.0)) / 4)
    assert (row["token_count"], row["nonfinite_count"]) == (4, 0)
    assert (row["floor_shape"], row["floor_repeat"]) == (0.5 / 4, 0.0)
    assert {"hf:float32", "hf:float32@2"} < set(dump.logprobs)
    near, far = [[-1.25, -2.0], [-1.5, -0.5]], [[-1.5, -2.5], [-1.5, -0.5]]
    row, _ = measured({4: [[[-1.0, -2.0], [-1.5, -0.5]], near, far]}, shape=False, repeat=2)
    assert row["floor_repeat"] == (0.5 + 0.5) / 4  # of several repeats the farthest counts
    assert "floor_shape" not in row
    for source, said in (
        (ColumnSource("engine 1", "bfloat16"), "computes in bfloat16, expected float32"),
        (ColumnSource("engine 1", "float32", "sha256:bb"), "holds other weights"),
    ):
        with pytest.raises(ValueError, match=said):
            measured({4: [first]}, source=source)


def test_a_decode_has_its_gap_to_the_prefill_of_its_own_engine():
    form = FORM._replace(engine="vllm", path="decode")
    decoded, prefilled = [[-1.0, -2.5], [-1.5, -0.5]], [[-1.25, -2.0], [-1.5, -0.25]]
    row, _ = measured({4: [decoded]}, shape=False, repeat=0, form=form, others={"vllm:float32": prefilled})
    assert (row["logprob_abs_diff_mean"], row["floor_path"]) == (0.5 / 4, (0.25 + 0.5 + 0.25) / 4)
    head, cells = bench_rows({"rows": [form._asdict() | row], "model": {"parameters": 10**6}})
    assert cells[head.index("floor: path")] == "0.25"


def test_tokens_that_are_not_finite_are_counted():
    """The atlas has healthy gaps of 0.0063 to 0.037 nats of bfloat16 models below 2 B parameters."""
    row, _ = measured({4: [[[-1.0, -np.inf], [np.nan, -0.5]]]}, shape=False, repeat=0)
    assert (row["token_count"], row["nonfinite_count"], row["logprob_abs_diff_mean"]) == (2, 2, 0.0)
    row |= FORM._asdict()
    cells = bench_rows({"rows": [row], "model": {"parameters": 10**6}})[1]
    assert cells[:5] == ["transformers", "forward", "float32", "2", "2"]
    assert cells[-1] == "2 tokens are not finite"
    row |= {"dtype": "bfloat16", "reference": "jax:bfloat16", "logprob_abs_diff_mean": 0.5, "nonfinite_count": 0}
    assert "lies above" in bench_rows({"rows": [row], "model": {"parameters": 1_500_000_000}})[1][-1]
    with pytest.raises(ValueError, match="none of the 4 tokens"):
        measured({4: [[[np.nan] * 2] * 2]})


def test_no_place_of_the_machine_is_told():
    for text, public in (
        ("no config.json in /home/someone/models/mine", "no config.json in mine"),
        ("vllm:http://10.0.0.7:8000/v1 does not answer", "vllm:URL does not answer"),
        ("'/data/x.safetensors': 3 tokens/s, Qwen/Q and/or ~/mine/", "'x.safetensors': 3 tokens/s, Qwen/Q and/or mine"),
        ("--out=/scratch/someone/bench", "--out=bench"),
    ):
        assert without_places(text) == public


WORDS = ["--serve", "--model", "toy-base", "--toy-prompts", "4", "--batch-size", "2", "--sample", "jax-decode:float32"]


def scorers(*specs):
    return [word for spec in specs for word in ("--scorer", spec)]


@pytest.mark.harness
def test_a_bench_of_the_toy_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RLJAX_VLLM_VENV", str(tmp_path / "none"))
    words = [*WORDS, "--no-second-run", "--out", str(tmp_path / "bench")]
    assert main([*words, *scorers("hf:float32", "vllm:float32"), "--lengths", "6", "2000"]) == 1
    path = tmp_path / "bench" / "bench.json"
    text = path.read_text()
    rows = {BenchForm(row["engine"], row["dtype"], row["path"], row["length"]): row for row in json.loads(text)["rows"]}
    measured_row = rows[BenchForm("transformers", "float32", "forward", 6)]
    assert 0 < measured_row["logprob_abs_diff_mean"] < 1e-5
    assert (measured_row["token_count"], measured_row["floor_repeat"]) == (24, 0)
    assert "positions of the model" in rows[BenchForm("transformers", "float32", "forward", 2000)]["reason"]
    assert rows[BenchForm("vllm", "float32", "prefill", 6)]["reason"].startswith("no vllm environment at none")
    assert str(tmp_path) not in text
    assert "positions of the model" in capsys.readouterr().out

    document = json.loads(text)
    document["rows"] = [row | {"seconds": 12345} if "reason" not in row else row for row in document["rows"]]
    path.write_text(json.dumps(document))
    more = scorers("jax:float32", "exact:float32", "hf:float32", "jax-decode:float32")
    assert main([*words, *more, "--lengths", "6"]) == 0
    rows = {(row["engine"], row["path"]): row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {("jax", "forward"), ("exact", "forward"), ("transformers", "forward"), ("jax", "decode")}
    assert rows["jax", "forward"]["logprob_abs_diff_mean"] == 0
    assert rows["exact", "forward"]["logprob_abs_diff_mean"] < 1e-5
    assert rows["transformers", "forward"]["seconds"] == 12345
    assert 0 <= rows["jax", "decode"]["floor_path"] < 1e-5
    columns = read_dump(tmp_path / "bench" / "tokens-6.parquet").logprobs
    assert set(columns) == {f"{kind}:float32" for kind in ("jax", "exact", "hf", "jax-decode", "jax-prefill")}

    with pytest.raises(ConfigError, match="another settings"):
        main([*words, "--seed", "1"])
    path.unlink()  # the tokens and columns are of the first seed
    with pytest.raises(ConfigError, match=r"tokens-6\.parquet is of a bench without bench\.json"):
        main([*words, "--seed", "1"])


def test_mistakes_are_named_and_the_page_has_all_tables(tmp_path):
    for words, said in (
        (["--serve"], "--serve needs --model"),
        ([*WORDS, "--trainer", "vllm:http://x"], "--serve takes one --trainer of jax"),
        (["--toy", "--repeat", "3"], "--repeat goes with --serve"),
        ([*WORDS, "--scorer", "jax-decode:float32/fp8_e5m2"], "--serve measures KIND:DTYPE of jax"),
    ):
        with pytest.raises(ConfigError, match=said):
            main([*words, "--out", str(tmp_path / "out")])
    assert collected(FILES) == (FILES / "tables.md").read_text(encoding="utf-8")
