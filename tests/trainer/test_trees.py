"""Rows of prefix trees give the numbers of separate rows, and mistakes in them do not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import train_sequence
from tiny_adapters import random_adapters
from tiny_step import CONFIG, MESH, fresh_state, make_step
from tree_batches import groups, in_trees, separate, tree_tokens

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.lora import OFF, LoraConfig, MergedPolicy
from rljax.policy.model import init_params
from rljax.policy.score import states_at
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.packing import max_micro_batches, unpack, unpack_whole, useful_fraction
from rljax.trainer.trees import common_prefixes, flat_row_tokens, pack_trees, tree_row_tokens

MIXTURE = dataclasses.replace(CONFIG, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=16)
LORA = LoraConfig(rank=2, alpha=3.0, targets=("q_proj", "o_proj", "up_proj", "down_proj"))
QWEN2 = dataclasses.replace(CONFIG, family="qwen2")
BY_TOKEN = CorrectionConfig(level="token", threshold=1.2)


def trained(sequences, batch, config=CONFIG, *, dtype="float32", lora=OFF, **options):
    """Returns the log-probabilities of each response, the gradients, and the metrics of a step."""
    params, merged = init_params(config, 0), None
    if lora.rank:
        params, merged = random_adapters(config, lora, 0.2), MergedPolicy(config, lora, MESH, params, dtype)
    how = {"config": config, "dtype": dtype, "lora": lora}
    shape = {"shape": batch.tokens.shape, "count": len(sequences), "limit": 24}
    measured = {"diagnosis": DiagnosisConfig(), "correction": BY_TOKEN, **options}
    step = make_step(**how, **shape, **measured, merged=merged)
    state, row, values = jax.device_get(step(fresh_state(params=params, **how), batch, 1e-2, True))
    assert not values.logprobs[batch.segment_ids == 0].any()
    return unpack(values.logprobs, batch, sequences), state.opt_state.inner_state.trace, row


def distance(found, expected):
    """Returns the largest difference of log-probabilities, and the relative difference of the gradients by norm."""
    logprobs = max(np.abs(x - y).max() for x, y in zip(found[0], expected[0], strict=True))
    ours, theirs = (
        np.concatenate([np.ravel(x).astype(float) for x in jax.tree.leaves(t[1])]) for t in (found, expected)
    )
    return logprobs, np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


CENTERING = CorrectionConfig(level="token", threshold=1.2, score_centering=True)
FURTHER = ("dense", "score centering", "adapters, another temperature", "qwen2, cut sampling")
OF_SEQUENCES = LossConfig(aggregation="sequence_mean")
CASES = {
    "dense": (CONFIG, {}, {}),
    "qwen2, cut sampling": (QWEN2, {"tops": 4}, {"cut": True}),
    "several turns, replayed routes": (MIXTURE, {"turns": True, "layers": 2}, {"loss": OF_SEQUENCES}),
    "score centering": (CONFIG, {"tops": 4}, {"correction": CENTERING}),
    "adapters, another temperature": (CONFIG, {}, {"lora": LORA, "temperature": 0.7}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.harness] * (case in FURTHER)) for case in CASES]
)
def test_trees_give_the_numbers_of_separate_rows(case):
    config, kind, options = CASES[case]
    batch = in_trees(sequences := groups(**kind))
    found, expected = (trained(sequences, given, config, **options) for given in (batch, separate(sequences)))
    assert max(distance(found, expected)) < 1e-5
    assert tree_tokens(batch) < 0.85 * sum(len(s.ids) for s in sequences)
    free = ("router/", "precision/", "optimizer/grad_noise", "mismatch/logprob_abs_diff")
    for name, value in expected[2].items():
        if not name.startswith(free):
            np.testing.assert_allclose(found[2][name], value, rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.harness
@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_in_16_bits_trees_differ_by_few_roundings(dtype, rounding):
    sequences = groups()
    how = {"dtype": dtype, "diagnosis": None}
    found, expected = (trained(sequences, given, **how) for given in (in_trees(sequences), separate(sequences)))
    logprobs, gradients = distance(found, expected)
    assert logprobs < 16 * rounding
    assert gradients < 4 * rounding
    exact = trained(sequences, separate(sequences))
    assert distance(found, exact)[1] < 1.1 * distance(expected, exact)[1]
    assert found[2]["precision/overflows"] == 0


def test_mistakes_are_seen():
    """All tokens before a token are seen, branches end early, positions go on, or a response reads its own token."""
    batch = in_trees(sequences := groups())
    trees, right = batch.trees, trained(sequences, batch, diagnosis=None)
    for mistake in (
        {"ends": np.where(trees.ends > 0, trees.ends.max(axis=-1, keepdims=True), 0)},
        {"ends": np.maximum(trees.ends - 1, 0)},
        {"positions": np.tile(np.arange(48, dtype=np.int32), (*trees.tokens.shape[:2], 1))},
        {"sources": np.minimum(trees.sources + 1, 47)},
    ):
        wrong = trained(sequences, batch._replace(trees=trees._replace(**mistake)), diagnosis=None)
        assert distance(wrong, right)[0] > 0.01, mistake


def test_branches_by_hand_at_all_levels_and_at_two():
    sequences = [train_sequence([1], tokens) for tokens in ([2, 3, 9], [2, 4, 9], [5, 6, 9])]
    shape = {"row_tokens": 8, "rows_per_micro_batch": 1, "micro_batches": 1, "flat_tokens": 9}
    batch = pack_trees(sequences, **shape)
    assert useful_fraction(sequences, batch) == 6 / 8
    assert batch.trees.tokens.ravel().tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert batch.trees.ends.ravel().tolist() == [6, 4, 3, 4, 6, 6, 0, 0]
    trees = pack_trees(sequences, **shape, two_levels=True).trees
    assert trees.tokens.ravel().tolist() == [1, 2, 3, 2, 4, 5, 6, 0]


def test_only_the_routes_of_equal_tokens_are_compared():
    """Two tokens are equal, and the routes of the first. Each token of a response has hundreds of routes."""
    compared = []

    class Routes(np.ndarray):
        def __ne__(self, other):
            compared.append(len(self))
            return np.ndarray.__ne__(self, other)

    rows = [([3, 4, 5], [7, 7, 7, 7]), ([3, 6, 5], [7, 8, 7, 7]), ([4, 4, 4], [7, 8, 7, 7])]
    sequences = [train_sequence([1], tokens) for tokens, _ in rows]
    for s, (_, routes) in zip(sequences, rows, strict=True):
        s.columns["routes"] = np.tile(np.uint8(routes)[:, None, None], (1, 2, 3)).view(Routes)
    assert common_prefixes(sequences) == [0, 1, 1]
    assert compared == [2, 1]


def test_gradients_of_a_shared_state_are_summed_in_float32():
    hidden, places = jnp.zeros((1, 2, 1), jnp.bfloat16), jnp.zeros((1, 1000), jnp.int32)
    found = jax.grad(lambda x: jnp.sum(states_at(x, places), dtype=jnp.float32))(hidden)
    assert found[0, :, 0].tolist() == [1000.0, 0.0]  # A sum of ones in bfloat16 stays at 256.


def test_lengths_of_rows():
    # 2,048 + 8 x 256 fit a row of 4,096; a prompt of 512 before responses of 8,192 is worth no longer row.
    given = [(3072, 2048, 256, 8), (9216, 512, 8192, 16), (128, 60, 10, 8), (2048, 64, 1024, 4)]
    # Two of four responses of 1,024 fit a row of 2,304, and no response would share a prompt in rows of 2,048.
    assert [tree_row_tokens(*each) for each in given] == [4096, 9216, 192, 2304]
    # 4096 * 2048 / (2048 + 1024) is rounded up to steps of 64.
    assert [flat_row_tokens(*each) for each in ((4096, 2048, 256, 8), (64, 1, 63, 1))] == [2752, 64]


def with_routes(sequence, changes=()):
    """Adds routes of two layers. From each place in ``changes`` on, one layer has other routes."""
    routes = np.ones((len(sequence.ids), 2, 2), np.uint8)
    for place in changes:
        routes[place:, place % 2] += 1
    routes[-1] = 0
    return sequence.add({"routes": routes})


def make_sequences(rng, longest_prompt, longest_response):
    """Returns groups that begin alike at any depth: equal sequences, beginnings of others, equal prompts of groups."""
    vocab, size = int(rng.choice([2, 3, 50])), int(rng.integers(1, 6))
    turns, routes, mixed, full = rng.integers(2, size=4).astype(bool)
    text = rng.integers(0, vocab, longest_prompt + longest_response)
    made, prompt = [], text[:1]
    for _ in range(int(rng.integers(1, 8))):
        kind, length, in_loss = rng.integers(3), rng.integers(1, longest_prompt + 1), bool(rng.integers(2))
        if kind:  # else it is the prompt of the group before
            prompt = text[:length] if kind == 1 else rng.integers(0, vocab, length)
        for _ in range(size):
            kind, start, ids = rng.integers(4), len(prompt), np.concatenate([prompt, rng.integers(0, vocab, 99)])
            if kind == 0 and made:
                ids = made[rng.integers(len(made))].ids
                start = int(rng.integers(1, min(len(ids) - 1, longest_prompt) + 1))
            elif kind == 1:
                ids = np.concatenate([prompt, text])[: len(text)]
            lengths = (longest_response - longest_response // 4, longest_response) if full else (1, longest_response)
            response = ids[start:][: int(rng.integers(lengths[0], lengths[1] + 1)) if rng.integers(3) else 1]
            response = response if len(response) else text[:1]
            arrays = {"turn": (rng.random(len(response)) < 0.7).astype(np.int32)} if turns else {}
            of_group = bool(rng.integers(2)) if mixed else in_loss
            s = train_sequence(ids[:start], response, rng.normal(size=len(response)), 1.0, of_group, **arrays)
            made.append(with_routes(s, rng.integers(len(s.ids), size=rng.integers(2))) if routes else s)
    return made


def check_row(sequences, batch, row, two_levels):
    """Walks the path of each sequence of a row; returns the indices of the sequences."""
    trees = [array[row] for array in batch.trees[:3]]
    tokens, ends, positions = (array[: np.count_nonzero(trees[1])] for array in trees)
    assert not any(array[len(ends) :].any() for array in trees)  # no gap
    above = [[j for j in range(i) if ends[j] > i] for i in range(len(ends))]
    assert positions.tolist() == [len(each) for each in above]
    if two_levels:
        assert all(len({int(ends[j]) for j in (*each, i)}) <= 2 for i, each in enumerate(above))
    segments, walked, found = batch.segment_ids[row], set(), []
    for segment in range(1, segments.max(initial=0) + 1):
        (places,) = np.nonzero(segments == segment)
        (index,) = set(batch.sequence_ids[row][places].tolist())
        s, sources = sequences[index], batch.trees.sources[row][places]
        path = [*above[sources[-1]], int(sources[-1])]
        assert tokens[path].tolist() == s.ids[:-1].tolist()
        assert sources.tolist() == path[s.prompt_length - 1 :]
        assert batch.tokens[row][places].tolist() == s.response.tolist()
        assert batch.positions[row][places].tolist() == list(range(s.prompt_length, len(s.ids)))
        if batch.routes is not None:
            assert (batch.routes[row][path].reshape(-1, 2, 2) == s.columns["routes"][:-1]).all()
        assert row[0] < batch.used
        assert row[0] < batch.with_loss or not s.in_loss
        walked |= set(path)
        found.append(index)
    assert walked == set(range(len(ends)))  # no token that nobody needs
    return found


@pytest.mark.parametrize("seed", range(4))
def test_every_path_has_the_tokens_of_its_sequence(seed):
    rng = np.random.default_rng(seed)
    for case in range(50):
        prompt, response, size, rows = (int(rng.integers(1, most)) for most in (20, 20, 6, 4))
        sequences, two_levels, longest = make_sequences(rng, prompt, response), bool(case % 2), prompt + response
        row = tree_row_tokens(longest, prompt, response, size) if rng.integers(2) else longest + int(rng.integers(40))
        flat = flat_row_tokens(row, prompt, response, size) if rng.integers(2) else row + int(rng.integers(2)) * 16
        micro = max_micro_batches(len(sequences), longest, row, rows)  # what fits as separate rows
        shape = {"row_tokens": row, "rows_per_micro_batch": rows, "micro_batches": micro, "flat_tokens": flat}
        batch = pack_trees(sequences, **shape, two_levels=two_levels)
        every = [check_row(sequences, batch, place, two_levels) for place in np.ndindex(batch.tokens.shape[:2])]
        assert sorted(i for found in every for i in found) == list(range(len(sequences)))
        has_loss = batch.loss_mask[: int(batch.with_loss)].any(axis=(1, 2))
        assert has_loss.all() or "turn" in sequences[0].columns  # a turn may have no sampled token
        assert batch.loss_mask.sum() == sum(s.sampled.sum() for s in sequences if s.in_loss)
        for s, own in zip(sequences, unpack_whole(batch.rollout_logprobs, batch, sequences), strict=True):
            np.testing.assert_array_equal(own, s["rollout_logprobs"])


def test_equal_sequences_share_all_their_routes():
    shape = {"row_tokens": 8, "rows_per_micro_batch": 1, "micro_batches": 1, "flat_tokens": 8}
    equal = pack_trees([with_routes(train_sequence([1, 2], [3, 4])) for _ in range(2)], **shape)
    assert np.count_nonzero(equal.trees.ends) == 3
    # The first and the third sequence share their routes and fill a row with the second, without loss, which does not.
    made = [train_sequence([1, 2, 3, 4], [5], in_loss=in_loss) for in_loss in (True, False, True)]
    batch = pack_trees([with_routes(s, changes) for s, changes in zip(made, ([], [0], []), strict=True)], **shape)
    assert np.count_nonzero(batch.trees.ends) == 8
