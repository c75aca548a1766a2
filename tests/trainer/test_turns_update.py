"""The metrics turns/* of an update are worked out by hand, with further rows, and beside the update's own row."""

import numpy as np
import pytest
from glossary import glossary
from records import train_sequence

from rljax.trainer.update import TrainerValues, TurnsUpdate, Updated, UpdateOptions, turn_metrics


def sequence(turns, *, trajectory=-1, in_loss=True):
    tokens = np.ones(len(turns), np.int32)
    rollout = np.where(np.array(turns) > 0, -1.0, 0.0).astype(np.float32)
    return train_sequence(tokens[:1], tokens, rollout, 0.0, in_loss, trajectory, turn=turns)


def trainer_of(sequences, gap):
    return [np.where(s.turns > 0, s["rollout_logprobs"] - np.float32(gap), np.float32(0.0)) for s in sequences]


def test_trajectories_by_hand():
    # The second trajectory has two rows and failed, so it is measured and has no loss.
    rows = (([1, 1, 0, 2], 0), ([1, 0], 1), ([3, 0, 4], 1), ([1], 2))
    sequences = [sequence(turns, trajectory=number, in_loss=number != 1) for turns, number in rows]
    row = turn_metrics(sequences, trainer_of(sequences, 0.25))
    assert row["turns/mean"] == pytest.approx((2 + 4 + 1) / 3)
    assert row["turns/max"] == 4
    assert row["turns/environment_fraction"] == pytest.approx(3 / 10)
    counts = {name.split("/")[1]: n for name, n in row.items() if name.endswith("token_count")}
    assert counts == {"turn_1": 4, "turn_2": 1, "turn_3_to_4": 2, "after_1": 3}
    assert row["turns/turn_3_to_4/kl"] == pytest.approx(0.25)
    assert row["turns/after_1/extreme_rate"] == 0


def test_the_glossary_has_these_keys():
    late = sequence([1] + [0, 9] * 20 + [10] * 20)
    row = turn_metrics([late], trainer_of([late], 0.25))
    patterns = {key: pattern for key, pattern in glossary().items() if key.startswith("turns/")}
    assert [key for key in row if not any(pattern.fullmatch(key) for pattern in patterns.values())] == []
    for key in ("turns/mean", "turns/max", "turns/turn_<bucket>/<name>", "turns/after_<bucket>/<name>"):
        assert any(patterns[key].fullmatch(name) for name in row), key


def test_the_updates_row_stays_and_one_fetch_serves_all():
    fetched = []

    class Inner:
        pack = staticmethod(len)

        def __call__(self, state, batch, sequences, options):
            def trainer():
                fetched.append(len(sequences))
                return TrainerValues(trainer_of(sequences, 0.5))

            return Updated(state, {"policy/loss": 1.0}, {}, trainer)

    update, sequences = TurnsUpdate(Inner()), [sequence([1, 0, 2])]
    assert update.pack(sequences) == 1
    found = update("state", None, sequences, UpdateOptions(1e-3, 0, noise=False))
    assert (found.state, found.row["policy/loss"]) == ("state", 1.0)
    assert found.row["turns/turn_2/logprob_abs_diff_mean"] == 0.5
    assert [values.tolist() for values in found.trainer().logprobs] == [[-1.5, 0.0, -1.5]]
    assert fetched == [1]
