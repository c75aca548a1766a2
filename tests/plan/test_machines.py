"""Tests of machines by name."""

import pytest

from rljax.plan.machines import H100, TPUS, parse_machine


def test_machines_by_name():
    two = parse_machine("h100:2x8")
    assert (two.platform, two.topology, two.card) == ("cuda", "2x1x8", H100)
    pod = parse_machine("tpu:v6e:4x8")
    assert (pod.platform, pod.topology, pod.card) == ("tpu", "v6e:4x8", TPUS["v6e"])


@pytest.mark.parametrize("name", ["", "h100", "h100:8", "h100:0x8", "h100:1x8x2", "tpu:v9:2x2", "tpu:v5p", "cpu:4"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=r"--compile: no machine .* give h100:NODESxCARDS"):
        parse_machine(name)
