"""The comparison of a dump's columns, its texts, and the program around it are tested."""

import itertools
import json
import sys

import jax
import numpy as np
import pytest
from toy_runs import outcome, refused

from rljax.commands import compare
from rljax.compare.report import compare_columns, to_json, to_markdown, to_text
from rljax.compare.scorers import score_column
from rljax.compare.verdict import judge
from rljax.errors import run_cli
from rljax.mismatch import mismatch_metrics
from rljax.policy.families import read_config
from rljax.policy.hf import load_params, save_params
from rljax.record.dump_facts import pair_of
from rljax.record.token_dumps import ColumnSource, make_dump, read_dump, write_dump

SOURCE = ColumnSource("jax", "bfloat16", "sha256:aa", 1.0)


def noisy_dump(scale=1e-2):
    """Returns a dump with column a, columns b and c near it, and a@2 nearer."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 9, n) for n in (33, 303, 10)]
    masks = [np.arange(len(row)) >= 3 for row in ids]
    a = [-rng.exponential(1.0, len(row)) - 0.1 for row in ids]
    scales = {"a": 0.0, "b": scale, "c": 0.02, "a@2": 1e-5}
    columns = {name: [row + s * rng.standard_normal(len(row)) for row in a] for name, s in scales.items()}
    return make_dump(["x", "y", "z"], ids, masks, columns, dict.fromkeys(columns, SOURCE))


def test_pairs_metrics_and_floors_are_those_of_the_library():
    """Floors by cause are no columns of their own."""
    dump = noisy_dump()
    comparison = compare_columns(dump.with_column("a@mesh", [row + 1e-3 for row in dump.logprobs["a"]], SOURCE))
    assert [(pair.trainer, pair.rollout) for pair in comparison.pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert list(comparison.columns) == ["a", "b", "c"]
    x, y = (np.concatenate([row[3:] for row in dump.logprobs[name]]).astype(np.float64) for name in "ab")
    expected = mismatch_metrics(x[None], y[None], np.ones((1, 337)))
    for name in ("logprob_abs_diff_mean", "logprob_abs_diff_max", "k3_kl", "token_count"):
        assert comparison.pairs[0].metrics[name] == pytest.approx(expected[name], rel=1e-12)
    growth = {label: bucket["token_count"] for label, bucket in comparison.pairs[0].growth.items()}
    assert growth == {"lt_16": 37, "16_to_64": 63, "64_to_256": 192, "256_to_1024": 45}  # places from 1 on
    assert set(comparison.noise_floor) == {"a"}
    assert 0 < comparison.noise_floor["a"]["logprob_abs_diff_mean"] < 1e-4
    assert comparison.passed
    assert comparison.other_floors["a"]["mesh"]["logprob_abs_diff_mean"] == pytest.approx(1e-3, rel=1e-3)
    assert "| 0.001 |" in to_markdown(comparison)
    for columns, message in ((["a", "q"], "no column 'q'"), (["a"], "at least two"), (["a", "a"], "each once")):
        with pytest.raises(ValueError, match=message):
            compare_columns(dump, columns)


def test_json_markdown_and_text_say_the_same():
    comparison = compare_columns(noisy_dump(scale=np.nan))
    plain = json.loads(to_json(comparison))
    assert (plain["pairs"][0]["verdict"]["cause"], plain["passed"]) == ("no_tokens", False)
    known = {"engine": "jax", "dtype": "bfloat16", "weights_hash": "sha256:aa", "temperature": 1, "role": ""}
    assert plain["columns"]["a"] == known
    gap = plain["pairs"][1]["metrics"]["logprob_abs_diff_mean"]
    for text in (to_markdown(comparison), to_text(comparison)):
        assert all(part in text for part in (f"{gap:.3g}", "REFUSED", "prime_rl mismatch_kl/mean (limit 0.015)"))
    assert all(line.endswith("|") for line in to_markdown(comparison).splitlines() if line.startswith("|"))
    assert comparison.pairs[1].turns == {}
    assert "by turn" not in to_markdown(comparison)


def test_a_column_of_another_file_goes_by_sequence_id(tmp_path):
    dump, other = noisy_dump(), tmp_path / "o.parquet"
    pick = [[values[i] for i in (2, 0, 1)] for values in (dump.sequence_ids, dump.token_ids, dump.response_mask)]
    write_dump(other, make_dump(*pick, {"r": [dump.logprobs["b"][i] for i in (2, 0, 1)]}, {"r": SOURCE}))
    vectors, source = score_column(f"dump:{other}#r", dump)
    assert source == SOURCE
    for vector, expected in zip(vectors, dump.logprobs["b"], strict=True):
        np.testing.assert_array_equal(vector, expected)
    dump = make_dump(["x", "y"], [[1, 7, 3]] * 2, [[True] * 3] * 2, {})
    for ids, column, message in (
        ([1, 2, 3], "r", r"'x' is tokenised differently: from token 1 on it has \[2, 3\], expected \[7, 3\]"),
        ([1, 7], "r", r"'x' is tokenised differently: from token 2 on it has \[\], expected \[3\]"),
        ([1, 7, 3], "r", "no sequence 'y'"),
        ([1, 7, 3], "s", r"no column 's', but \['r'\]"),
    ):
        write_dump(other, make_dump(["x"], [ids], [[True] * len(ids)], {"r": [[-1.0] * len(ids)]}))
        with pytest.raises(ValueError, match=message):
            score_column(f"dump:{other}#{column}", dump)


def write_tokens(path):
    """Writes a dump of four sequences of 5 prompt tokens and 15 response tokens, without columns."""
    ids = np.random.default_rng(0).integers(0, 16, (4, 20))
    return str(write_dump(path, make_dump(list("abcd"), ids, np.arange(20)[None] >= np.full((4, 1), 5), {})))


def scored(model, tmp_path, scorers, *words):
    words = [write_tokens(tmp_path / "t"), "--model", str(model), "--out", str(tmp_path / "out"), *words]
    assert run_cli(compare.main, [*words, *(word for name in scorers for word in ("--scorer", f"{name}:float32"))]) == 0
    columns = read_dump(tmp_path / "out" / "tokens.parquet").logprobs
    return sorted(columns), json.loads((tmp_path / "out" / "report.json").read_text())


def test_the_program_scores_reports_and_draws(model, tmp_path, capsys):
    """A program with a backward is a floor, and another mesh is one where there are devices for it."""
    columns, report = scored(model, tmp_path, ("jax", "hf"), "--batch-size", "4", "--floors", "shape", "mesh", "remat")
    assert "jax:float32 / hf:float32" in capsys.readouterr().out
    assert columns == [f"hf:float32{floor}" for floor in ("", "@2")] + [
        f"jax:float32{floor}" for floor in ("", "@2", "@remat")
    ]
    assert 0 < report["pairs"][0]["metrics"]["logprob_abs_diff_mean"] < 1e-5
    assert set(report["noise_floor"]) == {"jax:float32", "hf:float32"}
    assert set(report["other_floors"]) == {"jax:float32"}
    remat = report["other_floors"]["jax:float32"]["remat"]
    assert (remat["token_count"], remat["logprob_abs_diff_max"] < 1e-5) == (60, True)
    assert "| column | shape | mesh | remat |" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "report.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.mesh
def test_another_mesh_is_a_floor(model, tmp_path):
    columns, report = scored(model, tmp_path, ("jax", "jax-prefill"), "--floors", "mesh")
    assert columns == ["jax-prefill:float32", "jax:float32", "jax:float32@mesh"]
    assert 0 < report["other_floors"]["jax:float32"]["mesh"]["logprob_abs_diff_max"] < 1e-5


def test_a_conversion_is_judged_by_numbers_and_distributions(model, tmp_path, capsys):
    """The directories before and after a conversion are compared. A tensor that was lost on the way must be found."""
    config = read_config(model)
    params = load_params(model, config)
    save_params(tmp_path / "kept", jax.tree.map(lambda leaf: leaf * np.float32(1 + 1e-7), params), config)
    save_params(tmp_path / "lost", params | {"embed": params["embed"][::-1]}, config)
    words = [write_tokens(tmp_path / "t"), "--model", str(model), "--no-second-run", "--distributions"]
    words += ["--out", str(tmp_path), "--scorer", "jax:float32", "--scorer"]
    kls = []
    for name, options, cause in (
        ("kept", [], "other_weights"),
        ("kept", ["--same-weights"], "none"),
        ("lost", ["--same-weights"], "other_weights"),
    ):
        status = run_cli(compare.main, [*words, f"jax:float32@{tmp_path / name}", *options])
        assert status == (cause != "none"), capsys.readouterr()
        plain = json.loads((tmp_path / "report.json").read_text())
        assert plain["pairs"][0]["verdict"]["cause"] == cause
        kls.append(plain["distributions"][0]["metrics"]["kl"])
        assert "Whole distributions" in (tmp_path / "report.md").read_text()
    assert kls[1] < 1e-9 < 1e-2 < kls[2]


def near_columns(names):
    rng = np.random.default_rng(0)
    values = -rng.exponential(1.0, (1, 40))
    return [[1] * 40], [[True] * 40], {name: values + 1e-4 * rng.standard_normal(values.shape) for name in names}


def test_only_pairs_with_the_sampling_column_refuse_a_cut():
    for sampling, sides in (
        ({"top_p": 1.0, "top_k": 0, "min_p": 0.0}, []),
        ({"top_p": None, "temperature": 0.7, "top_k": -1}, []),
        ({"top_p": 0.95}, ["rollout"]),
        ({"top_k": 40}, ["rollout"]),
        ({"min_p": 0.05, "column": "b"}, ["b"]),
    ):
        pairs = compare_columns(make_dump(["x"], *near_columns(("a", "b", "rollout")), {}, sampling)).pairs
        cut = {(pair.trainer, pair.rollout) for pair in pairs if pair.verdict.cause == "truncated_sampling"}
        assert all("the tokens were sampled with " in p.verdict.reason for p in pairs if (p.trainer, p.rollout) in cut)
        assert cut == {pair for pair in itertools.combinations(["a", "b", "rollout"], 2) if set(sides) & set(pair)}
    # Columns over the surviving tokens are compared with each other, but not with a scorer's.
    sources = {name: ColumnSource(cut=True) for name in ("rollout", "trainer")}
    columns = near_columns(("a", "rollout", "trainer"))
    pairs = compare_columns(make_dump(["x"], *columns, sources, {"top_k": 5})).pairs
    alike = {(p.trainer, p.rollout) for p in pairs if p.verdict.cause != "truncated_sampling"}
    assert (len(pairs), alike) == (3, {("trainer", "rollout")})


def test_an_interrupt_keeps_what_was_scored(model, tmp_path, monkeypatch):
    real = compare.score_column

    def interrupted(spec, *rest, **options):
        if spec.startswith("jax:bfloat16"):
            raise KeyboardInterrupt
        return real(spec, *rest, **options)

    monkeypatch.setitem(vars(compare), "score_column", interrupted)
    words = [str(write_dump(tmp_path / "t", noisy_dump())), "--columns", "a", "--model", str(model)]
    words += ["--out", str(tmp_path / "out"), "--scorer", "jax:float32", "--scorer", "jax:bfloat16"]
    assert run_cli(compare.main, words) == 130
    assert "jax:float32" in read_dump(tmp_path / "out" / "tokens.parquet").logprobs


def two_tokens(order, roles=None, sampling=None):
    """Returns two tokens in columns ``order``; by name the first has (e^-1, e^-2), and the second (e^-1.5, e^-4)."""
    values = dict(zip(sorted(order), ([-1.0, -2.0], [-1.5, -4.0]), strict=True))
    sources = {name: ColumnSource(role=role) for name, role in (roles or {}).items()}
    return make_dump(["x"], [[5, 6]], [[True] * 2], {name: [values[name]] for name in order}, sources, sampling)


# With the trainer at (-1, -2) and the engine at (-1.5, -4), the log-ratios are 0.5 and 2; or both are exchanged.
FORWARD = (-1.25, (np.exp(0.5) - 1.5 + np.exp(2.0) - 3.0) / 2)
BACKWARD = (1.25, (np.exp(-0.5) - 0.5 + np.exp(-2.0) + 1.0) / 2)


def test_roles_and_not_the_order_in_the_file_decide(tmp_path):
    for names, roles, sampling, trainer, known, expected in (
        ("rollout trainer", {}, None, "trainer", True, BACKWARD),
        ("p q", {"p": "rollout"}, None, "q", True, BACKWARD),
        ("p q", {}, {"column": "p"}, "q", True, BACKWARD),
        ("p q", {"p": "trainer"}, {"column": "p"}, "p", True, FORWARD),
        ("p q", {}, None, "p", False, FORWARD),
        ("p q", {"p": "rollout", "q": "rollout"}, None, "p", False, FORWARD),
    ):
        for step in (1, -1):
            dump = two_tokens(names.split()[::step], roles, sampling)
            comparison = compare_columns(read_dump(write_dump(tmp_path / "t", dump)))
            (pair,) = comparison.pairs
            assert (pair.trainer, pair.roles_known) == (trainer, known)
            assert (pair.metrics["kl"], pair.metrics["k3_kl"]) == pytest.approx(expected, rel=1e-12)
            for text in (to_text(comparison), to_markdown(comparison)):
                assert ("Nothing says which of these columns is the trainer's" in text) == (not known)


def test_a_role_is_named_on_the_command_line(tmp_path, capsys):
    """Columns of one role keep their order and are listed."""
    (pair,) = compare_columns(two_tokens("pq"), ["q", "p"]).pairs
    assert (pair.trainer, pair.rollout, pair.roles_known) == ("q", "p", False)
    words = [str(write_dump(tmp_path / "t", two_tokens("pq"))), "--out", str(tmp_path)]
    for role in (("--trainer", "q"), ("--engine", "p")):
        assert run_cli(compare.main, [*words, *role]) == 1
        (pair,) = json.loads((tmp_path / "report.json").read_text())["pairs"]
        assert (pair["trainer"], pair["metrics"]["kl"], pair["roles_known"]) == ("q", BACKWARD[0], True)
    assert "Nothing says" not in capsys.readouterr().out
    assert "cannot be both" in refused(compare.main, [*words, "--trainer", "p", "--rollout", "p"])
    assert "no column 'z', but p, q" in refused(compare.main, [*words, "--trainer", "z"])
    dump = noisy_dump().with_roles({"a": "trainer", "b": "rollout"})
    comparison = compare_columns(dump.with_column("r", dump.logprobs["c"], ColumnSource(role="rollout")))
    assert list(comparison.columns) == ["a", "c", "b", "r"]
    assert [pair.roles_known for pair in comparison.pairs] == [True] * 5 + [False]
    assert "the rollout engine's: b, r." in to_text(comparison)


def spoiled(change):
    """Returns columns trainer and rollout; ``change`` alters the rollout's numbers [16, 30] or returns others."""
    rng = np.random.default_rng(3)
    trainer = -rng.exponential(1.0, (16, 30)) - 0.1
    rollout = trainer + 5e-3 * rng.standard_normal(trainer.shape)
    changed = change(rollout)
    columns = {"trainer": trainer, "rollout": rollout if changed is None else changed}
    return make_dump(list(map(str, range(16))), np.ones((16, 30), int), np.ones((16, 30), bool), columns)


