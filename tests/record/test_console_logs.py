"""Console output is read as it was printed, also where a terminal has wrapped its lines."""

import json
import math
import pprint
import random
import textwrap

import pytest

from rljax.errors import ConfigError
from rljax.record.console_logs import console_rows

NAMES = ("critic/score/mean", "actor/lr", "actor/ppo_kl", "response_length/mean", "response_length/max")
NAMES += ("rollout_corr/rollout_is_catastrophic_token_fraction", "timing_s/step")


def numbers(step):
    """Returns the numbers of a step, with digits and exponents of every length."""
    draw = random.Random(step)
    values = (draw.random(), 1e-06, -3.25e-07 * draw.randint(0, 9), draw.uniform(90, 3000), draw.randint(90, 3000))
    return dict(zip(NAMES, (*values, draw.random(), round(draw.uniform(1, 300), 1)), strict=True))


def verl(step, form="{}", front="(TaskRunner pid=222265) "):
    items = {"training/global_step": step} | {name: form.format(repr(value)) for name, value in numbers(step).items()}
    return f"{front}step:{step} - " + " - ".join(f"{name}:{value}" for name, value in items.items())


def slime(step):
    front = "\x1b[36m(RolloutManager pid=12345)\x1b[0m [2026-01-02 10:00:00] data.py:99"
    return f"{front} - perf {step}: {numbers(step)!r}"


BAR = "Training Progress:   4%|#         | 1/24 [01:10<3:00:00, 212.4s/it]"
FORMS = {
    "verl": verl,
    "verl with numpy": lambda step: verl(step, "np.float64({})", ""),
    "verl after a bar": lambda step: verl(step, front=BAR),
    "slime": slime,
    "trl": lambda step: repr(numbers(step)),
    "trl of transformers 5": lambda step: repr({name: f"{value:.4g}" for name, value in numbers(step).items()}),
    "jsonl among other lines": lambda step: json.dumps({"step": step} | numbers(step)),
}


