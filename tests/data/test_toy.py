"""Tests of the toy tasks: right answers, disjoint splits, tokenizers, and demonstrations at the declared rates."""

import numpy as np
import pytest
from toy_texts import TASKS, ToyBaseConfig, toy_config, worked_addition, worked_swaps

from rljax.data import toy
from rljax.data.prompts import DataConfig, PromptStream, evaluation_datasets, training_problems
from rljax.data.tokenizer import load_tokenizer


def summed(prompt):
    a, b = map(int, prompt.split("+"))
    return str(a + b)


def followed(prompt):
    """Returns the order, found by moving the letters of a list place by place."""
    order = list(toy.LETTERS)
    for one, other in zip(prompt[::2], prompt[1::2], strict=True):
        i, j = order.index(one), order.index(other)
        order[i], order[j] = order[j], order[i]
    return "".join(order)


def worked_sum(prompt, *wrong):
    return worked_addition(*map(int, prompt.split("+")), *wrong)


def worked_order(prompt, *wrong):
    return worked_swaps([prompt[i : i + 2] for i in range(0, len(prompt), 2)], *wrong)


ADDITION = (toy.addition_problems, toy.addition_reward, summed, worked_sum, 3, toy.MAX_RESPONSE_TOKENS)
SWAPS = (toy.swap_problems, toy.swaps_reward, followed, worked_order, toy.SWAPS, toy.MAX_SWAPS_TOKENS)


def test_worked_answers_by_hand():
    assert worked_addition(123, 456) == ">3+6+0=09,2+5+0=07,1+4+0=05,579"
    assert worked_addition(999, 111) == ">9+1+0=10,9+1+1=11,9+1+1=11,1110"
    # The result is off by 2 at the tens: 2+5=09 instead of 07.
    assert worked_addition(123, 456, 1, 2) == ">3+6+0=09,2+5+0=09,1+4+0=05,599"
    pairs = ["ac", "bd", "ae", "bc"]
    assert toy.orders(pairs) == ["cbade", "cdabe", "cdeba", "bdeca"]
    assert worked_swaps(pairs) == ">ac:cbade,bd:cdabe,ae:cdeba,bc:bdeca"
    # The pairs in order are ab ac ad ae bc bd ... Two after bd is cd, and the order follows it from there on.
    assert worked_swaps(pairs, 1, 2) == ">ac:cbade,cd:dbace,ae:dbeca,bc:dceba"


@pytest.mark.parametrize(("problems", "reward", "right", "worked", "steps", "longest"), [ADDITION, SWAPS])
def test_right_answers_are_rewarded_and_wrong_ones_are_not(problems, reward, right, worked, steps, longest):
    rng = np.random.default_rng(0)
    for problem in problems("train", 600, seed=0):
        for wrong in ("", ",", ":", *(form.format(problem["answer"]) for form in ("0{}", "{}0", " {}", "{},", "{}:"))):
            assert reward(problem, wrong, False) == 0.0
        text = problem["prompt"].removesuffix("=")
        assert problem["answer"] == right(text)
        assert reward(problem, worked(text), False) == reward(problem, problem["answer"], False) == 1.0
        assert reward(problem, worked(text), True) == 0.0
        assert reward(problem, worked(text, int(rng.integers(steps)), int(rng.integers(1, 10))), False) == 0.0
        assert len(worked(text)) + 1 <= longest


@pytest.mark.parametrize(("problems", "count"), [(toy.addition_problems, 20_000), (toy.swap_problems, 9800)])
def test_splits_are_disjoint_and_fixed_by_the_seed(problems, count):
    train, eval_split = problems("train", seed=3), problems("eval", seed=3)
    prompts = {problem["prompt"] for problem in train}
    assert len(prompts) == len(train) == count
    assert len({problem["prompt"] for problem in eval_split} - prompts) == len(eval_split) == 200
    assert eval_split == problems("eval", 200, seed=3)
    assert eval_split != problems("eval", 200, seed=4)
    with pytest.raises(ValueError, match="the eval split has 200 problems, got size = 201"):
        problems("eval", 201)


@pytest.mark.parametrize(("task", "text"), [("addition", "123+456=>"), ("swaps", "acbd=>ac:")])
def test_a_tokenizer_has_one_token_a_character(task, text, tmp_path):
    alphabet = TASKS[task].alphabet
    toy.build_tokenizer(alphabet).save(tmp_path)
    tokenizer, config = load_tokenizer(tmp_path), toy_config(len(alphabet))
    assert len(tokenizer) == len(alphabet) == config.vocab_size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (config.eos_token_id, config.pad_token_id)
    ids = tokenizer.encode(text)
    assert ids.tolist() == [alphabet.index(character) for character in text]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) == text


@pytest.mark.parametrize(("task", "lucky"), [("addition", None), ("swaps", 1 / 120)])
def test_demonstrations_have_the_declared_rates(task, lucky):
    """A direct answer to an addition is right at its own rate, and a guessed order of five letters by luck."""
    config, alphabet = ToyBaseConfig(batch_size=4000), TASKS[task].alphabet
    _, reward, right, *_ = ADDITION if task == "addition" else SWAPS
    for settled, rate in ((True, config.scratchpad_rate), (False, config.practice_rate)):
        tokens, lengths = TASKS[task].sample_batch(np.random.default_rng(0), config, settled=settled)
        texts = ["".join(alphabet[i] for i in row[:n]) for row, n in zip(tokens, lengths, strict=True)]
        assert all(text.endswith(toy.EOS) for text in texts)
        scores = {True: [], False: []}
        for text in texts:
            prompt, response = text[:-1].split("=", 1)
            scores[">" in response].append(reward({"answer": right(prompt)}, response, False))
        assert len(scores[True]) / len(texts) == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / len(texts)))
        for worked, share in ((True, 1 - config.wrong_digit_rate), (False, lucky or 1 - config.wrong_direct_rate)):
            spread = np.sqrt(share * (1 - share) / len(scores[worked]))
            assert np.mean(scores[worked]) == pytest.approx(share, abs=4 * spread)


def test_stream_is_shuffled_repeats_differently_and_resumes():
    problems = toy.addition_problems("train", 40)
    stream = PromptStream(problems, 20, seed=1)
    batches = [stream.take() for _ in range(2)]
    state = stream.state_dict()
    batches += [stream.take() for _ in range(4)]
    for epoch in range(3):
        drawn = [p["prompt"] for batch in batches[2 * epoch : 2 * epoch + 2] for p in batch]
        assert sorted(drawn) == sorted(p["prompt"] for p in problems)
    assert batches[0] != batches[2]
    resumed = PromptStream(problems, 20, seed=1)
    resumed.load_state_dict(state)
    assert [resumed.take() for _ in range(4)] == batches[2:]
    assert PromptStream(problems, 20, seed=2).take() != batches[0]


def test_training_never_sees_a_problem_of_the_eval_split():
    (problems,) = evaluation_datasets([], DataConfig()).values()
    assert len(problems) == 200
    assert not {p["prompt"] for p in problems} & {p["prompt"] for p in training_problems(DataConfig())}
