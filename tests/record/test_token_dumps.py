"""The exchange format keeps all that is put into it, and names the fault of anything else."""

import dataclasses
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile import Trap
from python_calls import count_calls
from records import full_dump
from toy_runs import refused

from rljax.commands import diagnose
from rljax.compare.importers import read_tokens
from rljax.record.token_dumps import ColumnSource, TokenDump, make_dump, read_dump, write_dump


def small_dump():
    rows = ["a", "b"], [[5, 6, 7], [8, 2]], [[False, True, True], [False, True]]
    columns = {"trainer": [[None, -0.5, "-inf"], [None, -1.25]], "rollout": [[0.0, -0.5, -3.0], [0.0, -1.0]]}
    sources = {"rollout": ColumnSource("vllm", "bfloat16", "sha256:12", 0.7, "rollout")}
    return make_dump(*rows, columns, sources, {"temperature": 0.7, "top_p": 1.0})


def dump_with_values(column="rollout"):
    columns = dict(full_dump().columns)
    columns |= {f"{name}/{column}": columns.pop(name) for name in ("top_ids", "top_logprobs")}
    return dataclasses.replace(full_dump(), columns=columns)


def write_lines(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


PARTS = {"prompt_ids": [1, 2], "response_ids": [7, 8]}
ONE = {"prompt_ids": [1], "response_ids": [2], "logprobs": {"x": [-1.0]}}
WHOLE = {"token_ids": [1, 2, 7, 8], "response_mask": [0, 0, 1, 1]}


def assert_same(got, expected):
    for name in ("sequence_ids", "sources", "sampling"):
        assert getattr(got, name) == getattr(expected, name)
    ours, theirs = ({**each.columns, "ids": each.token_ids, "mask": each.response_mask} for each in (got, expected))
    assert set(ours) == set(theirs)
    for name, arrays in ours.items():
        for array, other in zip(arrays, theirs[name], strict=True):
            np.testing.assert_array_equal(array, other, strict=True)


DUMPS = [small_dump(), full_dump(), dump_with_values(), TokenDump((), (), ()), make_dump(["a"], [[1]], [[True]], {})]


@pytest.mark.parametrize("dump", DUMPS)
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, dump):
    path = write_dump(tmp_path / "deep" / "x.parquet", dump)
    assert_same(read_dump(path), dump)
    assert_same(read_tokens(path), dump)
    assert [file.name for file in path.parent.iterdir()] == ["x.parquet"]


def test_the_columns_are_typed_and_another_reader_sees_them(tmp_path):
    table = pq.read_table(write_dump(tmp_path / "x.parquet", small_dump()))
    for name, kind in {"token_ids": pa.int32(), "response_mask": pa.bool_(), "logprobs/rollout": pa.float32()}.items():
        assert table.schema.field(name).type == pa.list_(kind)
    assert table["logprobs/rollout"].to_pylist() == [[0.0, -0.5, -3.0], [0.0, -1.0]]
    note = json.loads(table.schema.metadata[b"rljax.dump"])
    assert (note["version"], "cut" in note["columns"]["rollout"]) == (1, False)
    assert not {"top_ids", "top_logprobs"} & set(table.column_names)
    table = pq.read_table(write_dump(tmp_path / "x.parquet", full_dump()))
    assert table["top_ids"].to_pylist() == [[[-1, -1], [7, 3], [2, 9]], [[-1, -1], [-1, -1], [4, -1]]]
    assert table["top_logprobs"].to_pylist()[1][2] == [0.0, -np.inf]
    found = read_dump(write_dump(tmp_path / "x.parquet", dump_with_values()))
    assert list(found.columns) == ["logprobs/rollout", "top_ids/rollout", "values/advantage", "top_logprobs/rollout"]


def with_note(table, change):
    """Returns a table of a dump after ``change`` was made to its JSON object, without the checksum."""
    note = json.loads(table.schema.metadata[b"rljax.dump"])
    change(note)
    return table.replace_schema_metadata({"rljax.dump": json.dumps(note)})


def with_wide_ids(table):
    wide = table["token_ids"].cast(pa.list_(pa.int64()))
    return table.set_column(1, "token_ids", wide).replace_schema_metadata(table.schema.metadata)