def filled(where, value):
    return spoiled(lambda rollout: rollout.__setitem__(where, value))


def test_tokens_that_are_left_out_never_pass(tmp_path):
    for where, value, left_out, words in (
        (np.s_[1:], -np.inf, 450, "450 infinite ones), and 15 of 16 sequences"),
        (np.s_[3], np.nan, 30, "30 unknown and 0 infinite ones), and 1 of 16 sequences"),
        (np.s_[3, 7], -np.inf, 1, "1 infinite ones), and 0 of 16 sequences"),
    ):
        path = write_dump(tmp_path / "t", filled(where, value))
        status, said, _ = outcome(compare.main, [path, "--out", tmp_path / "out"])
        assert (status, f"left_out  {left_out} of 480" in said, words in said) == (1, True, True)
    (pair,) = compare_columns(filled(np.s_[:, 0], np.nan)).pairs  # the first token of all has no number to miss
    assert (pair.verdict.status, pair.verdict.left_out) == ("pass", 0)
    assert compare_columns(filled((2, 3), 4e-6)).pairs  # what rounding adds is no mistake


def test_numbers_above_zero_are_refused_in_a_line(tmp_path):
    for dump, words in (
        (filled((2, 3), 0.5), "1 of 480 response tokens have such a number"),
        (filled((2, 3), np.inf), "column 'rollout' has inf in sequence '2'"),
        (filled(3, 1.0), "30 of 480 response tokens have this same number: a fill"),
        (spoiled(np.exp), "they look like probabilities"),
        (spoiled(np.negative), "the sign turned"),
    ):
        line = refused(compare.main, [write_dump(tmp_path / "t", dump), "--out", tmp_path / "out"])
        assert "a log-probability is never above 0" in line
        assert words in line


