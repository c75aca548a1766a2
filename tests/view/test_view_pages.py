"""Tests of the page of a token dump or run: its numbers against ones by hand, and its words on broken dumps."""

import base64
import gzip
import json
import math
import re

import numpy as np
import pytest
import yaml
from records import record_row, small_dump, write_record
from toy_runs import outcome, printed, refused

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.commands.view import main
from rljax.mismatch import mismatch_metrics
from rljax.record.dump_facts import choose_pair
from rljax.record.token_dumps import ColumnSource, make_dump, write_dump
from rljax.view import page
from rljax.view.page import measure

K3 = [math.exp(-0.25) - 1 + 0.25, math.exp(0.5) - 1.5 + math.exp(-1)]  # for the two sequences of ``small_dump``


def viewed(tmp_path, source, *words):
    status, out, err = outcome(main, [source, "-o", tmp_path / "page.html", *words])
    assert (status, out.strip()) == (0, str(tmp_path / "page.html")), err
    return page_data(tmp_path / "page.html")


def page_data(path):
    text = path.read_text()
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def numbers(array):
    return np.frombuffer(gzip.decompress(base64.b64decode(array["bytes"])), "<" + array["dtype"]).tolist()


def dump_of(tmp_path, dump):
    return write_dump(tmp_path / "tokens.parquet", dump)


def test_sequences_stand_by_contribution_with_their_numbers(tmp_path):
    (dump,) = viewed(tmp_path, dump_of(tmp_path, small_dump()))["dumps"]
    assert (dump["names"], dump["lengths"]) == (["b", "a"], [4, 2])
    np.testing.assert_allclose(dump["sequences"].pop("share"), np.asarray(K3[::-1]) / sum(K3), rtol=1e-5)
    sizes = {"sum": [-0.5, -0.25], "mean": [0.75, 0.25], "largest": [1.0, 0.25], "tokens": [2, 1]}
    assert dump["sequences"] == sizes
    metrics = dict(dump["metrics"])
    assert metrics["k3_kl"] == pytest.approx(sum(K3) / 3, rel=1e-5)
    assert (metrics["logprob_abs_diff_max"], metrics["nonfinite_count"]) == (1.0, 1)
    tokens, nan = dump["tokens"], math.nan
    assert numbers(tokens["ids"]) == [5, 6, 7, 8, 5, 6]
    assert numbers(tokens["mask"]) == [0, 1, 1, 1, 0, 1]
    np.testing.assert_equal(numbers(tokens["trainer"]), [nan, -0.5, -2.0, -1.0, nan, -1.25])
    np.testing.assert_equal(numbers(tokens["rollout"]), [nan, -1.0, -1.0, nan, nan, -1.0])
    assert {"turn", "after"}.isdisjoint(tokens["values"])  # the dump has one turn
    assert sum(dump["counts"]["turn"]) == 0


def test_the_metrics_are_those_of_a_comparison():
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 60, 200)
    sides = [[-rng.exponential(1, n).astype(np.float32) for n in lengths] for _ in range(2)]
    ids, masks = [np.zeros(n, np.int32) for n in lengths], [np.arange(n) > 1 for n in lengths]
    dump = make_dump([str(i) for i in range(200)], ids, masks, dict(zip(("trainer", "rollout"), sides, strict=True)))
    found = measure(dump, ("trainer", "rollout"))
    padded = [np.stack([np.pad(row, (0, 60 - len(row))) for row in rows]) for rows in (*sides, masks)]
    metrics = mismatch_metrics(*padded)
    for name in ("k3_kl", "kl", "log_ppl_abs_diff", "logprob_abs_diff_max", "token_count"):
        assert found.metrics[name] == pytest.approx(metrics[name], rel=1e-12)
    assert found.sequences["share"].sum() == pytest.approx(1)
    found = measure(small_dump(), ("trainer", "rollout"))  # the buckets count all tokens
    assert [found.histograms["value"][place] for place in (3, 4)] == [1, 1]  # from -1 and from -0.3 on
    assert found.histograms["value"].sum() == 3
    assert found.histograms["position"].tolist()[:2] == [3, 0]
    assert found.growth["position"][0] == 0.25 + 0.5 + 1.0
    sides = {"trainer": [[None, -1.0]] * 2, "rollout": [[None, -1.0]] * 2}
    bare = make_dump(["a", "b"], [[1, 2]] * 2, [[False, True], [False, False]], sides)
    assert measure(bare, ("trainer", "rollout")).notes == ["1 of 2 sequences have no response token and are left out."]