def read(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [{name: float(value) for name, value in row.items()} for row in console_rows(path)]


def cut(line, width):
    return [line[start : start + width] for start in range(0, len(line), width)]


WRAPS = {
    "anywhere": cut,
    "without spaces": lambda line, width: [piece.strip() for piece in cut(line, width)],
    "at words": lambda line, width: textwrap.wrap(line, width, break_on_hyphens=False),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("form", FORMS)
def test_no_width_of_a_terminal_changes_a_number(tmp_path, form, wrap):
    lines = [line for step in range(1, 4) for line in (f"INFO it's step {step}", FORMS[form](step), BAR)]
    whole = read(tmp_path / "x.log", lines)
    for step, row in enumerate(whole, 1):
        assert row["response_length/mean"] == pytest.approx(numbers(step)["response_length/mean"], rel=1e-3)
    for width in range(60, 421, 5):
        wrapped = [piece for line in lines for piece in WRAPS[wrap](line, width)]
        try:
            assert read(tmp_path / "x.log", wrapped) == whole, f"width {width}"
        except ConfigError as error:
            assert "wrapped" in str(error)  # noqa: PT017


def test_lines_that_certainly_belong_together_are_joined(tmp_path):
    for lines, found in (
        (["step:1 - a/b:126", "7.02 - c/d:3072.0"], [{"a/b": 1267.02, "c/d": 3072.0, "step": 1}]),
        (["perf 0: {'a/b': 277", "3.71, 'c/d': 0.46}"], [{"a/b": 2773.71, "c/d": 0.46, "step": 0}]),
        (["{'loss': '0.1', 'a/b': '12", "7.5', 'c/d': '0'}"], [{"loss": 0.1, "a/b": 127.5, "c/d": 0}]),
        # The name training/global_step is cut before a word that begins a line of verl.
        (["step:1 - training/global_", "step:1 - a/b:2.5"], [{"training/global_step": 1, "a/b": 2.5, "step": 1}]),
        # The last number of a run that was killed may lack digits.
        (["{'loss': 0.1, 'completions/mean_length': 83", "Killed"], [{"loss": 0.1}]),
        # The separator of verl is alone on a line.
        (["step:1 - a/b:-9.75e-07", "-", "c/d:143.5"], [{"a/b": -9.75e-07, "c/d": 143.5, "step": 1}]),
        # The end of a run that was killed, in its second piece.
        (["step:1 - a/b:12", "7.5 - respo"], [{"a/b": 127.5, "step": 1}]),
        (["step:1 - c/d:inf", "{'loss': np.float64(inf)}"], [{"c/d": math.inf, "step": 1}, {"loss": math.inf}]),
        # Words behind the last item leave its number, and the last number of an open dictionary is left out.
        *(([f"step:1 - c/d:2.25{tail}"], [{"c/d": 2.25, "step": 1}]) for tail in (" done", " (1.2s)", ".", " and 3")),
        (["{'loss': 0.1, 'x': [1, 2], 'mean_length': 12", "7.5, 'kl': 0.5}"], [{"loss": 0.1}, {"kl": 0.5}]),
        # A printed configuration stays as it is.
        (["(pid=1) {'actor': {'lr': 1e-06,", "(pid=1)            'seed': 7}}"], [{"lr": 1e-06}, {"seed": 7}]),
    ):
        assert read(tmp_path / "x.log", lines) == found
    (row,) = read(tmp_path / "x.log", ["{'loss': nan, 'grad_norm': -inf}"])
    assert (math.isnan(row["loss"]), row["grad_norm"]) == (True, -math.inf)
    # A last number is joined if the width is known.
    long, short = "step:1 - a/b:1.5 - c/d:25", "step:2 - a/b:1.5 - c/d:31"
    with pytest.raises(ConfigError, match="lines 1 and 2 seem to be one line that was wrapped"):
        read(tmp_path / "x.log", [long, "00.5", short])
    for wider in ([], ["x" * 60]):
        rows = read(tmp_path / "x.log", [*wider, long, "00.5", short, " - e/f:2.0"])
        assert [row["c/d"] for row in rows] == [2500.5, 31.0]
    with pytest.raises(ConfigError, match="lines 2 and 3 seem to be one line that was wrapped"):
        read(tmp_path / "x.log", ["hello", "step:1 - a/b:1 - response_le", "[09:00] ngth/mean:5 - c/d:1"])


@pytest.mark.parametrize("form", FORMS)
def test_lines_that_are_whole_stay_as_they_are(tmp_path, form):
    """Bars, time stamps, numbers alone, other metrics, a cut end and a resumed run change no row."""
    steps = [FORMS[form](step) for step in range(1, 6)]
    whole = read(tmp_path / "x.log", steps)
    other = ["2026-01-02 10:00:00,123 - INFO - x - y", "12", "", "Traceback (most recent call last):", "- lr", BAR]
    assert read(tmp_path / "x.log", [line for step in steps for line in (step, *other)]) == whole
    assert read(tmp_path / "x.log", [f"2026-01-02T10:00:00Z {step}" for step in steps]) == whole
    killed = [*steps[:3], steps[3][: steps[3].index("actor/ppo_kl") - 2], *other, *steps[2:]]
    rows = read(tmp_path / "x.log", killed)
    assert [*rows[:3], *rows[4:]] == [*whole[:3], *whole[2:]]
    assert rows[3].items() <= whole[3].items()
    assert read(tmp_path / "x.log", ["\r\n".join(steps)]) == whole


@pytest.mark.parametrize("front", ["", "(skyrl_entrypoint pid=12, ip=10.0.0.1) ", "\x1b[36m(entry pid=1)\x1b[0m "])
def test_a_dictionary_with_a_line_for_each_pair_is_one_row(tmp_path, front):
    """SkyRL prints four digits after the point, and Ray writes the process in front: a rate of 1e-6 is unknown."""
    pairs = {"policy/policy_lr": "0.0000", "reward/avg_raw_reward": "0.0000", "trainer/global_step": 3}
    lines = [f"{front}Step 3: ", *(front + line for line in pprint.pformat(pairs, width=40).splitlines())]
    assert len(lines) == 4
    assert read(tmp_path / "x.log", lines * 2) == [{"reward/avg_raw_reward": 0.0, "trainer/global_step": 3.0}] * 2
