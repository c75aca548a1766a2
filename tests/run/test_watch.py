"""The watch over the responses of a step, by hand and in a run with faults, and the word of a run on its last rows."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from process_runs import FLOAT32
from records import train_sequence
from toy_runs import TOY_BASE, completed, tiny

import rljax.run.step
from rljax.diagnose.evidence import Declared
from rljax.record.rows import read_rows
from rljax.run.watch import CAUSE, CONFIDENCE, EVERY, Watch, Word
from rljax.trainer.update import TrainerValues

RNG = np.random.default_rng(0)
HEALTHY = {"rollout/repeated_responses": 0, "rollout/constant_responses": 0, "mismatch/jump": 0}


def responses(count=32, length=12, prompts=4, spread=1.0):
    """Returns prompts, tokens and log-probabilities of ``count`` responses; neighbours have one prompt."""
    asked = [np.array([1, i], np.int32) for i in range(prompts)]
    tokens = [RNG.integers(0, 16, length).astype(np.int32) for _ in range(count)]
    logprobs = [-np.float32(spread) * RNG.exponential(1.0, length).astype(np.float32) for _ in range(count)]
    return [asked[i * prompts // count] for i in range(count)], tokens, logprobs


def look(watch, step, sampled, trainer, *, staleness=0.0, turns=None, **row):
    """Returns the keys that ``watch`` adds to the row of a step whose trainer has the numbers ``trainer``."""
    turns = turns or [None] * len(trainer)
    sequences = [
        train_sequence(prompt, ids, rollout, 1.0, turn=turn)
        for prompt, ids, rollout, turn in zip(*sampled, turns, strict=True)
    ]
    gaps = np.concatenate([np.abs(a - b) for a, b in zip(trainer, sampled[2], strict=True)])
    row |= {"mismatch/logprob_abs_diff_mean": float(gaps.mean()), "mismatch/token_count": len(gaps)}
    row |= {"step": step, "rollout/staleness": staleness}
    return watch(row, sequences, lambda: TrainerValues(list(trainer)))


def noisy(logprobs, size):
    return [values + RNG.normal(0.0, size, len(values)).astype(np.float32) for values in logprobs]


def lowered(logprobs, gap):
    return [values - np.float32(gap) for values in logprobs]


def after_healthy(steps=3, size=1e-3):
    watch = Watch()
    for step in range(1, steps + 1):
        sampled = responses()
        assert look(watch, step, sampled, noisy(sampled[2], size)) == HEALTHY
    return watch


def test_a_jump_is_above_twenty_times_the_median(capsys):
    """The medians of the earlier rows are 0.01, 0.006, 0.01, 0.0105 and 0.011 from the second row on."""
    watch = Watch()
    for step, gap in enumerate((0.01, 0.002, 0.011, 0.199, 0.209, 0.23), 1):
        sampled = responses()
        assert look(watch, step, sampled, lowered(sampled[2], gap))["mismatch/jump"] == (step == 6), step
    assert capsys.readouterr().err.startswith("\nwarning: step 6: cannot_tell: neither")


@pytest.mark.parametrize(
    ("rows", "gap", "staleness", "jumps"),
    [(3, 0.019, 0.0, 0), (3, 0.021, 0.0, 1), (0, 0.49, 0.0, 0), (0, 0.51, 0.0, 1), (0, 0.51, 1.0, 0)],
)
def test_no_jump_is_below_its_least_gap(rows, gap, staleness, jumps):
    watch, sampled = after_healthy(rows, size=0.0), responses()
    found = look(watch, 4, sampled, lowered(sampled[2], gap), staleness=staleness)
    assert found["mismatch/jump"] == jumps


def test_drift_is_no_jump_but_a_shift_of_stale_responses_is():
    """A policy that learned nothing for a while has no drift; then it moves. Only the numerics can be watched then."""
    numerics = "mismatch_numerics/logprob_abs_diff_mean"
    for known in ({}, {numerics: 1e-3}):
        watch, sampled = Watch(), responses()
        for step in range(1, 7):
            assert look(watch, step, sampled, noisy(sampled[2], 1e-4), staleness=1.0, **known) == HEALTHY
        sharper = [values * np.float32(1.2) for values in sampled[2]]
        for step, trainer in ((7, noisy(sampled[2], 0.5)), (8, sharper)):
            assert look(watch, step, sampled, trainer, staleness=1.0, **known) == HEALTHY
        shifted = [np.roll(values, 1) for values in sampled[2]]
        jumped = {numerics: 1.0} if known else {}
        assert look(watch, 9, sampled, shifted, staleness=1.0, **jumped)["mismatch/jump"] == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x: [np.roll(values, -1) for values in x], "not_comparable: log-probabilities shifted by one token ("),
        (lambda x: [values * np.float32(0.8) for values in x], "temperature: scaled log-probabilities, as at another"),
        (lambda x: [values * np.float32(np.log(2)) for values in x], "not_comparable: scaled log-probabilities, as l"),
        (lambda x: x[1:] + x[:1], "not_comparable: log-probabilities permuted between responses ("),
        (lambda x: [*x[1:7], x[0], *x[7:]], "not_comparable: log-probabilities permuted between responses ("),
        (lambda x: noisy(x, 2.0), "cannot_tell: neither constant, shifted by one, scaled nor permuted"),
    ],
    ids=["shifted", "scaled", "base", "permuted", "seven permuted", "noise"],
)
@pytest.mark.parametrize("size", [0.0, 0.005], ids=["exact", "as bfloat16"])
def test_a_jump_has_the_name_of_its_signature(change, named, size, capsys):
    watch, sampled = after_healthy(size=size), responses()
    found = look(watch, 4, sampled, change(noisy(sampled[2], size)))
    assert found == HEALTHY | {"mismatch/jump": 1}
    (line,) = capsys.readouterr().err.split("\n")[1:-1]
    assert line.startswith(f"warning: step 4: {named}")
    assert "mismatch/logprob_abs_diff_mean is " in line


def test_a_fault_that_lasts_is_said_less_and_less_often(capsys):
    watch, sampled = after_healthy(), responses()
    shifted = [np.roll(values, 1) for values in sampled[2]]
    for step, trainer in enumerate((*[shifted] * 9, sampled[2], shifted), 4):
        look(watch, step, sampled, trainer)
    lines = capsys.readouterr().err.split("\n")
    assert [line.split(": ")[1] for line in lines if line] == [f"step {step}" for step in (4, 5, 7, 11, 14)]


def test_short_responses_of_zeros_are_named(capsys):
    """Responses of fewer than eight tokens are no constant by themselves, but all of them are at a jump."""
    watch, (prompts, tokens, logprobs) = after_healthy(), responses(length=3)
    zeros = [np.zeros_like(values) for values in logprobs]
    assert look(watch, 4, (prompts, tokens, zeros), logprobs) == HEALTHY | {"mismatch/jump": 1}
    said = "warning: step 4: not_comparable: a constant in the place of log-probabilities, 0 everywhere ("
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "share", "length", "found"), [(0.0, 1.0, 8, 32), (-1.0, 0.25, 8, 8), (0.0, 0.2, 8, 0), (0.0, 1.0, 7, 0)]
)
def test_constants_are_counted_from_a_quarter_of_the_responses(value, share, length, found, capsys):
    prompts, tokens, logprobs = responses(length=length)
    constant = [np.full_like(x, value) if i < share * 32 - 0.5 else x for i, x in enumerate(logprobs)]
    got = look(Watch(), 1, (prompts, tokens, constant), logprobs, staleness=1.0)
    assert got["rollout/constant_responses"] == found
    said = f"not_comparable: {found} of 32 responses have one log-probability at all their tokens ({value:g} in the f"
    assert (said in capsys.readouterr().err) == bool(found)


def test_certain_tokens_have_one_number_on_both_sides(capsys):
    """A policy that is sure of every token has 0 there in one engine, and -1e-7 here and there in the other."""
    prompts, tokens, logprobs = responses(spread=1e-7)
    zeros = [np.zeros_like(values) for values in logprobs]
    assert look(Watch(), 1, (prompts, tokens, zeros), logprobs) == HEALTHY
    assert capsys.readouterr().err == ""


def test_what_an_environment_wrote_does_not_count(capsys):
    """Seven sampled tokens with one number are too few, and the environment's zeros between them count as none."""
    prompts, tokens, logprobs = responses(length=10)
    turns = [np.array([1, 1, 1, 1, 0, 0, 0, 2, 2, 2], np.int32)] * 32
    masked = [-np.float32(turns[0] > 0)] * 32
    assert look(Watch(), 1, (prompts, tokens, masked), masked, turns=turns)["rollout/constant_responses"] == 0
    turns[0] = np.int32([0, 0, *[1] * 8])
    masked = [np.float32([0, 0, *[-1] * 8])] * 32
    found = look(Watch(), 2, (prompts, tokens, masked), logprobs, turns=turns[:1] * 32)
    assert found["rollout/constant_responses"] == 32