def values_dump(**more):
    """Returns a dump of turns of one and two tokens, with log-ratios ln 3, then ln 0.5 and 0."""
    ids = np.asarray([[-1, -1], [6, 3], [-1, -1], [9, 3], [3, 4]], np.int32)
    logprobs = np.log([[1, 1], [0.5, 0.25], [1, 1], [0.5, 0.5], [0.5, 0.25]]).astype(np.float32)
    logprobs[[0, 2]] = -np.inf
    trainer = [None, math.log(0.75), None, math.log(0.25), math.log(0.125)]
    rollout = [None, math.log(0.25), None, math.log(0.5), math.log(0.125)]
    columns = {"top_ids": [ids], "top_logprobs": [logprobs], "values/version": [[None, 3, None, 4, 4]]}
    columns |= {"values/advantage": [[None, 1.0, None, -1.0, -1.0]]}
    columns |= {"top_ids/trainer": [ids[:, ::-1]], "top_logprobs/trainer": [logprobs[:, ::-1]]} if more else {}
    mask = [False, True, False, True, True]
    sides = {"trainer": [trainer], "rollout": [rollout]}
    return make_dump(["x"], [[5, 3, 7, 9, 8]], [mask], sides, columns=columns | more)


def test_rank_turn_and_alternatives_are_there(tmp_path):
    (dump,) = viewed(tmp_path, dump_of(tmp_path, values_dump()), "--alternatives", "1")["dumps"]
    tokens, nan = dump["tokens"], math.nan
    tops = tokens["tops"]["rollout"]
    assert (tops["k"], tops["of"]) == (1, 2)
    assert numbers(tops["rank"]) == [0, 2, 0, 1, 3]  # the last token is none of the two
    assert numbers(tops["ids"]) == [2**32 - 1, 6, 2**32 - 1, 9, 3]
    values = {"turn": [nan, 1, 0, 2, 2], "after": [nan, nan, nan, 1, 2], "advantage": [nan, 1, nan, -1, -1]}
    for name, expected in values.items():
        np.testing.assert_equal(numbers(tokens["values"][name]), expected)
    # Each side may have its own likeliest tokens. The first turn of a row is turn 3, so its prompt ends with the
    # environment's tokens.
    own = values_dump(**{"values/turn": [[nan, 3, 0, 4, 4]]})
    (dump,) = viewed(tmp_path, dump_of(tmp_path, own))["dumps"]
    tops = dump["tokens"]["tops"]
    assert [numbers(tops[side]["rank"]) for side in ("rollout", "trainer")] == [[0, 2, 0, 1, 3], [0, 1, 0, 2, 3]]
    assert numbers(tops["trainer"]["ids"])[2:4] == [3, 6]
    np.testing.assert_equal(numbers(dump["tokens"]["values"]["turn"]), [nan, 3, 0, 4, 4])
    np.testing.assert_equal(numbers(dump["tokens"]["values"]["after"]), [nan, 1, nan, 1, 2])
    assert dump["counts"]["turn"][:4] == [0, 0, 1, 2]  # turns 1, 2, 3, 4
    np.testing.assert_allclose(dump["growth"]["turn"][2:4], np.log([3, 2]), rtol=1e-5)
    assert dump["counts"]["after"][:2] == [2, 1]
    np.testing.assert_allclose(dump["growth"]["after"][:2], [math.log(3) + math.log(2), 0], rtol=1e-5)