def test_a_file_of_another_form_is_refused(tmp_path):
    path = write_dump(tmp_path / "x.parquet", small_dump())
    table = pq.read_table(path)
    for changed, message in (
        (with_note(table, lambda note: note.update(version=2)), "dump version 2, expected 1"),
        (with_note(table, lambda note: note.update(columns={})), r"x\.parquet: columns and sources must"),
        (with_wide_ids(table), r"'token_ids' must be list<.*int32>, got list<.*int64>"),
        (pa.table({"step": [1], "entropy": [0.5]}), "no token ids of a known name; export a history of metrics"),
    ):
        pq.write_table(changed, path)
        with pytest.raises(ValueError, match=message):
            read_tokens(path)
    # In a file from before roles, the metadata of a column has no field ``role``.
    pq.write_table(with_note(table, lambda note: [each.pop("role") for each in note["columns"].values()]), path)
    dump = read_dump(path)
    assert dump.sources["rollout"] == ColumnSource("vllm", "bfloat16", "sha256:12", 0.7)
    assert (dump.role("rollout"), dump.role("trainer")) == ("rollout", "trainer")


def test_what_does_not_fit_together_is_refused():
    pair, ids, numbers = (["a"], [[1, 2]], [[True] * 2]), np.zeros((1, 2, 3), np.int32), np.zeros((1, 2, 3), np.float32)
    tops = {"top_ids": ids, "top_logprobs": numbers}
    for arguments, message in (
        ((["a", "a"], [[1], [2]], [[True]] * 2, {}), "distinct, got \\['a'\\]"),
        ((["a"], [[1, 2]], [[True]], {}), "response_mask must have 2 entries, got shape \\(1,\\)"),
        ((*pair, {"x": [[-1.0]]}), "column 'x' must have 2 entries"),
        ((*pair, {"x": [["low", -1.0]]}), "must be numbers"),
        ((*pair, {}, {}, {}, {"values/v": [[0.5]]}), "values 'v' must have 2 entries, got shape"),
        ((["a"], [[]], [[]], {}), "integers"),
        ((["a"], [[1.5]], [[True]], {}), "integers in .* got float64"),
        ((["a"], [[-1]], [[True]], {}), "integers in"),
        ((*pair, {}, {}, {}, tops | {"top_ids": ids[:, :1]}), r"must have 2 lists of 3 tokens, got shape \(1, 3\)"),
        ((*pair, {}, {}, {}, tops | {"top_logprobs": numbers[..., :2]}), "top_logprobs must have the same shapes"),
        ((["a", "b"], [[1, 2]] * 2, [[True] * 2] * 2, {}, {}, {}, tops), "top_ids must have 2 sequences, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_dump(*arguments)
    with pytest.raises(ValueError, match="got 0"):
        ColumnSource(temperature=0.0)
    with pytest.raises(ValueError, match="one of trainer, rollout or empty, got 'engine'"):
        ColumnSource(role="engine")
    with pytest.raises(ValueError, match="likeliest tokens must be of a column, got 'x'"):
        dump_with_values("x")


def test_jsonl_in_its_two_forms_with_a_header(tmp_path):
    """Numbers and values may cover the response alone, and a sequence may have no values."""
    header = {"rljax_tokens": 1, "columns": {"x": {"dtype": "float16"}}, "sampling": {"temperature": 1.0}}
    whole = {"sequence_id": "s", "token_ids": [1, 2], "response_mask": [0, 1], "logprobs": {"x": [None, -2.0]}}
    parts = {"prompt_ids": [1, 2], "response_ids": [3], "logprobs": {"x": [-0.5]}, "values": {"entropy": [0.5]}}
    path = write_lines(tmp_path / "x.jsonl", header, whole, parts)
    rows = ["s", "1"], [[1, 2], [1, 2, 3]], [[False, True], [False, False, True]]
    columns, values = {"x": [[None, -2.0], [None, None, -0.5]]}, {"values/entropy": [[None] * 2, [None, None, 0.5]]}
    expected = make_dump(*rows, columns, {"x": ColumnSource(dtype="float16")}, {"temperature": 1.0}, values)
    assert_same(read_tokens(path), expected)
    path.unlink()
    # A folder is one dump: each process writes a file, begins it with the header, and numbers its sequences from 0.
    header = {"rljax_tokens": 1, "columns": {"rollout": {"dtype": "float16"}}, "sampling": {"temperature": 0.7}}
    for number in range(2):
        record = PARTS | {"sequence_id": "0", "rollout_logprobs": [-0.5, -1.5 - number]}
        write_lines(tmp_path / f"tokens_{number}.jsonl", header, record)
    dump = read_tokens(tmp_path)
    assert (dump.sequence_ids, dump.sources["rollout"].dtype) == (("tokens_0/0", "tokens_1/0"), "float16")
    assert [values[-1] for values in dump.logprobs["rollout"]] == [-1.5, -2.5]
    write_lines(tmp_path / "tokens_1.jsonl", header | {"sampling": {}}, record)
    with pytest.raises(ValueError, match=r"tokens_1.jsonl:1: expected one header"):
        read_tokens(tmp_path)


def response_of(dump, sequence=0):
    """Returns the token ids of a sequence, the places of its response, and the numbers at these by column."""
    places = np.flatnonzero(dump.response_mask[sequence])
    columns = {**dump.logprobs, **dump.values}
    numbers = {name: vectors[sequence][places].tolist() for name, vectors in columns.items()}
    return dump.token_ids[sequence].tolist(), places.tolist(), numbers


# What is read of most of the records below.
READ = [1, 2, 7, 8], [2, 3], {"rollout": [-0.5, -1.5]}


def prime_rl_record(number, **changes):
    record = {"schema_version": 1, "step": 7, "export_step": 3, "rank": 0, "export_sequence_idx": number}
    record |= {"run_id": None, "token_ids": [4, 5, 6], "loss_mask": [False, True, True]}
    record |= {"inference_logprobs": [0.0, -0.25, -0.5], "trainer_logprobs": [None, -0.25, -0.75]}
    record |= {"entropy": [0.0, 1.0, 2.0], "advantages": [0.0, 0.5, 0.5]}
    return record | changes


def test_prime_rl_export_as_file_and_as_directory(tmp_path):
    (tmp_path / "step_3").mkdir()
    path = write_lines(tmp_path / "step_3" / "rank_0.jsonl", prime_rl_record(0), prime_rl_record(1, run_id="r"))
    numbers = {"inference": [-0.25, -0.5], "trainer": [-0.25, -0.75], "entropy": [1.0, 2.0], "advantage": [0.5, 0.5]}
    for place in (path, tmp_path):
        dump = read_tokens(place)
        assert dump.sequence_ids == ("3/0/0", "r/3/0/1")
        assert response_of(dump) == response_of(dump, 1) == ([4, 5, 6], [1, 2], numbers)
        assert (dump.role("trainer"), dump.role("inference")) == ("trainer", "rollout")
    with pytest.raises(ValueError, match="schema_version 2, expected 1"):
        read_tokens(write_lines(path, prime_rl_record(0, schema_version=2)))
    # The older export has an object for each token and no ``export_step``, under the same version.
    names = ("id", "loss_mask", "inference_logprob", "trainer_logprob")
    tokens = [dict(zip(names, cells, strict=True)) for cells in ((4, False, 0.0, None), (5, True, -0.25, -0.5))]
    facts = {"schema_version": 1, "step": 7, "rank": 0, "export_sequence_idx": 0}
    dump = read_tokens(write_lines(path, facts | {"tokens": tokens}))
    assert dump.sequence_ids == ("7/0/0",)
    assert response_of(dump) == ([4, 5], [1], {"inference": [-0.25], "trainer": [-0.5]})
    path.unlink()
    with pytest.raises(ValueError, match=r"expected rank_\*"):
        read_tokens(tmp_path)


LISTED = [{"7": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -1.0}}, {"8": {"logprob": -1.5}}]
NAMED = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -1.5}]
PROMPT = {"prompt_token_ids": [1, 2]}
SGLANG = {"prompt_tokens": 2, "output_token_logprobs": [[-0.5, 7, "a"], [-1.5, 8, "b"]]}
SGLANG["input_token_logprobs"] = [[None, 1, None], [-3.0, 2, None]]


