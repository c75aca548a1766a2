"""Tests of the swapping toy: right orders, disjoint splits, and demonstrations at the declared rates."""

import numpy as np
import pytest
from toy_texts import TASKS, ToyBaseConfig
from toy_texts import worked_swaps as scratchpad

from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import (
    EOS,
    LETTERS,
    MAX_SWAPS_TOKENS,
    SWAPS,
    build_tokenizer,
    orders,
    swap_problems,
    swaps_reward,
)
from rljax.policy.config import toy_config

ALPHABET = TASKS["swaps"].alphabet


def followed(prompt):
    """Returns the order, found by moving the letters of a list place by place."""
    order = list(LETTERS)
    for one, other in zip(prompt[::2], prompt[1::2], strict=True):
        i, j = order.index(one), order.index(other)
        order[i], order[j] = order[j], order[i]
    return "".join(order)


def test_scratchpad_by_hand():
    pairs = ["ac", "bd", "ae", "bc"]
    assert orders(pairs) == ["cbade", "cdabe", "cdeba", "bdeca"]
    assert scratchpad(pairs) == ">ac:cbade,bd:cdabe,ae:cdeba,bc:bdeca"
    # The pairs in order are ab ac ad ae bc bd ... Two after bd is cd, and the order follows it from there on.
    assert scratchpad(pairs, 1, 2) == ">ac:cbade,cd:dbace,ae:dbeca,bc:dceba"


@pytest.mark.parametrize("seed", range(3))
def test_right_scratchpads_are_rewarded_and_wrong_ones_are_not(seed):
    rng = np.random.default_rng(seed)
    for problem in swap_problems("train", 200, seed=seed):
        text = problem["prompt"][:-1]
        pairs = [text[i : i + 2] for i in range(0, len(text), 2)]
        assert problem["answer"] == followed(text)
        assert swaps_reward(problem, scratchpad(pairs), False) == 1.0
        assert swaps_reward(problem, problem["answer"], False) == 1.0
        assert swaps_reward(problem, scratchpad(pairs), True) == 0.0
        wrong = scratchpad(pairs, int(rng.integers(SWAPS)), int(rng.integers(1, 10)))
        assert swaps_reward(problem, wrong, False) == 0.0
        assert len(scratchpad(pairs)) + 1 <= MAX_SWAPS_TOKENS


@pytest.mark.parametrize("response", ["", ":", "bdec", "bdecaa", " bdeca", "bdeca:", "bdeca,"])
def test_near_misses_are_not_rewarded(response):
    assert swaps_reward({"prompt": "acbdaebc=", "answer": "bdeca"}, response, False) == 0.0


def test_splits_are_disjoint_and_fixed_by_the_seed():
    train, eval_split = swap_problems("train", seed=3), swap_problems("eval", seed=3)
    prompts = {p["prompt"] for p in train}
    assert len(prompts) == len(train) == 9800
    assert len({p["prompt"] for p in eval_split} - prompts) == len(eval_split) == 200
    assert list(eval_split) == list(swap_problems("eval", 200, seed=3))
    assert list(eval_split) != list(swap_problems("eval", 200, seed=4))
    with pytest.raises(ValueError, match="split must be 'train' or 'eval', got 'test'"):
        swap_problems("test")
    with pytest.raises(ValueError, match="the eval split has 200 problems, got size = 201"):
        swap_problems("eval", 201)


def test_the_tokenizer_has_one_token_a_character(tmp_path):
    build_tokenizer(ALPHABET).save(tmp_path)
    tokenizer, config = load_tokenizer(tmp_path), toy_config(len(ALPHABET))
    assert len(tokenizer) == len(ALPHABET) == config.vocab_size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (config.eos_token_id, config.pad_token_id)
    ids = tokenizer.encode("acbd=>ac:")
    assert ids.tolist() == [ALPHABET.index(c) for c in "acbd=>ac:"]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) == "acbd=>ac:"


def test_demonstrations_have_the_declared_rates():
    config = ToyBaseConfig(batch_size=4000)
    for settled, rate in ((True, config.scratchpad_rate), (False, config.practice_rate)):
        tokens, lengths = TASKS["swaps"].sample_batch(np.random.default_rng(0), config, settled=settled)
        texts = ["".join(ALPHABET[i] for i in row[:n]) for row, n in zip(tokens, lengths, strict=True)]
        assert all(text.endswith(EOS) for text in texts)
        right = {True: [], False: []}
        for text in texts:
            prompt, response = text[:-1].split("=", 1)
            right[">" in response].append(swaps_reward({"answer": followed(prompt)}, response, False))
        pads, direct = right[True], right[False]
        assert len(pads) / len(texts) == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / len(texts)))
        for scores, share in ((pads, 1 - config.wrong_digit_rate), (direct, 1 / 120)):
            assert np.mean(scores) == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / len(scores)))
