"""The exchange format keeps all that is put into it, and names the fault of anything else."""

import dataclasses
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from python_calls import count_calls

from rljax.compare.importers import read_tokens
from rljax.record.token_dumps import ColumnSource, TokenDump, make_dump, read_dump, write_dump


def small_dump():
    return make_dump(
        ["a", "b"],
        [[5, 6, 7], [8, 2]],
        [[False, True, True], [False, True]],
        {"trainer": [[None, -0.5, -np.inf], [None, -1.25]], "rollout": [[0.0, -0.5, -3.0], [0.0, -1.0]]},
        {"rollout": ColumnSource("vllm", "bfloat16", "sha256:12", 0.7, "rollout")},
        {"temperature": 0.7, "top_p": 1.0},
    )


def assert_same(got, expected):
    assert (got.sequence_ids, got.sources, got.sampling) == (
        expected.sequence_ids,
        expected.sources,
        expected.sampling,
    )
    for vectors, others in [
        (got.token_ids, expected.token_ids),
        (got.response_mask, expected.response_mask),
        *((got.logprobs[name], expected.logprobs[name]) for name in expected.logprobs),
    ]:
        for vector, other in zip(vectors, others, strict=True):
            np.testing.assert_array_equal(vector, other, strict=True)


def test_what_is_written_is_read_back_bit_for_bit(tmp_path):
    dump = small_dump()
    path = write_dump(tmp_path / "deep" / "x.parquet", dump)
    assert_same(read_dump(path), dump)
    assert_same(read_tokens(path), dump)
    assert [file.name for file in path.parent.iterdir()] == ["x.parquet"]
    assert read_dump(path).sources["trainer"] == ColumnSource()


def test_the_columns_are_typed_and_another_reader_sees_them(tmp_path):
    table = pq.read_table(write_dump(tmp_path / "x.parquet", small_dump()))
    assert table.schema.field("token_ids").type == pa.list_(pa.int32())
    assert table.schema.field("response_mask").type == pa.list_(pa.bool_())
    assert table.schema.field("logprobs/rollout").type == pa.list_(pa.float32())
    assert table["logprobs/rollout"].to_pylist() == [[0.0, -0.5, -3.0], [0.0, -1.0]]
    assert json.loads(table.schema.metadata[b"rljax.dump"])["version"] == 1


def dump_with_tops():
    """Returns a dump of responses of 2 and 1 tokens, with two likeliest tokens each.

    At the last place only one can be sampled.
    """
    none, nothing = [-1, -1], [-np.inf, -np.inf]
    columns = {
        "top_ids": [[none, [7, 3], [2, 9]], [none, none, [4, -1]]],
        "top_logprobs": [[nothing, [-0.1, -2.5], [-0.7, -0.8]], [nothing, nothing, [0.0, -np.inf]]],
    }
    return make_dump(
        ["a", "b"],
        [[5, 7, 2], [6, 8, 4]],
        [[False, True, True], [False, False, True]],
        {"rollout": [[None, -0.1, -0.7], [None, None, 0.0]]},
        {"rollout": ColumnSource(cut=True)},
        {"top_k": 2},
        columns,
    )


