"""Tests of the toy task: right arithmetic, disjoint splits, and a base directory that transformers reads."""

import numpy as np
import pytest
from toy_texts import TASKS, ToyBaseConfig
from toy_texts import worked_addition as scratchpad

from rljax.data.prompts import DataConfig, PromptStream, evaluation_datasets, training_problems
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import (
    ALPHABET,
    EOS,
    MAX_RESPONSE_TOKENS,
    addition_problems,
    addition_reward,
    build_tokenizer,
)


def test_scratchpad_by_hand():
    assert scratchpad(123, 456) == ">3+6+0=09,2+5+0=07,1+4+0=05,579"
    assert scratchpad(999, 111) == ">9+1+0=10,9+1+1=11,9+1+1=11,1110"
    # The result is off by 2 at the tens: 2+5=09 instead of 07.
    assert scratchpad(123, 456, 1, 2) == ">3+6+0=09,2+5+0=09,1+4+0=05,599"


@pytest.mark.parametrize("seed", range(3))
def test_right_scratchpads_are_rewarded_and_wrong_ones_are_not(seed):
    rng = np.random.default_rng(seed)
    for a, b in rng.integers(100, 1000, (200, 2)):
        problem = {"prompt": f"{a}+{b}=", "answer": str(a + b)}
        assert addition_reward(problem, scratchpad(int(a), int(b)), False) == 1.0
        assert addition_reward(problem, scratchpad(int(a), int(b)), True) == 0.0
        wrong = scratchpad(int(a), int(b), int(rng.integers(3)), int(rng.integers(1, 10)))
        assert addition_reward(problem, wrong, False) == 0.0
        assert addition_reward(problem, str(a + b), False) == 1.0
        assert len(scratchpad(int(a), int(b))) + 1 <= MAX_RESPONSE_TOKENS


@pytest.mark.parametrize("response", ["", ",", "0579", "5790", " 579", "579,"])
def test_near_misses_are_not_rewarded(response):
    assert addition_reward({"prompt": "123+456=", "answer": "579"}, response, False) == 0.0


def test_splits_are_disjoint_and_fixed_by_the_seed():
    train, eval_split = addition_problems("train", seed=3), addition_problems("eval", 200, seed=3)
    prompts = {p["prompt"] for p in train}
    assert len(prompts) == 20_000
    assert len({p["prompt"] for p in eval_split} - prompts) == 200
    assert list(eval_split) == list(addition_problems("eval", 200, seed=3))
    assert list(eval_split) != list(addition_problems("eval", 200, seed=4))
    for p in eval_split:
        a, b = p["prompt"][:-1].split("+")
        assert int(a) + int(b) == int(p["answer"])


def test_tokenizer_is_one_token_a_character_and_reads_back(tmp_path):
    build_tokenizer().save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == len(ALPHABET) == 16
    ids = tokenizer.encode("123+456=>")
    assert ids.tolist() == [ALPHABET.index(c) for c in "123+456=>"]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) == "123+456=>"
    with pytest.raises(ValueError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nowhere")


def test_demonstrations_have_the_declared_rates():
    config = ToyBaseConfig(batch_size=4000)
    for settled, rate in ((True, config.scratchpad_rate), (False, config.practice_rate)):
        tokens, lengths = TASKS["addition"].sample_batch(np.random.default_rng(0), config, settled=settled)
        texts = ["".join(ALPHABET[i] for i in row[:n]) for row, n in zip(tokens, lengths, strict=True)]
        pads = [text for text in texts if ">" in text]
        direct = [text for text in texts if ">" not in text]
        assert all(text.endswith(EOS) for text in texts)
        assert len(pads) / len(texts) == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / len(texts)))
        for group, wrong in ((pads, config.wrong_digit_rate), (direct, config.wrong_direct_rate)):
            right = 0
            for text in group:
                prompt, response = text[:-1].split("=", 1)
                a, b = prompt.split("+")
                right += addition_reward({"answer": str(int(a) + int(b))}, response, False)
            spread = np.sqrt(wrong * (1 - wrong) / len(group))
            assert 1 - right / len(group) == pytest.approx(wrong, abs=4 * spread)


def test_stream_is_shuffled_repeats_differently_and_resumes():
    problems = addition_problems("train", 40)
    stream = PromptStream(problems, 20, seed=1)
    batches = [stream.next_batch() for _ in range(2)]
    state = stream.state_dict()
    batches += [stream.next_batch() for _ in range(4)]
    for epoch in range(3):
        drawn = [p["prompt"] for batch in batches[2 * epoch : 2 * epoch + 2] for p in batch]
        assert sorted(drawn) == sorted(p["prompt"] for p in problems)
    assert batches[0] != batches[2]
    resumed = PromptStream(problems, 20, seed=1)
    resumed.load_state_dict(state)
    assert [resumed.next_batch() for _ in range(4)] == batches[2:]
    assert PromptStream(problems, 20, seed=2).next_batch() != batches[0]


def test_training_never_sees_a_problem_of_the_eval_split():
    config = DataConfig()
    (problems,) = evaluation_datasets([], config).values()
    assert len(problems) == 200
    assert not {p["prompt"] for p in problems} & {p["prompt"] for p in training_problems(config)}