def test_replies_of_servers_are_read(tmp_path):
    for reply in (
        {"choices": [{"token_ids": [7, 8], "logprobs": {"token_logprobs": [-0.5, -1.5]}, **PROMPT}]},
        {"choices": [{"token_ids": [7, 8], "logprobs": {"content": NAMED}}], **PROMPT},
        {"choices": [{"message": {"content": "x"}, "logprobs": {"content": NAMED}}], **PROMPT},
        {"outputs": [{"token_ids": [7, 8], "logprobs": LISTED}], **PROMPT},
        PARTS | {"logprobs": {"rollout": LISTED}},
        {"text": "x", "meta_info": SGLANG},
        {"text": "x", "meta_info": SGLANG | {"input_token_logprobs": []}, **PROMPT},
    ):
        for indent in (None, 1):
            (tmp_path / "x.json").write_text(json.dumps(reply, indent=indent))
            dump = read_tokens(tmp_path / "x.json")
            assert (response_of(dump), dump.role("rollout")) == (READ, "rollout")
            (tmp_path / "x.json").write_text(json.dumps([reply, reply], indent=indent))
            assert len(read_tokens(tmp_path / "x.json").sequence_ids) == 2


NEMO = {"content": "x", "input_lengths": 4, "token_ids": [1, 2, 7, 8, 0], "token_loss_mask": [0, 0, 1, 1, 0]}
NEMO |= {"sample_loss_mask": 1.0, "generation_logprobs": [0.0, 0.0, -0.5, -1.5, 0.0]}
NEMO |= {"prev_logprobs": [0.0, -3.0, -0.5, -1.25, 0.0]}
TRL = {
    "prompt_ids": [[0, 1, 2], [1, 2, 3]],
    "prompt_mask": [[0, 1, 1], [1, 1, 1]],
    "completion_ids": [[7, 8, 9, 0], [7, 8, 9, 7]],
    "completion_mask": [[1, 1, 1, 0], [1, 1, 1, 1]],
    "tool_mask": [[1, 0, 1, 1], [1, 1, 1, 1]],
    "old_per_token_logps": [[-1.0, -2.0, -3.0, 0.0], [-1.0, -2.0, -3.0, -4.0]],
    "sampling_per_token_logps": [[-1.5, -2.5, -3.5, 0.0], [-1.5, -2.5, -3.5, -4.5]],
    **{"advantages": [0.5, -0.5], "num_items_in_batch": 7},
}
BOTH = {"trainer": [-1.0, -2.0], "rollout": [-1.5, -2.5]}
SIDES = WHOLE | {"policy_logprobs": [0.0, 0.0, -1.0, -2.0], "loss_weights": [0.0, 0.0, 0.5, 0.5]}
NODES = [
    {"parent": None, "token_ids": [1, 2], "mask": [False, False], "logprobs": []},
    {"parent": 0, "token_ids": [3, 7, 8], "mask": [False, True, True], "logprobs": [-0.5, -1.5]},
    {"parent": 1, "token_ids": [4], "mask": [], "logprobs": []},
    {"parent": 2, "token_ids": [9], "mask": [True], "logprobs": [-2.5]},
    {"parent": 1, "token_ids": [5], "mask": [True], "logprobs": [-3.5]},
]