def test_the_likeliest_tokens_are_read_back(tmp_path):
    dump = dump_with_tops()
    found = read_dump(write_dump(tmp_path / "x.parquet", dump))
    assert_same(found, dump)
    for name in ("top_ids", "top_logprobs"):
        for a, b in zip(found.columns[name], dump.columns[name], strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
    assert found.sources["rollout"].cut
    table = pq.read_table(tmp_path / "x.parquet")
    assert table["top_ids"].to_pylist() == [[[-1, -1], [7, 3], [2, 9]], [[-1, -1], [-1, -1], [4, -1]]]
    assert table["top_logprobs"].to_pylist()[1][2] == [0.0, -np.inf]


def test_values_and_tops_of_other_columns_are_read_back(tmp_path):
    advantage = tuple(np.asarray(each, np.float32) for each in ([np.nan, 1, -1], [np.nan, np.nan, 0]))
    sampled = dump_with_tops().columns
    columns = {"values/advantage": advantage, "logprobs/rollout": sampled["logprobs/rollout"]}
    tops = {name: sampled[name] for name in ("top_ids", "top_logprobs")}
    of_rollout = {f"{name}/rollout": arrays for name, arrays in tops.items()}
    dump = dataclasses.replace(dump_with_tops(), columns=columns | of_rollout)
    found = read_dump(write_dump(tmp_path / "x.parquet", dump))
    assert list(found.columns) == ["logprobs/rollout", "top_ids/rollout", "values/advantage", "top_logprobs/rollout"]
    for name, arrays in dump.columns.items():
        for a, b in zip(found.columns[name], arrays, strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
    with pytest.raises(ValueError, match="likeliest tokens must be of a column, got 'x'"):
        dataclasses.replace(dump, columns=columns | {f"{name}/x": arrays for name, arrays in tops.items()})
    with pytest.raises(ValueError, match=r"values 'advantage' must have 3 entries, got shape \(1,\)"):
        dataclasses.replace(dump, columns=columns | {"values/advantage": (np.zeros(1), np.zeros(3))})


def test_values_of_jsonl_may_cover_the_response_alone(tmp_path):
    line = {"prompt_ids": [1, 2], "response_ids": [7], "logprobs": {"rollout": [-1.0]}}
    path = write_lines(tmp_path / "x.jsonl", line | {"values": {"entropy": [0.5]}}, line)
    values = read_tokens(path).values["entropy"]
    np.testing.assert_equal([each.tolist() for each in values], [[np.nan, np.nan, 0.5], [np.nan] * 3])


def test_a_dump_without_likeliest_tokens_is_as_before(tmp_path):
    table = pq.read_table(write_dump(tmp_path / "x.parquet", small_dump()))
    assert not {"top_ids", "top_logprobs"} & set(table.column_names)
    assert "cut" not in json.loads(table.schema.metadata[b"rljax.dump"])["columns"]["rollout"]
    assert "top_ids" not in read_dump(tmp_path / "x.parquet").columns


def test_likeliest_tokens_of_another_shape_are_refused():
    def tops(ids, logprobs):
        return {"top_ids": [ids], "top_logprobs": [logprobs]}

    ids, values = np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"top_ids must have 2 lists of 3 tokens, got shape \(1, 3\)"):
        make_dump(["a"], [[1, 2]], [[True, True]], {}, columns=tops(ids[:1], values[:1]))
    with pytest.raises(ValueError, match="top_ids and top_logprobs must have the same shapes"):
        make_dump(["a"], [[1, 2]], [[True, True]], {}, columns=tops(ids, values[:, :2]))
    with pytest.raises(ValueError, match="top_ids must have 2 sequences, got 1"):
        make_dump(["a", "b"], [[1, 2]] * 2, [[True, True]] * 2, {}, columns=tops(ids, values))


def test_an_empty_dump_and_one_without_columns_survive(tmp_path):
    assert read_dump(write_dump(tmp_path / "x", TokenDump((), (), ()))).sequence_ids == ()
    bare = make_dump(["a"], [[1]], [[True]], {})
    assert_same(read_dump(write_dump(tmp_path / "y", bare)), bare)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "dump version 2, expected 1"),
        ({"columns": {}}, r"x\.parquet: columns and sources must match, got \['rollout', 'trainer'\], \[\]"),
    ],
)
def test_another_version_or_damaged_metadata_is_refused(tmp_path, change, message):
    path = write_dump(tmp_path / "x.parquet", small_dump())
    table = pq.read_table(path)
    note = json.loads(table.schema.metadata[b"rljax.dump"]) | change
    pq.write_table(table.replace_schema_metadata({"rljax.dump": json.dumps(note)}), path)
    with pytest.raises(ValueError, match=message):
        read_dump(path)


def test_foreign_parquet_is_refused(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="not a token dump"):
        read_tokens(tmp_path / "x.parquet")