FILLS = [(np.s_[:, 20:], -9999.0, 160), (np.s_[4, 5], -9999.0, 1), (np.s_[:], -1e30, 480), (np.s_[:], 0.0, 480)]
FILLS += [(np.s_[3], 0.0, 30), (np.s_[:, ::4], 0.0, 128), (np.s_[6:9], -100.0, 90), (np.s_[6:9], -1.0, 90)]


@pytest.mark.parametrize(("where", "value", "count"), FILLS)
def test_constant_fills_are_named(where, value, count):
    (pair,) = compare_columns(filled(where, value)).pairs
    assert (pair.verdict.status, pair.verdict.cause) == ("refused", "constant_fill"), pair.verdict.reason
    assert f"second column holds {value:g} at {count} of 480 response tokens" in pair.verdict.reason


def test_certain_and_equal_tokens_are_no_constant_fill():
    """Half the tokens are certain: 0 in both columns, or near 0. A lower temperature makes more of them 0."""
    rng = np.random.default_rng(4)
    gaps = np.where(rng.random((16, 64)) < 0.5, rng.uniform(8, 40, (16, 64)), rng.uniform(-3, 3, (16, 64)))
    for power in (1.0, 1.6, 8.0):
        verdict = judge(pair_of(*(-np.log1p(np.exp(-gaps * p)).astype(np.float32) for p in (1.0, power))))
        assert (verdict.cause != "constant_fill", verdict.status == "pass") == (True, power == 1.0), verdict.reason
    # All responses to one prompt have the same first tokens, at which the columns differ by more than 0.01.
    x = -rng.exponential(1.0, (64, 8)) - 0.1
    y = x + 4e-3 * rng.standard_normal(x.shape)
    x[:, :2], y[:, :2] = (-1.0, -2.0), (-1.02, -2.02)
    assert judge(pair_of(x, y)).status == "pass"
    (pair,) = compare_columns(make_dump([], [], [], {"a": [], "b": []})).pairs
    assert pair.verdict.cause == "no_tokens"


