"""The exponents of growth are the slopes of the costs, and each case runs."""

import json

import growth
import numpy as np
import pytest


def test_the_slope_of_a_power_law_is_its_exponent():
    sizes = growth.doubling(1600, 4)
    assert sizes == [200, 400, 800, 1600]
    slope, half = growth.fit(sizes, [3.0 * size**1.5 for size in sizes])
    assert (slope, half) == (pytest.approx(1.5), pytest.approx(0, abs=1e-6))


def test_the_interval_is_wide_where_costs_do_not_lie_on_a_line():
    """The log2 costs are 0, 1, 2, 5.

    So the slope is 1.6, residuals are 0.4, -0.2, -0.8, 0.6 over 2 degrees, and t is 4.303.
    """
    slope, half = growth.fit([1, 2, 4, 8], [1, 2, 4, 32])
    assert slope == pytest.approx(1.6)
    assert half == pytest.approx(4.3027 * np.sqrt((0.16 + 0.04 + 0.64 + 0.36) / 2 / 5), rel=1e-4)


def test_the_program_writes_what_it_prints(tmp_path, capsys):
    growth.main(["--only", "the worst mix", "--shrink", "64", "--rounds", "1", "--json", str(tmp_path / "found.json")])
    (case,) = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert case["sizes"] == [4, 8, 16, 32, 64]
    assert f"{case['exponent']:.2f} ± {case['half_interval']:.2f} | 1 |" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["columns", "trackers", "servers"])
def test_cases_with_other_programs_run(what):
    cases = [case for case in growth.make_cases() if case.against == what]
    assert cases
    for case in cases:
        assert growth.cost(case, 2, 1) > 0


@pytest.mark.processes
def test_process_zero_measures_what_others_cost_it():
    (case,) = [case for case in growth.make_cases() if case.returns_cost]
    assert 0 < growth.cost(case, 1, 1) < 10