def test_a_column_of_another_type_is_refused(tmp_path):
    path = write_dump(tmp_path / "x.parquet", small_dump())
    table = pq.read_table(path)
    wide = table["token_ids"].cast(pa.list_(pa.int64()))
    pq.write_table(table.set_column(1, "token_ids", wide).replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(ValueError, match=r"'token_ids' must be list<.*int32>, got list<.*int64>"):
        read_dump(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a", "a"], [[1], [2]], [[True]] * 2, {}), "distinct, got \\['a'\\]"),
        ((["a"], [[1, 2]], [[True]], {}), "response_mask must have 2 entries, got shape \\(1,\\)"),
        ((["a"], [[1, 2]], [[True, True]], {"x": [[-1.0]]}), "column 'x' must have 2 entries"),
        ((["a"], [[]], [[]], {}), "integers"),
        ((["a"], [[1.5]], [[True]], {}), "integers in .* got float64"),
        ((["a"], [[-1]], [[True]], {}), "integers in"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_dump(*arguments)


def test_a_temperature_must_be_positive():
    with pytest.raises(ValueError, match="got 0"):
        ColumnSource(temperature=0.0)


def test_an_unknown_role_is_refused():
    with pytest.raises(ValueError, match="one of trainer, rollout or empty, got 'engine'"):
        ColumnSource(role="engine")


def test_a_file_of_before_roles_is_read(tmp_path):
    """In a file from before roles, the metadata of a column has no field ``role``."""
    path = write_dump(tmp_path / "x.parquet", small_dump())
    table = pq.read_table(path)
    note = json.loads(table.schema.metadata[b"rljax.dump"])
    for source in note["columns"].values():
        del source["role"]
    pq.write_table(table.replace_schema_metadata({"rljax.dump": json.dumps(note)}), path)
    dump = read_dump(path)
    assert dump.sources["rollout"] == ColumnSource("vllm", "bfloat16", "sha256:12", 0.7)
    assert (dump.role("rollout"), dump.role("trainer")) == ("rollout", "trainer")


def write_lines(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def test_jsonl_in_its_two_forms_with_a_header(tmp_path):
    header = {"rljax_tokens": 1, "columns": {"x": {"dtype": "float16"}}, "sampling": {"temperature": 1.0}}
    whole = {"sequence_id": "s", "token_ids": [1, 2], "response_mask": [0, 1], "logprobs": {"x": [None, -2.0]}}
    parts = {"prompt_ids": [1, 2], "response_ids": [3], "logprobs": {"x": [-0.5]}}
    dump = read_tokens(write_lines(tmp_path / "x.jsonl", header, whole, parts))
    expected = make_dump(
        ["s", "1"],
        [[1, 2], [1, 2, 3]],
        [[False, True], [False, False, True]],
        {"x": [[None, -2.0], [None, None, -0.5]]},
        {"x": ColumnSource(dtype="float16")},
        {"temperature": 1.0},
    )
    assert_same(dump, expected)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"token_ids": [1]}, "x.jsonl:2: 'response_mask' is missing"),
        (
            {"prompt_ids": [1], "response_ids": [2], "logprobs": {"x": [1, 2, 3]}},
            ":2: sequence '1': column 'x' must have 2 entries, got shape",
        ),
        ({"prompt_ids": [1], "response_ids": [2], "logprobs": {}}, "has columns \\[\\], expected \\['x'\\]"),
        (
            {"prompt_ids": [1], "response_ids": [2.5], "logprobs": {"x": [1]}},
            ":2: sequence '1': token ids must be integ",
        ),
        ({"rljax_tokens": 1}, ":2: expected one header of version 1 in the first line"),
        ([1], ":2: expected a JSON object, got list"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, record, message):
    good = {"prompt_ids": [1], "response_ids": [2], "logprobs": {"x": [-1.0]}}
    path = write_lines(tmp_path / "x.jsonl", good, record)
    with pytest.raises(ValueError, match=message):
        read_tokens(path)


def prime_rl_record(number, **changes):
    return {
        "schema_version": 1,
        "step": 7,
        "export_step": 3,
        "rank": 0,
        "export_sequence_idx": number,
        "run_id": None,
        "token_ids": [4, 5, 6],
        "loss_mask": [False, True, True],
        "inference_logprobs": [0.0, -0.25, -0.5],
        "trainer_logprobs": [None, -0.25, -0.75],
    } | changes


def test_prime_rl_export_as_file_and_as_directory(tmp_path):
    (tmp_path / "step_3").mkdir()
    path = write_lines(tmp_path / "step_3" / "rank_0.jsonl", prime_rl_record(0), prime_rl_record(1, run_id="r"))
    for place in (path, tmp_path):
        dump = read_tokens(place)
        assert dump.sequence_ids == ("3/0/0", "r/3/0/1")
        np.testing.assert_array_equal(dump.logprobs["trainer"][0], np.float32([np.nan, -0.25, -0.75]))
        assert (dump.role("trainer"), dump.role("inference")) == ("trainer", "rollout")
        np.testing.assert_array_equal(dump.logprobs["inference"][1], np.float32([0.0, -0.25, -0.5]))
        np.testing.assert_array_equal(dump.response_mask[0], [False, True, True])


def test_prime_rl_of_another_schema_is_refused(tmp_path):
    with pytest.raises(ValueError, match="schema_version 2, expected 1"):
        read_tokens(write_lines(tmp_path / "rank_0.jsonl", prime_rl_record(0, schema_version=2)))


def test_a_directory_without_an_export_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected rank_\*"):
        read_tokens(tmp_path)


def test_infinities_as_text_are_numbers():
    dump = make_dump(["a"], [[1, 2, 3]], [[True] * 3], {"x": [[None, "-inf", "-0.25"]]})
    np.testing.assert_array_equal(dump.logprobs["x"][0], np.float32([np.nan, -np.inf, -0.25]))
    with pytest.raises(ValueError, match="must be numbers"):
        make_dump(["a"], [[1, 2]], [[True] * 2], {"x": [["low", -1.0]]})


def test_prime_rl_in_its_older_form(tmp_path):
    """The older export has an object for each token and no ``export_step``, under the same version."""
    old = {key: value for key, value in prime_rl_record(0).items() if key in ("schema_version", "step", "rank")}
    tokens = [
        {"id": 4, "loss_mask": False, "inference_logprob": 0.0, "trainer_logprob": None},
        {"id": 5, "loss_mask": True, "inference_logprob": -0.25, "trainer_logprob": -0.5},
    ]
    dump = read_tokens(write_lines(tmp_path / "rank_0.jsonl", old | {"export_sequence_idx": 0, "tokens": tokens}))
    assert dump.sequence_ids == ("7/0/0",)
    np.testing.assert_array_equal(dump.token_ids[0], [4, 5])
    np.testing.assert_array_equal(dump.response_mask[0], [False, True])
    np.testing.assert_array_equal(dump.logprobs["trainer"][0], np.float32([np.nan, -0.5]))


def check_reply(dump):
    np.testing.assert_array_equal(dump.token_ids[0], [1, 2, 7, 8])
    np.testing.assert_array_equal(dump.response_mask[0], [False, False, True, True])
    np.testing.assert_array_equal(dump.logprobs["rollout"][0], np.float32([np.nan, np.nan, -0.5, -1.5]))
    assert dump.role("rollout") == "rollout"


LISTED = [{"7": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -1.0}}, {"8": {"logprob": -1.5}}]
NAMED = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -1.5}]
PROMPT = {"prompt_token_ids": [1, 2]}
SGLANG = {
    "prompt_tokens": 2,
    "input_token_logprobs": [[None, 1, None], [-3.0, 2, None]],
    "output_token_logprobs": [[-0.5, 7, "a"], [-1.5, 8, "b"]],
}


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": [{"token_ids": [7, 8], "logprobs": {"token_logprobs": [-0.5, -1.5]}, **PROMPT}]},
        {"choices": [{"token_ids": [7, 8], "logprobs": {"content": NAMED}}], **PROMPT},
        {"choices": [{"message": {"content": "x"}, "logprobs": {"content": NAMED}}], **PROMPT},
        {"outputs": [{"token_ids": [7, 8], "logprobs": LISTED}], **PROMPT},
        {"prompt_ids": [1, 2], "response_ids": [7, 8], "logprobs": {"rollout": LISTED}},
        {"text": "x", "meta_info": SGLANG},
        {"text": "x", "meta_info": SGLANG | {"input_token_logprobs": []}, **PROMPT},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_replies_of_servers_are_read(tmp_path, reply, indent):
    (tmp_path / "x.json").write_text(json.dumps(reply, indent=indent))
    check_reply(read_tokens(tmp_path / "x.json"))
    (tmp_path / "x.json").write_text(json.dumps([reply, reply], indent=indent))
    assert len(read_tokens(tmp_path / "x.json").sequence_ids) == 2


