"""The comparison's requests to a server, its refusals and its messages are tested against a stand-in."""

import json

import numpy as np
import pytest

from rljax.commands import compare
from rljax.compare.bench import BenchConfig, find_forms
from rljax.compare.distributions import compare_distributions
from rljax.compare.report import compare_columns
from rljax.compare.sampling import SampleConfig, sample_responses
from rljax.compare.scorers import name_columns, open_server, score_column, server_source, split_spec
from rljax.errors import ReplyError, ServerGoneError, run_cli
from rljax.record.token_dumps import make_dump, read_dump, write_dump
from rljax.weights.format import weights_hash

DUMP = make_dump(["x", "y"], [[7, 8, 9], [4, 5]], [[False, True, True], [False, True]], {})


def test_a_column_of_prompt_logprobs_says_where_it_is_from(fake, model):
    fake.root = str(model)
    done = []
    vectors, source = score_column(f"vllm:{fake.url}", DUMP, batch_size=1, progress=done.append)
    np.testing.assert_array_equal(vectors[0], np.float32([np.nan, -0.125, -0.25]))
    np.testing.assert_array_equal(vectors[1], np.float32([np.nan, -0.125]))
    assert (source.engine, source.dtype, source.temperature) == ("vllm fake", "float32", 1.0)
    assert source.weights_hash == weights_hash(model)
    assert (done, fake.most_running) == ([1, 1], 1)
    fake.version = "run7/3"  # weights that were published have no known hash
    with open_server(fake.url) as server:
        assert server_source(server.info, "", 1.0).weights_hash == ""
    fake.described = {"platform": "tpu"}
    assert score_column(f"vllm:{fake.url}", DUMP)[1].engine == "vllm-tpu fake"
    config = BenchConfig(model, "m", (f"vllm:{fake.url}",), (4,))
    assert [form.column for form in find_forms(config)] == ["vllm-tpu:float32"]


def test_a_server_decodes_given_tokens_or_is_named(fake):
    """The stand-in scores each response token with -1. A response without tokens makes no request."""
    rows = [*zip(DUMP.token_ids, DUMP.response_mask, strict=True), (np.int32([6, 6]), np.zeros(2, bool))]
    dump, spec = make_dump(["x", "y", "z"], *([row[i] for row in rows] for i in (0, 1)), {}), f"vllm-decode:{fake.url}"
    for way in ("extra_args", "trace_decode_token_ids"):
        fake.forcing = {"way": way, "reason": ""}
        vectors, source = score_column(spec, dump)
        for vector, expected in zip(vectors, ([np.nan, -1, -1], [np.nan, -1], [np.nan, np.nan]), strict=True):
            np.testing.assert_array_equal(vector, np.float32(expected))
        assert (source.engine, source.role, source.temperature) == ("vllm fake decode", "rollout", 1.0)
    assert sorted(asked[:2] for asked in fake.asked) == [([4], 1)] * 2 + [([7], 2)] * 2
    assert name_columns([spec]) == {spec: "vllm-forced:float32"}
    for name, value, said in (
        ("obeys", False, "other tokens than those given: token 0 is 7, expected 8"),
        ("forcing", {"way": "", "reason": "its runner needs --x"}, "decodes no given tokens: its runner needs --x"),
        ("refuse", {"/collective_rpc": 404}, "decodes no given tokens: rljax's plugin is not in this server"),
    ):
        setattr(fake, name, value)
        with pytest.raises((ReplyError, ValueError), match=said):
            score_column(spec, DUMP)


def test_a_server_gives_its_likeliest_tokens_and_a_rest(fake, model):
    """The server, the rollout side, lists two tokens with probabilities e^-4 and e^-5 beside the given token."""
    fake.root, specs = str(model), [f"vllm:{fake.url}", "jax:float32"]
    (pair,) = compare_distributions(specs, DUMP, model, top_k=2)
    assert (pair.trainer, pair.rollout, pair.is_complete) == (*specs[::-1], False)
    assert pair.metrics["token_count"] == 3
    listed = np.exp(-4) + np.exp(-5) + np.exp([-1 / 8, -2 / 8, -1 / 8])
    assert pair.metrics["rest_mass"] == pytest.approx(np.mean(1 - listed), rel=1e-5)
    assert pair.metrics["kl"] > 0
    # A real vLLM's engine ends if it is asked for more tokens than its vocabulary, or else the other directory's, has.
    for refused in ({}, {"/collective_rpc": 404}):
        fake.refuse = refused
        (pair,) = compare_distributions(specs, DUMP, model, top_k=500)
        assert pair.metrics["token_count"] == 3