def test_the_weights_are_those_of_the_correction():
    for correction, expected in (
        ({}, [1, 1, 1]),
        ({"level": "token", "mode": "mask"}, [0, 0.5, 1]),
        ({"level": "token", "normalize": True}, [2 / (3.5 / 3), 0.5 / (3.5 / 3), 1 / (3.5 / 3)]),
        ({"level": "sequence"}, [1.5, 1.5, 1.5]),  # 3 x 0.5 x 1
        ({"veto": 0.6}, [0, 0, 0]),
        ({"level": "token", "region": "moment", "region_threshold": 0.04}, [2, 0.5, 1]),  # without the region
        ({"region": "tv", "region_threshold": 0.3}, [0, 1, 1]),  # the probabilities differ by 0.5, 0.25 and 0
    ):
        found = measure(values_dump(), ("trainer", "rollout"), CorrectionConfig(**correction))
        np.testing.assert_allclose(found.values["weight"][0], [0, expected[0], 0, *expected[1:]], rtol=1e-6)
    unknown = measure(values_dump(), ("trainer", "rollout"), CorrectionConfig(level="token", part="drift"))
    assert ("weight" in unknown.values, "of the part drift" in unknown.notes[-1]) == (False, True)


def test_a_large_dump_is_cut_to_what_contributes_most(tmp_path, monkeypatch):
    path = dump_of(tmp_path, small_dump())
    (dump,) = viewed(tmp_path, path, "--max-tokens", "5")["dumps"]
    assert (dump["names"], dump["lengths"]) == (["b", "a"], [4])
    assert dump["facts"][-1] == (
        "The 1 sequences that contribute most are here token by token, 4 of 6 tokens. Numbers and light bars are of "
        "all 2 sequences."
    )
    assert sum(dump["counts"]["value"]) == 3
    (dump,) = viewed(tmp_path, path, "--max-tokens", "1")["dumps"]
    assert dump["lengths"] == [4]  # one sequence is always shown
    monkeypatch.setattr(page, "LISTED", 1)
    (dump,) = viewed(tmp_path, path)["dumps"]
    assert (dump["names"], dump["lengths"], numbers(dump["tokens"]["ids"])) == (["b"], [4], [5, 6, 7, 8])