def one_for_all(count, length, prompts=4):
    asked, tokens, logprobs = responses(count, length, prompts)
    return asked, [tokens[0]] * count, [logprobs[0]] * count


def test_a_row_with_a_sign_is_no_earlier_row():
    """The first row's gap of 0.4 is no jump, but all its responses are equal. Later rows are not compared with it."""
    watch, equal = Watch(), one_for_all(64, 12)
    assert look(watch, 1, equal, lowered(equal[2], 0.4)) == HEALTHY | {"rollout/repeated_responses": 64}
    sampled = responses()
    assert look(watch, 2, sampled, noisy(sampled[2], 1e-3)) == HEALTHY
    assert look(watch, 3, sampled, lowered(sampled[2], 0.1))["mismatch/jump"] == 1


def test_two_long_equal_responses_of_other_prompts_count():
    prompts, tokens, logprobs = responses()
    tokens[31], logprobs[31] = tokens[0], np.nextafter(logprobs[0], np.float32(0.0))  # a bit makes another response
    assert look(Watch(), 1, (prompts, tokens, logprobs), logprobs) == HEALTHY
    logprobs[31] = logprobs[0]
    assert look(Watch(), 1, (prompts, tokens, logprobs), logprobs)["rollout/repeated_responses"] == 2
    tokens[7], logprobs[7] = tokens[0], logprobs[0]  # of the same prompt as the first one
    assert look(Watch(), 1, (prompts, tokens, logprobs), logprobs)["rollout/repeated_responses"] == 3
    assert look(Watch(), 1, ([prompts[0]] * 32, tokens, logprobs), logprobs) == HEALTHY