def test_the_data_of_other_projects_are_read(tmp_path):
    for records, expected in (
        # The training data of NeMo-RL; a sample may be left out of the loss.
        (
            [NEMO | {"advantages": [0.5] * 5}],
            [(*READ[:2], READ[2] | {"trainer": [-0.5, -1.25], "advantage": [0.5] * 2})],
        ),
        ([NEMO | {"sample_loss_mask": 0.0}], [([1, 2, 7, 8], [], {"rollout": [], "trainer": []})]),
        # A batch of TRL or tunix has padding before its prompts and after its responses.
        (
            [TRL],
            [
                ([1, 2, 7, 8, 9], [2, 4], {"trainer": [-1.0, -3.0], "rollout": [-1.5, -3.5]}),
                (
                    [1, 2, 3, 7, 8, 9, 7],
                    [3, 4, 5, 6],
                    {"trainer": [-1, -2, -3, -4], "rollout": [-1.5, -2.5, -3.5, -4.5]},
                ),
            ],
        ),
        # Beside the sampler's own numbers ``policy_logprobs`` are the trainer's, and weights beside a mask advantages.
        ([SIDES], [(*READ[:2], {"rollout": [-1.0, -2.0], "advantage": [0.5] * 2})]),
        ([SIDES | {"behavior_logprobs": [0, 0, -1.5, -2.5]}], [(*READ[:2], BOTH | {"advantage": [0.5] * 2})]),
        ([WHOLE | {"log_probs": [0, 0, -1.0, -2.0], "infer_logprobs": [0, 0, -1.5, -2.5]}], [(*READ[:2], BOTH)]),
        # A node of a trace of prime-rl has its own tokens alone. What two branches share is marked in the first.
        (
            [{"id": "a", "traces": [{"nodes": NODES}, {"nodes": []}]}, {"id": "b", "traces": []}],
            [
                ([1, 2, 3, 7, 8, 4, 9], [3, 4, 6], {"rollout": [-0.5, -1.5, -2.5]}),
                ([1, 2, 3, 7, 8, 5], [5], {"rollout": [-3.5]}),
            ],
        ),
    ):
        dump = read_tokens(write_lines(tmp_path / "x.jsonl", *records))
        assert [response_of(dump, number) for number in range(len(dump.token_ids))] == expected