def test_roles_choose_columns_and_wrong_words_are_refused(tmp_path):
    sources = {"a": ColumnSource(role="rollout"), "b": ColumnSource(), "c": ColumnSource(role="trainer")}
    columns = {name: [[-1.0]] for name in ("a", "b", "c", "b@2")}
    dump = make_dump(["x"], [[1]], [[True]], columns, {**sources, "b@2": ColumnSource()})
    chosen = {(None, None): "c a", ("b", None): "b a", (None, "b"): "c b", ("a", "b@2"): "a b@2"}
    assert {words: " ".join(choose_pair(dump, *words)) for words in chosen} == chosen
    for roles, pair in (("rollout rollout ", "c a"), ("trainer trainer ", "a c"), ("rollout rollout", "b a")):
        of = {name: ColumnSource(role=role) for name, role in zip("abc", roles.split(" "), strict=False)}
        assert " ".join(choose_pair(make_dump(["x"], [[1]], [[True]], {name: [[-1.0]] for name in of}, of))) == pair
    with pytest.raises(ValueError, match=r"no column 'd' in the dump, which has \['a', 'b', 'b@2', 'c'\]"):
        choose_pair(dump, trainer="d")
    with pytest.raises(ValueError, match="two different columns"):
        choose_pair(dump, "a", "a")
    bare = make_dump(["x"], [[1]], [[True]], {"a": [[-1.0]], "a@2": [[-1.0]]})
    assert choose_pair(bare, rollout="a@2") == ("a", "a@2")
    with pytest.raises(ValueError, match=r"needs two columns of log-probabilities, got \['a'\]"):
        choose_pair(bare, rollout="a")
    path, empty = dump_of(tmp_path, small_dump()), tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "x.jsonl").write_text('{"token_ids": [1], "response_mask": [1]}\n')
    for words, message in (
        ([tmp_path / "nowhere"], "no such file or directory"),
        ([path, "-o", path], "a file to write, other than DUMP_OR_RUN"),
        ([path, "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        ([path, "--model", empty], "no tokenizer at"),
        ([empty], "found none"),
        ([tmp_path / "x.parquet", "-o", tmp_path / "page.html"], "x.parquet cannot be read as Parquet"),
        ([tmp_path / "x.jsonl", "-o", tmp_path / "page.html"], "needs two columns of log-probabilities, got []"),
    ):
        assert message in refused(main, words)
    assert not (tmp_path / "page.html").exists()


def test_a_token_cannot_leave_its_place(tmp_path):
    evil = "</script><script>alert(1)</script><!--"
    dump = make_dump([evil], [[5, 6]], [[False, True]], {evil: [[None, -1.0]], "trainer": [[None, -1.5]]})
    path = write_dump(tmp_path / "a<b>.parquet", dump)
    (found,) = viewed(tmp_path, path)["dumps"]
    text = (tmp_path / "page.html").read_text()
    assert found["names"] == [evil]
    assert (text.count("<script"), text.count("</script"), text.count("<!--")) == (2, 2, 0)
    assert "<title>a&lt;b&gt;.parquet</title>" in text


def write_run(tmp_path, **config):
    run = write_record(tmp_path / "run", [record_row(step, surge=3, period=5) for step in range(1, 13)])
    settings = {"model": {"path": "toy-base"}, "run": {"dir": str(run)}, **config}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return run


def test_a_run_has_its_curves_its_tokenizer_and_dumps(tmp_path):
    run = write_run(tmp_path, correction={"level": "token"})
    for step in range(1, 5):
        write_dump(run / f"rollouts/step_{step:06d}.parquet", small_dump())
    data = viewed(tmp_path, run, "--dumps", "2")
    assert [dump["name"] for dump in data["dumps"]] == ["step_000001.parquet", "step_000004.parquet"]
    assert len(data["texts"]) == len(data["ids"]) == 4
    weights = numbers(data["dumps"][0]["tokens"]["values"]["weight"])
    np.testing.assert_allclose(weights, [0, math.exp(0.5), math.exp(-1), 0, 0, math.exp(-0.25)], rtol=1e-6)
    text = (tmp_path / "page.html").read_text()
    called = "12 steps. The surge was called at step 3."
    for words in ("surge at 3, period 5", "Response length", called, "2 of its 4 token dumps are here."):
        assert words in text
    assert "://" not in text.partition("<script")[0]
    assert printed(main, [run]).strip() == str(run / "report.html")


def test_a_dump_of_a_run_knows_its_run(tmp_path):
    run = write_run(tmp_path)
    assert viewed(tmp_path, run)["dumps"] == []  # its curves alone
    assert "rollout.dump_every" in (tmp_path / "page.html").read_text()
    path = write_dump(run / "rollouts/step_000001.parquet", small_dump())
    data = viewed(tmp_path, path)
    assert len(data["texts"]) == 4
    assert numbers(data["dumps"][0]["tokens"]["values"]["weight"]) == [0, 1, 1, 1, 0, 1]
    assert 'id="curves"' not in (tmp_path / "page.html").read_text()
    (run / "rollouts/step_000002.parquet").write_bytes(b"PAR1 and no more")  # it is named and left out
    status, _, err = outcome(main, [run, "-o", tmp_path / "page.html"])
    assert (status, err.startswith("step_000002.parquet is left out: ")) == (0, True)
    assert [dump["name"] for dump in page_data(tmp_path / "page.html")["dumps"]] == ["step_000001.parquet"]
    assert "step_000002.parquet is left out" in (tmp_path / "page.html").read_text()