def test_without_torch_only_the_hf_scorer_is_missing(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    dump = make_dump(["x"], [[1, 7, 3]], [[True] * 3], {})
    assert len(score_column("jax:float32", dump, model)[0]) == 1
    with pytest.raises(ValueError, match="needs torch and transformers"):
        score_column("hf:float32", dump, model)


def turned_dump(values=None):
    """Returns two trajectories with an environment's tokens. The log-ratios are 1, 0.25, 0.5 and -0.75."""
    mask = [[False, True, False, True, True], [False, False, True, False, False]]
    rollout = [[None, -1.0, None, -1.0, -1.0], [None, None, -2.0, None, None]]
    trainer = [[None, -2.0, None, -1.25, -0.5], [None, None, -1.25, None, None]]
    columns = {"trainer": trainer, "rollout": rollout}
    return make_dump(["a", "b"], [[1, 2, 3, 4, 5]] * 2, mask, columns, columns=values or {})


def test_a_mask_with_holes_gives_the_mismatch_by_turn():
    comparison = compare_columns(turned_dump())
    turns = comparison.pairs[0].turns
    assert {label: cell["token_count"] for label, cell in turns.items()} == {
        **{"turn_1": 2, "turn_2": 2, "after_1": 1, "after_2_to_4": 1}
    }
    assert [turns[label]["logprob_abs_diff_mean"] for label in turns] == [0.875, 0.375, 0.25, 0.5]
    assert json.loads(to_json(comparison))["pairs"][0]["turns"]["turn_1"]["token_count"] == 2
    text = to_markdown(comparison)
    assert "share of extreme tokens) by turn\n\n| pair | 1 | 2 |\n" in text
    assert "| trainer / rollout | 0.875 (100.00%) | 0.375 (0.00%) |" in text
    assert "from the environment's last token" in to_text(comparison)
    nan = None  # the second sequence is an additional row: its prompt ends with the environment's tokens
    own = {"values/turn": [[nan, 1, 0, 2, 3], [nan, nan, 3, 0, 0]]}  # the turns of a dump come before those of its mask
    counts = {label: cell["token_count"] for label, cell in compare_columns(turned_dump(own)).pairs[0].turns.items()}
    assert counts == {"turn_1": 1, "turn_2": 1, "turn_3_to_4": 2, "after_1": 2, "after_2_to_4": 1}


def test_the_bars_of_single_ratios_are_shares_of_the_tokens():
    """The log-ratios are -1, -0.25, 0.5 and 0.75, and then of four tokens 0, 0.0015, 0.009 and -0.04."""
    far = compare_columns(turned_dump()).pairs[0].ratios
    assert (far["within_5%"], far["bias"]) == (0.0, 0.0)
    assert far["noise"] == pytest.approx(np.std([-1, -0.25, 0.5, 0.75]) / 2)
    x = np.full((1, 4), -1.0)
    columns = {"trainer": x + np.float64([0, 0.0015, 0.009, -0.04]), "rollout": x}
    near = compare_columns(make_dump(["a"], [[1] * 4], [[True] * 4], columns))
    shares = near.pairs[0].ratios
    assert [shares[name] for name in ("in_0.999_1.002", "within_1%", "within_5%")] == [0.5, 0.75, 1.0]
    assert "within_1%" in to_markdown(near)