def test_parquet_of_other_projects_is_read(tmp_path):
    path = tmp_path / "x.parquet"
    cells = ([1, 2], [7, 8], [1, 1], [-0.5, -1.5], [-0.5, -1.25])
    for names in (
        "prompt_ids completion_ids completion_mask sampling_per_token_logps old_per_token_logps",
        "prompts responses response_mask rollout_log_probs old_log_probs",
    ):
        columns = {name: [cell] for name, cell in zip(names.split(), cells, strict=True)}
        pq.write_table(pa.table(columns | {"reward": [1.0]}), path)
        assert response_of(read_tokens(path)) == (*READ[:2], READ[2] | {"trainer": [-0.5, -1.25]})
    rows = {"tokens": [[1, 2, 7, 8]], "response_length": [2], "loss_mask": [[1, 1]], "status": [b"pickled"]}  # miles
    table = pa.table(rows | {"rollout_log_probs": [[-0.5, -1.5]]})
    pq.write_table(table.replace_schema_metadata({"rollout_id": "3"}), path)
    assert response_of(read_tokens(path)) == READ
    pq.write_table(pa.table(rows | {"loss_mask": [None]}), path)
    assert response_of(read_tokens(path)) == (*READ[:2], {})
    for change, said in (
        ({"response_length": [-(10**12)]}, "at most the 4 tokens"),
        ({"rollout_log_probs": [b"x"]}, "pickled its column 'rollout_log_probs'"),
    ):
        pq.write_table(pa.table(rows | change), path)
        with pytest.raises(ValueError, match=said):
            read_tokens(path)


def test_the_names_of_other_projects_are_read(tmp_path):
    for record in (
        PARTS | {"rollout_logprobs": [-0.5, -1.5], "entropy": [1.0, 2.0]},
        PARTS | {"logprobs/rollout": [-0.5, -1.5], "values/entropy": [1.0, 2.0]},
        PARTS | {"logprobs": {"rollout": [-0.5, -1.5]}, "values": {"entropy": [1.0, 2.0]}, "old_log_probs": None},
        WHOLE | {"rollout_log_probs": [None, None, -0.5, -1.5], "entropies": [None, None, 1.0, 2.0]},
        {"prompts": [1, 2], "responses": [7, 8], "sampling_logprobs": [-0.5, -1.5], "entropy": [1.0, 2.0]},
        {"tokens": [1, 2, 7, 8], "response_length": 2, "rollout_log_probs": [-0.5, -1.5], "entropy": [1.0, 2.0]},
        {"tokens": [1, 2, 7, 8], "response_lengths": 2, "loss_masks": [1, 1]}
        | {"rollout_log_probs": [-0.5, -1.5], "entropy": [1.0, 2.0]},
        {"prompt_tokens": [1, 2], "response_tokens": [7, 8], "logprobs": [-0.5, -1.5], "entropy": [1.0, 2.0]},
        {"prompt_ids": [[1, 2]], "completion_ids": [[7, 8]], "logprobs": [[[-0.5], [-1.5]]], "entropy": [[1.0, 2.0]]},
        {"input_ids": [[1, 2, 7, 8, 0]], "loss_masks": [[0, 0, 1, 1, 0]]}
        | {"policy_logprobs": [[None, None, -0.5, -1.5, 0.0]], "entropy": [[None, None, 1.0, 2.0, 0.0]]},
        # Levanter's older batches: the tokens one later, and weights of 0 outside the response
        {"input_ids": [[1, 2, 7, 0]], "target_ids": [[2, 7, 8, 0]], "loss_weights": [[0.0, -0.25, -0.25, 0.0]]}
        | {"policy_logprobs": [[None, -0.5, -1.5, 0.0]], "entropy": [[None, 1.0, 2.0, 0.0]]},
    ):
        dump = read_tokens(write_lines(tmp_path / "x.jsonl", record | {"temperature": 0.7, "top_p": 0.9}))
        advantages = {"advantage": [-0.25, -0.25]} if "loss_weights" in record else {}
        assert response_of(dump) == (*READ[:2], READ[2] | {"entropy": [1.0, 2.0]} | advantages)
        assert np.isnan(dump.logprobs["rollout"][0][:2]).all()
        assert dump.sampling == {"temperature": 0.7, "top_p": 0.9}


