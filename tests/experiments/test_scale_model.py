"""Tests of the model of a step at the size of pods: arithmetic by hand, and the page's tables against the file."""

import json
from pathlib import Path

import pytest
import scale_model
from scale_model import MODELS, Decoding

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("lengths", "limit", "seconds"),
    [
        ([2, 4], 2, 2 * 2 + 2 * 1),  # two tokens of both, two of one
        ([2, 4], 1, 2 + 4),  # one after the other
        ([3, 1, 2], 2, 1 * 2 + 2 * 2),  # the third begins as soon as the second is done, and both others end at once
        ([], 2, 0),
    ],
)
def test_a_token_takes_as_many_seconds_as_requests_run(lengths, limit, seconds):
    assert scale_model.decode_seconds(lengths, limit, lambda running: running) == seconds


def test_servers_are_as_fast_as_published_and_between():
    decoding = Decoding(2, 100, ((2, 10), (4, 16)), "nobody")
    seconds = scale_model.token_seconds(decoding)
    assert [seconds(n) for n in (1, 2, 3, 4, 9)] == pytest.approx([0.2, 0.2, 0.225, 0.25, 0.25])
    # Six GPUs are three servers of two, with 10 and 40 tokens, 20 and 20, and 30. The first takes 10 x 0.2 + 30 x 0.2
    # seconds.
    assert scale_model.rollout_seconds([10, 20, 30, 40, 20], 6, decoding) == pytest.approx(8)


def compiled_row():
    """Returns a row with 2 s of products at half of the peak, 0.25 s of collectives, and 50 GB of gradients."""
    peak = scale_model.PEAK.value
    return {
        "flops_per_micro_batch": {"bfloat16": 0.75 * peak},
        "kernels": [
            {"per": "micro_batch", "flops": 0.25 * peak},
            {"per": "forward", "flops": peak},
        ],
        "roofline": {"micro_batch_s": {"links": 0.25}, "step_s": {"memory": 0.125}},
        "collectives": [
            {"per": "step", "across_nodes": True, "bytes": 50e9},
            {"per": "step", "across_nodes": False, "bytes": 7e9},
            {"per": "micro_batch", "across_nodes": True, "bytes": 7e9},
        ],
    }


def test_a_step_by_hand():
    """33 rows on 32 cards are two micro-batches. Four replicas send 2 x 3/4 of 50 GB each, at 50 GB/s."""
    assert scale_model.step_seconds(compiled_row(), 33, 32, 8, 0.5) == pytest.approx(2 * 2.25 + 0.125 + 1.5)
    assert scale_model.step_seconds(compiled_row(), 32, 8, 8, 0.5) == pytest.approx(4 * 2.25 + 0.125)
    assert scale_model.step_seconds(compiled_row(), 4, 4, 8, 0.5) == pytest.approx(2.25 + 0.125)


def test_publish_and_checkpoint_by_hand():
    # 53 GB take a second to the host and 53 seconds at 1 GB/s. The way back is no faster than the storage's 8 GB/s.
    assert scale_model.publish_seconds(53e9, 1e9, 1e12) == pytest.approx(1 + 53 + 53 / 8)
    assert scale_model.sharded_publish_seconds(16e9, 4) == pytest.approx(0.5 + 2)
    # 53e9 parameters are 636 GB. A card writes them in 12 s at 53 GB/s, and 16 cards in 0.75 s. Two nodes write 16
    # GB/s.
    assert scale_model.checkpoint_seconds(53e9, 16) == pytest.approx((12 / 16, 636 / 16))
    assert scale_model.checkpoint_seconds(53e9, 4) == pytest.approx((3, 636 / 8))


def test_what_is_hidden_counts_only_where_it_sticks_out():
    parts = {"rollout": 10.0, "parse and decode replies": 4.0, "step": 5.0, "checkpoint, in the background": 300.0}
    assert scale_model.total(parts) == 15
    assert scale_model.total(parts | {"parse and decode replies": 12.0}) == 17
    assert scale_model.total(parts | {"checkpoint, in the background": 340.0}) == 15 + 40 / 20


def test_nodes_are_shared_as_the_model_needs():
    small, large = MODELS
    assert [list(scale_model.layouts(nodes, small)) for nodes in (1, 2)] == [[(4, 4)], [(8, 8)]]
    assert list(scale_model.layouts(8, small)) == [(8, 56), (16, 48), (32, 32)]
    assert [list(scale_model.layouts(nodes, large)) for nodes in (1, 2)] == [[], []]
    assert list(scale_model.layouts(8, large)) == [(16, 48), (32, 32)]


def test_the_share_of_the_peak_counts_causal_attention():
    """With the whole square of attention the shares are 33% to 39%. Here only the half under the diagonal counts."""
    assert 0.33 < scale_model.trained_share() < 0.35


def test_rates_are_of_bytes_really_written():
    write, read = scale_model.measure_files(tensors=2, elements=2**16, rounds=2)
    assert 1e6 < write < 1e12
    assert 1e6 < read < 1e12


def test_the_page_shows_what_the_file_holds():
    record = json.loads((ROOT / "benchmarks/scale.json").read_text())
    page = (ROOT / "docs/scale.md").read_text()
    assert scale_model.steps_table(record["steps"]) in page
    for one in record["steps"]:
        if "parts" in one:
            assert one["total"] == pytest.approx(scale_model.total(one["parts"]))