def test_columns_are_named_by_dtype_and_form_and_kept_apart(fake, another):
    other = another()
    specs = [f"vllm:{fake.url}", f"vllm:{other.url}", "jax:float32"]
    kept = dict(zip(specs, ["vllm:float32", specs[1], "jax:float32"], strict=True))
    assert name_columns([*specs, specs[0]]) == kept
    other.dtype = "bfloat16"
    assert name_columns(specs)[specs[1]] == "vllm:bfloat16"
    fake.described = {"kv_cache_dtype": "fp8_e5m2", "quantization": "fp8_per_channel"}
    form = "fp8_per_channel weights, fp8_e5m2 cache"
    assert name_columns(specs[:1]) == {specs[0]: f"vllm:float32 ({form})"}
    assert score_column(specs[0], DUMP)[1].form == form
    # A plain server has no plugin and no weight endpoints, so dtype and weights are unknown.
    other.routes, other.model = {"/inference/v1/generate"}, "org/name"
    other.refuse = dict.fromkeys(["/collective_rpc", "/is_paused"], 404)
    vectors, source = score_column(specs[1], DUMP)
    assert (vectors[0][2], source.dtype, source.weights_hash) == (np.float32(-0.25), "", "")
    assert name_columns(specs[1:2]) == {specs[1]: f"vllm:127.0.0.1:{other.port}"}


def test_what_a_server_cannot_score_is_refused(fake):
    """Tokens that would be cut short or would end the server are not sent."""
    for ids, message in (
        ([5] * 128, "prompt 0 has 128 tokens; with 1 of response it must have 1 to 127"),
        ([5, 64], r"prompt 0 has token ids outside 0\.\.63"),
    ):
        with pytest.raises(ValueError, match=message):
            score_column(f"vllm:{fake.url}", make_dump(["x"], [ids], [[True] * len(ids)], {}))
    for kind in ("vllm", "vllm-decode"):
        with pytest.raises(ValueError, match=r"at temperature 1, got 0\.7"):
            score_column(f"{kind}:{fake.url}", DUMP, temperature=0.7)
    with pytest.raises(ValueError, match=r"sglang decodes no given tokens; .* sglang:http://h"):
        split_spec("sglang-decode:http://h")
    with open_server(fake.url) as server:  # the temperature of drawn log-probabilities is probed
        assert [server.logprobs_temperature(temperature) for temperature in (0.7, 1.4)] == [0.7, 1.4]
        fake.raw = True
        assert [server.logprobs_temperature(temperature) for temperature in (0.7, 1.0)] == [1.0, 1.0]
    for name, value, error, message in (
        ("logprob", 2.0, ReplyError, "gives logits"),
        ("finish", "abort", ServerGoneError, "ended a response with 'abort'"),
        ("paused", True, ValueError, "is paused"),
    ):
        setattr(fake, name, value)
        with pytest.raises(error, match=message):
            score_column(f"vllm:{fake.url}", DUMP)


def test_a_second_draw_counts_up_to_the_first_other_token(fake, model, monkeypatch):
    """The stand-in samples successors of the last token; its second draw differs at one position and in its numbers."""
    dump = make_dump(["p"], [[9, 5]], [[False, False]], {})
    asked, plain = [], fake.answer

    def bent(method, path, body):
        status, reply = plain(method, path, body)
        if path.endswith("/generate") and body.get("token_ids") == [9, 5]:
            asked.append(body)
            if len(asked) > 2:
                (choice,) = reply["choices"]
                choice["token_ids"][2] = choice["logprobs"]["content"][2]["token_id"] = 1
                choice["logprobs"]["content"][1]["logprob"] = -1.5
        return status, reply

    monkeypatch.setattr(fake, "answer", bent)
    config = SampleConfig(responses=2, max_response_tokens=4, second_run=True, temperature=0.7)
    drawn = sample_responses(dump, model, f"vllm-decode:{fake.url}", config)
    assert (drawn.sequence_ids, len(asked)) == (("p/0", "p/1"), 4)
    none, column = np.nan, "vllm-decode:float32"
    for i in range(2):
        assert drawn.token_ids[i].tolist() == [9, 5, 5, 6, 7, 8]
        np.testing.assert_array_equal(drawn.logprobs[column][i], [none, none, -1, -1, -1, -1])
        np.testing.assert_array_equal(drawn.logprobs[f"{column}@2"][i], [none, none, -1, -1.5, none, none])
    assert drawn.sources[column].temperature == 0.7
    both = drawn.with_column("o", drawn.logprobs[column], drawn.sources[column])
    floor = compare_columns(both).noise_floor[column]
    assert (floor["logprob_abs_diff_mean"], floor["token_count"]) == (0.25, 4)


def test_a_server_that_dies_leaves_one_line_and_what_was_scored(fake, model, tmp_path, capsys):
    """The server dies after its first column, in the middle of its second run."""
    path = write_dump(tmp_path / "t", DUMP)
    plain, scored = fake.answer, 0

    def dying(method, path, body):
        nonlocal scored
        scored += "prompt_logprobs" in json.dumps(body)
        return plain(method, path, body) if scored < 4 else (None, {})

    fake.answer = dying
    arguments = [str(path), "--model", str(model), "--scorer", "jax:float32", "--scorer", f"vllm:{fake.url}"]
    out = tmp_path / "out"
    assert run_cli(compare.main, [*arguments, "--batch-size", "2", "--out", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: no answer from {fake.url}/")
    assert sorted(read_dump(out / "tokens.parquet").logprobs) == ["jax:float32", "jax:float32@2", "vllm:float32"]
    fake.stop()  # a missing server is named before anything is scored
    assert run_cli(compare.main, [*arguments, "--out", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: no answer from")
    assert not (tmp_path / "none").exists()