@pytest.mark.parametrize("length", [1, 3])
def test_short_answers_may_be_equal(length, capsys):
    """Every prompt is answered with one of two words, whose log-probabilities take four values in 16 bits."""
    prompts, _, _ = responses(64, length, 16)
    tokens = [np.full(length, i % 2, np.int32) for i in range(64)]
    values = np.float32([-0.6931472, -0.474077, -0.9740769, -1.3132616])
    logprobs = [values[(i // 3 + np.arange(length)) % 4] for i in range(64)]
    watch = Watch()
    for step in (1, 2, 3):
        assert look(watch, step, (prompts, tokens, logprobs), noisy(logprobs, 0.01)) == HEALTHY
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("length", [2, 5])
def test_one_short_response_for_all_is_named_by_its_jump(length, capsys):
    watch, sampled = after_healthy(), one_for_all(64, length)
    found = look(watch, 4, sampled, responses(64, length)[2])
    assert found == {"rollout/repeated_responses": 64, "rollout/constant_responses": 0, "mismatch/jump": 1}
    assert "warning: step 4: not_comparable: 64 of 64 responses have the tokens" in capsys.readouterr().err


def test_a_cut_distribution_and_a_rounded_cache_are_healthy(capsys):
    """The sampler's numbers are of its cut distribution: each is larger than the trainer's by the cut mass."""
    watch, coarse = Watch(), Watch()
    for step in range(1, 12):
        sampled = responses()
        mass = [np.log(RNG.uniform(0.8, 1.0, len(values))).astype(np.float32) for values in sampled[2]]
        trainer = [values + cut for values, cut in zip(sampled[2], mass, strict=True)]
        assert look(watch, step, sampled, trainer) == HEALTHY
        assert look(coarse, step, sampled, noisy(sampled[2], RNG.uniform(0.02, 0.3))) == HEALTHY
    assert capsys.readouterr().err == ""


def test_earlier_rows_are_those_without_a_jump():
    """Rows of an older rljax have no such key, others no mismatch. A fork has other rows before its own first step."""
    row = {"step": 3, "rollout/staleness": 0.0, "mismatch/token_count": 9, "mismatch/logprob_abs_diff_mean": 1e-3}
    watch, sampled = Watch(), responses()
    assert watch(row | {"mismatch/token_count": 0}, [], lambda: TrainerValues([])) == HEALTHY
    assert look(watch, 2, sampled, lowered(sampled[2], 0.4)) == HEALTHY  # no earlier row has a response
    watch = Watch()
    jumped = row | {"mismatch/jump": 1, "mismatch/logprob_abs_diff_mean": 3.0}
    watch.read([row, row | {"mismatch/jump": 0}, *[jumped] * 9, {"step": 4}])
    watch.read([row | {"mismatch/logprob_abs_diff_mean": None}])
    assert look(watch, 12, sampled, noisy(sampled[2], 0.3))["mismatch/jump"] == 1
    watch = Watch()
    watch.read([row], after=3)
    assert look(watch, 12, sampled, noisy(sampled[2], 0.3)) == HEALTHY


# ---- the word of a run ----


def rows_of(name):
    with gzip.open(Path(__file__).parents[1] / f"data/planted_logs/{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def test_a_word_is_recorded_every_so_many_steps_and_said_once(capsys):
    declared, rows = Declared("bfloat16", "bfloat16", "fp8_e5m2"), rows_of("eight_bits")
    rows = [{**row, "step": step} for step, row in enumerate((rows * 2)[: 2 * EVERY], 1)]
    word = Word(declared)
    said = [word(row) for row in rows[:EVERY]]
    assert said == [*[{}] * (EVERY - 1), {CAUSE: "eight_bits", CONFIDENCE: "sure"}]
    assert f"diagnosis: step {EVERY}: eight_bits (sure): " in capsys.readouterr().err
    assert [word(row) for row in rows[EVERY:]][-1][CAUSE] == "eight_bits"
    # A resumed run says nothing twice.
    resumed = Word(declared)
    resumed.read([*rows[: EVERY - 1], rows[EVERY - 1] | {CAUSE: "eight_bits"}, *rows[EVERY:-1]])
    assert resumed(rows[-1])[CAUSE] == "eight_bits"
    assert capsys.readouterr().err == ""


def test_without_a_mismatch_a_word_is_never_healthy(capsys):
    word = Word(Declared())
    for row in rows_of("healthy")[:EVERY]:
        found = [word(row) for _ in range(2)]  # a row that was not written comes again, and counts once
    assert found == [{CAUSE: "healthy", CONFIDENCE: ""}] * 2
    word = Word(Declared())
    last = [word({"step": step, "reward/mean": 0.5}) for step in range(1, EVERY + 1)][-1]
    assert last[CAUSE] == "cannot_tell"
    assert "cannot_tell" in capsys.readouterr().err


# ---- whole runs ----


def changed(change):
    """Returns a fault that changes the sampler's log-probabilities of each response."""
    return lambda sequences: [s.add({"rollout_logprobs": change(s["rollout_logprobs"])}) for s in sequences]


def moved(by):
    """Returns a fault that gives each place the response of place ``by(place, sequences)``."""

    def fault(sequences):
        pairs = [(s, sequences[by(place, sequences)]) for place, s in enumerate(sequences)]
        return [train_sequence(s.prompt, other.response, other["rollout_logprobs"], 0.0) for s, other in pairs]

    return fault


def longest(place, sequences):
    return max(range(len(sequences)), key=lambda i: len(sequences[i].response))


def of_others(place, sequences):
    return (place + len(sequences) // 2) % len(sequences)


FAULTS = {
    3: (changed(lambda values: np.roll(values, -1)), "not_comparable: log-probabilities shifted by one"),
    5: (changed(np.zeros_like), "not_comparable: a constant in the place of log-probabilities, 0 everywhere"),
    7: (moved(longest), "not_comparable: 8 of 8 responses have the tokens and, to the bit, the log-probabilities of"),
    9: (moved(of_others), " (mismatch/logprob_abs_diff_mean is "),
    11: (changed(lambda values: 0.95 * values), "temperature: scaled log-probabilities"),
}


def test_each_fault_of_a_run_is_said_in_one_line(tmp_path, monkeypatch):
    """The run goes on before its last step. Alone, a gap of less than half a nat would be no jump."""
    sound, rows = rljax.run.step.training_sequences, tmp_path / "run/metrics.jsonl"

    def spoil(rollouts, config, version):
        fault, _ = FAULTS.get(version + 1, (list, ""))
        return fault(sound(rollouts, config, version))

    monkeypatch.setattr(rljax.run.step, "training_sequences", spoil)
    options, said = (*FLOAT32, "--rollout.max-response-tokens", "20"), ""  # the step of test_prefixes.py
    for steps in (10, 11):
        said += completed(tiny(TOY_BASE, rows.parent, steps, *options), is_sound=False)
    begin = "warning: step "
    lines = [line.removeprefix(begin).split(": ", 1) for line in said.splitlines() if line.startswith(begin)]
    assert [int(number) for number, _ in lines] == list(FAULTS), said
    for number, words in lines:
        assert FAULTS[int(number)][1] in words
    assert "the median of 6 earlier rows is" in lines[-1][1]
    found = read_rows(rows)
    assert [row["step"] for row in found if row["mismatch/jump"] and row["step"] != 7] == [3, 5, 9, 11]
    assert [row["rollout/repeated_responses"] for row in found] == [8 * (number == 7) for number in range(1, 12)]
    assert 0.02 < found[-1]["mismatch/logprob_abs_diff_mean"] < 0.5