def test_what_holds_no_tokens_is_named(tmp_path):
    for record, words in (
        ({"choices": [{"message": {}, "logprobs": {"content": [{"token": "x", "logprob": -1}]}}]}, "reply"),
        ({"choices": [{"token_ids": [7], "logprobs": None, **PROMPT}]}, "without log-probabilities"),
        ({"choices": [{"token_ids": [7], "logprobs": {"content": [1]}}], **PROMPT}, "not of the form"),
        ({"input": "1+1=", "output": "2", "score": 1.0, "step": 3}, "a log of texts"),
        ({"meta_info": {"output_token_logprobs": []}}, "reply .* SGLang with return_logprob, logprob_start_len 0"),
        ({"meta_info": {"output_token_logprobs": [[-0.5, 7]], "prompt_tokens": 3}}, "reply without token ids of prom"),
        ({key: NEMO[key] for key in ("content", "prev_logprobs")}, "NeMo-RL's training data .* no token_ids"),
        (ONE | {"logprobs": {"x": [{"7": -1.0}]}}, "its id 2 is not among"),
        (ONE | {"logprobs": [-1.0], "inference_logprobs": [-1.5]}, "logprobs and values must be objects of lists"),
        ({"traces": [{"nodes": [{"parent": 1}, {"parent": 0}]}]}, "x.jsonl:1: a trace must have nodes, each after its"),
        ({"traces": [{"nodes": [{"token_ids": [1, 2], "mask": [1, 1], "logprobs": [-1.0]}]}]}, "a node has 1 log-prob"),
        ({"traces": []}, "there is no sequence in it"),
    ):
        with pytest.raises(ValueError, match=words):
            read_tokens(write_lines(tmp_path / "x.jsonl", record))
    for record, words in (  # of the second line
        ({"token_ids": [1]}, "x.jsonl:2: 'response_mask' is missing"),
        (ONE | {"logprobs": {"x": [1, 2, 3]}}, ":2: sequence '1': column 'x' must have 2 entries, got shape"),
        (ONE | {"logprobs": {}}, "has columns \\[\\], expected \\['x'\\]"),
        (ONE | {"response_ids": [2.5]}, ":2: sequence '1': token ids must be integ"),
        ([1], ":2: expected a JSON object, got list"),
    ):
        with pytest.raises(ValueError, match=words):
            read_tokens(write_lines(tmp_path / "x.jsonl", ONE, record))


def test_files_of_other_kinds_are_refused(tmp_path):
    """Pickles are refused unread, because they run whatever code they hold."""
    trap = pickle.dumps(Trap(str(tmp_path / "made"))), r"runs whatever code it holds.*export JSONL"
    for name, content, words in (
        ("x", b"\x93NUMPY\x01\x00", "not UTF-8"),
        ("x", b"PK\x03\x04", "an archive that may hold one"),
        ("x", b"\x58\x00\x00\x00\x00\x00\x00\x00{}", "x:1: "),
        ("x.pt", *trap),
        ("x.jsonl", *trap),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_tokens(tmp_path / name)
    assert not (tmp_path / "made").exists()
    said = refused(diagnose.main, [write_lines(tmp_path / "x.jsonl", PARTS | {"my_logps": [-1.0, -2.0]})])
    assert "x.jsonl has token ids, but no log-probabilities: rljax docs compare lists" in said


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