NEMO = {
    "content": "x",
    "input_lengths": 4,
    "token_ids": [1, 2, 7, 8, 0],
    "token_loss_mask": [0, 0, 1, 1, 0],
    "sample_loss_mask": 1.0,
    "generation_logprobs": [0.0, 0.0, -0.5, -1.5, 0.0],
    "prev_logprobs": [0.0, -3.0, -0.5, -1.25, 0.0],
}


def test_the_training_data_of_nemo_rl_is_read(tmp_path):
    dump = read_tokens(write_lines(tmp_path / "train_data_step1.jsonl", NEMO, NEMO | {"sample_loss_mask": 0.0}))
    np.testing.assert_array_equal(dump.token_ids[0], [1, 2, 7, 8])
    np.testing.assert_array_equal(dump.logprobs["rollout"][0], np.float32([0, 0, -0.5, -1.5]))
    np.testing.assert_array_equal(dump.logprobs["trainer"][0], np.float32([0, -3, -0.5, -1.25]))
    np.testing.assert_array_equal(dump.response_mask[0], [False, False, True, True])
    assert not dump.response_mask[1].any()


def test_the_rollouts_of_miles_are_read(tmp_path):
    rows = {"tokens": [[1, 2, 7, 8]], "response_length": [2], "loss_mask": [[1, 1]], "status": [b"pickled"]}
    table = pa.table(rows | {"rollout_log_probs": [[-0.5, -1.5]]})
    pq.write_table(table.replace_schema_metadata({"rollout_id": "3"}), tmp_path / "rollout_3.parquet")
    check_reply(read_tokens(tmp_path / "rollout_3.parquet"))
    pq.write_table(pa.table(rows | {"loss_mask": [None]}), tmp_path / "x.parquet")
    bare = read_tokens(tmp_path / "x.parquet")
    assert (bare.logprobs, bare.response_mask[0].tolist()) == ({}, [False, False, True, True])
    pq.write_table(pa.table(rows | {"response_length": [-(10**12)]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="at most the 4 tokens"):
        read_tokens(tmp_path / "x.parquet")
    pq.write_table(pa.table(rows | {"rollout_log_probs": [b"x"]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="pickled its column 'rollout_log_probs'"):
        read_tokens(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"choices": [{"message": {"content": "x"}, "logprobs": {"content": [{"token": "x", "logprob": -1}]}}]},
            "reply",
        ),
        ({"choices": [{"token_ids": [7], "logprobs": None, **PROMPT}]}, "without log-probabilities"),
        ({"choices": {"x": 1}}, "list of choices"),
        ({"choices": [{"token_ids": [7], "logprobs": {"content": [1]}}], **PROMPT}, "not of the form"),
        ({"input": "1+1=", "output": "2", "score": 1.0, "step": 3}, "a log of texts"),
        ({"meta_info": {"output_token_logprobs": []}}, "reply .* SGLang with return_logprob, logprob_start_len 0"),
        (
            {"meta_info": {"output_token_logprobs": [[-0.5, 7]], "prompt_tokens": 3}},
            "reply without token ids of prompt",
        ),
        ({"meta_info": {"output_token_logprobs": [[-0.5]]}}, "not of the form"),
        ({key: NEMO[key] for key in ("content", "prev_logprobs")}, "NeMo-RL's training data .* no token_ids"),
        ({"prompt_ids": [1], "response_ids": [6], "logprobs": {"x": [{"7": -1.0}]}}, "its id 6 is not among"),
    ],
)
def test_what_holds_no_tokens_is_named(tmp_path, record, words):
    with pytest.raises(ValueError, match=words):
        read_tokens(write_lines(tmp_path / "x.jsonl", record))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x93NUMPY\x01\x00", "a NumPy array"),
        (b"\x1f\x8b\x08\x00", "unpack it first"),
        (b"\x58\x00\x00\x00\x00\x00\x00\x00{}", "a safetensors file"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path, content, words):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_tokens(tmp_path / "x")
    np.savez(tmp_path / "y.npz", rollout=np.zeros(2), trainer=np.zeros(2))
    with pytest.raises(ValueError, match=r"NumPy archive \(.npz\) of the arrays 'rollout, trainer"):
        read_tokens(tmp_path / "y.npz")


class Trap:
    """An object that fails the test if it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize("name", ["x.pt", "x.jsonl"])
def test_pickles_are_refused_unread_with_the_reason(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"runs whatever code it holds.*export JSONL"):
        read_tokens(tmp_path / name)


def test_bytes_of_no_known_kind_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00\x01" * 5)
    with pytest.raises(ValueError, match="not UTF-8"):
        read_tokens(tmp_path / "x")


def test_no_python_runs_for_a_token(tmp_path):
    def calls(tokens):
        ids, logprobs = np.ones(tokens, np.int32), np.full(tokens, -1, np.float32)
        columns = {"top_ids": np.ones((tokens, 2)), "top_logprobs": np.full((tokens, 2), -1), "values/advantage": ids}
        rows = [ids] * 3, [ids > 0] * 3, {"trainer": [logprobs] * 3}, {}, {}
        dump = make_dump(["a", "b", "c"], *rows, {name: [array] * 3 for name, array in columns.items()})
        path = tmp_path / "x.parquet"
        count_calls(lambda: (write_dump(path, dump), read_dump(path)))  # the first call imports modules
        return count_calls(lambda: (write_dump(path, dump), read_dump(path)))

    assert calls(4) == calls(4000)
