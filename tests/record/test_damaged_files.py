"""Damaged event files and token dumps are refused: no flipped bit changes a number or loses a row in silence."""

import random
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from records import full_dump
from toy_runs import ROOT

from rljax.data.files import read_rows
from rljax.errors import ConfigError
from rljax.record.event_files import scalar_rows
from rljax.record.token_dumps import read_dump, write_dump

SummaryWriter = pytest.importorskip("tensorboardX").SummaryWriter
masked_crc32c = pytest.importorskip("tensorboardX.record_writer").masked_crc32c


def flipped_at(whole, place, bits):
    """Returns the bytes with some bits of one of them flipped."""
    damaged = bytearray(whole)
    damaged[place] ^= bits
    return bytes(damaged)


def flipped(whole, draw):
    return flipped_at(whole, draw.randrange(len(whole)), 1 << draw.randrange(8))


@pytest.fixture
def events(tmp_path):
    """An event file of ten steps with one number each, in eleven records: the first one is the version of the form."""
    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step in range(1, 11):
            writer.add_scalar("response_length/mean", 100.0 + step, step)
    (path,) = (tmp_path / "tb").iterdir()
    return path


def starts(whole):
    """Yields where each record begins. The parts are a length of 8 bytes, a checksum, the event and a checksum."""
    start = 0
    while start < len(whole):
        yield start
        start += 8 + 4 + int.from_bytes(whole[start : start + 8], "little") + 4


def test_damage_of_an_event_file_is_refused_by_its_record(events, capsys):
    whole, draw = events.read_bytes(), random.Random(0)
    for _ in range(100):
        events.write_bytes(flipped(whole, draw))
        with pytest.raises(ConfigError, match=r"tfevents\S+: not a TensorBoard event file, or a damaged one: the "):
            list(scalar_rows(events))
    place = list(starts(whole))[6]
    no_event = [part + masked_crc32c(part).to_bytes(4, "little") for part in ((2).to_bytes(8, "little"), b"\xff\xff")]
    for content, said in (
        (flipped_at(whole, place + 3, 16), "the length of record 7 is wrong, after step 5"),
        (flipped_at(whole, place + 20, 16), "the checksum of record 7 is wrong, after step 5"),
        (b"".join(no_event), "record 1 is not an event, after no step"),
    ):
        events.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            list(scalar_rows(events))
    capsys.readouterr()
    for left in (1, 11, 12, 30):  # a file is read up to a cut record
        events.write_bytes(whole[: list(starts(whole))[-1] + left])
        rows = list(scalar_rows(events))
        assert rows == [{"step": step, "response_length/mean": 100.0 + step} for step in range(1, 10)]
        assert capsys.readouterr().err == f"{events} ends inside record 11: read up to step 9\n"


def contents(dump):
    columns = {**dump.columns, "ids": dump.token_ids, "mask": dump.response_mask}
    bits = {name: [each.tobytes() for each in arrays] for name, arrays in columns.items()}
    return dump.sequence_ids, dump.sources, dump.sampling, bits


def test_no_flipped_bit_changes_a_dump_in_silence(tmp_path):
    path, expected = tmp_path / "x.parquet", contents(full_dump())
    whole, draw, refused = write_dump(path, full_dump()).read_bytes(), random.Random(0), 0
    for _ in range(200):
        path.write_bytes(flipped(whole, draw))
        try:
            assert contents(read_dump(path)) == expected
        except ValueError:
            refused += 1
    assert refused > 60
    table = pq.read_table(write_dump(path, full_dump()))  # older files have no checksums
    pq.write_table(table.replace_schema_metadata({"rljax.dump": table.schema.metadata[b"rljax.dump"]}), path)
    assert contents(read_dump(path)) == expected


def test_what_no_page_covers_is_checked(tmp_path):
    for pattern, place, said in (
        # The footer's numbers are varints of twice the value: two rows are the byte 4, before the list of row groups.
        (rb"\x16\x04\x19", 1, "its row groups have 2 rows, and its footer says 0"),
        (rb"top_ids", 0, "the checksum of its column names and of 'rljax.dump' is wrong"),
        (rb'bfloat16", "engine', 1, "the checksum of its column names and of 'rljax.dump' is wrong"),
    ):
        path = write_dump(tmp_path / "x.parquet", full_dump())
        whole = path.read_bytes()
        footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
        path.write_bytes(flipped_at(whole, footer + re.search(pattern, whole[footer:]).start() + place, 4))
        with pytest.raises(ValueError, match=said):
            read_dump(path)


def test_a_damaged_page_of_trajectories_or_problems_is_refused(tmp_path):
    """Arrow gives no row and no error where the header of a page says that the page is another kind."""
    path = tmp_path / "x.parquet"
    table = pa.table({"prompt": ["unique text", "b"]})
    pq.write_table(table, path, compression=None, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"unique text", b"Unique text", 1))
    with pytest.raises(ValueError, match=r"cannot be read after row 0: .*CRC"):
        list(read_rows(path))
    pq.write_table(table, path, use_dictionary=False, write_page_checksum=True)
    path.write_bytes(flipped_at(path.read_bytes(), 5, 4))  # the kind of the first page, a varint behind its tag
    with pytest.raises(ValueError, match="cannot be read after row 0: the file says that it has 2"):
        list(read_rows(path))


@pytest.mark.harness
def test_no_thread_of_arrow_aborts_a_process(tmp_path):
    """A table that Arrow reads through a file of Python aborts one process in ten when its interpreter ends."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"step": [1] * 64, "completion": [f"It is {i} " * 100 for i in range(64)]}), path)
    words = "from rljax.record.token_dumps import parquet_file\n"
    words += f"with parquet_file({str(path)!r}) as file: file.read().to_pylist()"
    for _ in range(6):
        assert subprocess.run([sys.executable, "-c", words], cwd=ROOT, timeout=60).returncode == 0
