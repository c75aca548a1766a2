"""Reward functions of other frameworks are told by their parameters' names, and get what their framework gives."""

import asyncio
import contextvars
import functools

import pytest

from rljax.data.files import parse_row
from rljax.rewards.call_forms import NamedReward

MESSAGES = [{"role": "user", "content": "2+5"}]
CHAT = {
    **{"prompt": "<user>2+5<assistant>", "raw_prompt": MESSAGES, "answer": "7", "data_source": "sums"},
    "extra_info": {"split": "train", "answer": "2+5=7", "level": 3},
}
PLAIN = {"prompt": "2+5=", "answer": "7", "data_source": "", "extra_info": {}}
GOT = {}
CONTEXT = contextvars.ContextVar("context", default=0)


def noted(given):
    """Notes arguments by name, with those of ``**columns`` or ``**kwargs`` among them."""
    GOT.clear()
    more = {**given.pop("columns", {}), **given.pop("kwargs", {})}
    GOT.update(given | more)


def recorded(parameters, returned):
    """Returns a function with these parameters. It notes its arguments by name."""
    return eval(f"lambda {parameters}: noted(locals()) or returned", {"noted": noted, "returned": returned})


verl = recorded("data_source, solution_str, ground_truth, extra_info=None", {"score": 0.5, "acc": True})
verl_open = recorded("data_source, **kwargs", True)
gsm8k = recorded("solution_str, ground_truth, method='strict', score=1.0", 0.25)
math_dapo = recorded("solution_str, ground_truth, pause_tokens_index=None", {"score": -1.0, "acc": False, "pred": "8"})
skyrl = recorded("output, ground_truth, extra_info=None", 1)
positional = recorded("solution_str, ground_truth, /", (True, "why"))
batch = recorded("data_sources, solution_strs, ground_truths, extra_infos", [{"score": 0.5, "acc": True}])
trl_three = recorded("prompts, completions, answer", [1])
trl = recorded("completions, **columns", [0.5])
trl_column = recorded("level, completions, **kwargs", [0.5])
openrlhf = recorded("queries, prompts, labels, **kwargs", {"rewards": [0.75], "scores": [1.0], "extra_logs": {}})


async def slow(solution_str, ground_truth):
    noted({"loop": asyncio.get_running_loop(), "tasks": len(asyncio.all_tasks()), "before": CONTEXT.get()})
    CONTEXT.set(1)
    GOT["left"] = asyncio.ensure_future(asyncio.sleep(60))
    return 0.5


class Exact:
    def __call__(self, completions, solution, **kwargs):
        return [float(completions[0][0]["content"] == solution[0])]


EXTRA = CHAT["extra_info"]
OF_VERL = {"data_source": "sums", "solution_str": "8", "ground_truth": "7", "extra_info": EXTRA}
SAID = [[{"role": "assistant", "content": "8"}]]
STRICT = {"solution_str": "8", "ground_truth": "7", "method": "strict", "score": 1.0}
# The columns of TRL are lists of one, without the prompt.
OF_TRL = {"prompts": [MESSAGES], "completions": SAID, "answer": ["7"], "data_source": ["sums"], "level": [3]}


@pytest.mark.parametrize(
    ("function", "problem", "got", "reward"),
    [
        (verl, CHAT, OF_VERL, 0.5),
        (verl_open, CHAT, OF_VERL, 1.0),
        (gsm8k, CHAT, STRICT, 0.25),
        (functools.partial(gsm8k, method="flexible"), PLAIN, STRICT | {"method": "flexible"}, 0.25),
        (math_dapo, CHAT, {"solution_str": "8", "ground_truth": "7", "pause_tokens_index": None}, -1.0),
        (skyrl, CHAT, {"output": "8", "ground_truth": "7", "extra_info": EXTRA}, 1.0),
        (positional, CHAT, {"solution_str": "8", "ground_truth": "7"}, 1.0),
        (batch, CHAT, {f"{name}s": [value] for name, value in OF_VERL.items()}, 0.5),
        (trl_three, CHAT, {"prompts": [MESSAGES], "completions": SAID, "answer": ["7"]}, 1.0),
        (trl_three, PLAIN, {"prompts": ["2+5="], "completions": ["8"], "answer": ["7"]}, 1.0),
        (trl, CHAT, OF_TRL | {"split": ["train"], "ground_truth": ["7"], "solution": ["7"]}, 0.5),
        (trl_column, CHAT, OF_TRL, 0.5),
        (
            openrlhf,
            CHAT,
            {"queries": ["<user>2+5<assistant>8"], "prompts": ["<user>2+5<assistant>"], "labels": ["7"]},
            0.75,
        ),
    ],
)
def test_a_reward_gets_what_its_framework_gives(function, problem, got, reward):
    assert NamedReward(function)(problem, "8", False) == reward
    assert {name: GOT.get(name) for name in got} == got
    assert function in (trl, trl_column) or got.keys() == GOT.keys()
    assert not {"prompt", "raw_prompt"} & GOT.keys()


def test_all_right_answers_of_a_row_are_its_ground_truth():
    several = {"prompt": "1/2?", "answer": "1/2", "alternatives": ["1/2", "0.5"], "templated": True}
    verl = NamedReward(lambda data_source, solution_str, ground_truth, extra_info: solution_str in ground_truth)
    assert [verl(several, response, False) for response in ("1/2", "0.5", "2")] == [1.0, 1.0, 0.0]
    assert NamedReward(trl)(several, "0.5", False) == 0.5
    assert GOT["answer"] == GOT["ground_truth"] == [["1/2", "0.5"]]
    assert not {"templated", "alternatives"} & GOT.keys()


def test_columns_and_right_answers_are_given_as_they_stand():
    row = {"prompt": "make 44", "answer": 44, "nums": [19, 25], "solution": "19+25 $\\boxed{44}$"}
    problem = parse_row(row, "row 1", whole=True)
    assert NamedReward(trl)(problem, "19+25", False) == 0.5
    assert (GOT["nums"], GOT["solution"], GOT["answer"]) == ([[19, 25]], ["19+25 $\\boxed{44}$"], [44])
    assert "columns" not in GOT
    for truth in ({"target": 44, "numbers": [19, 25]}, [19, 25], ["44"], ["a", "b"], 44, 0, 0.5, False):
        row = {"prompt": "make 44", "reward_model": {"ground_truth": truth}}
        NamedReward(gsm8k)(parse_row(row, "row 1", whole=True), "19+25", False)
        assert (GOT["ground_truth"], type(GOT["ground_truth"])) == (truth, type(truth))


def test_a_class_and_an_async_function_are_called():
    assert NamedReward(Exact())(CHAT, "7", False) == 1.0
    assert NamedReward(slow)(CHAT, "7", False) == 0.5
    loop = GOT["loop"]
    assert GOT["left"].cancelled()
    assert NamedReward(slow)(CHAT, "7", False) == 0.5
    # A client that the function keeps is bound to the loop. What else a call leaves does not reach the next one.
    assert (GOT["loop"], GOT["tasks"], GOT["before"]) == (loop, 1, 0)


@pytest.mark.parametrize(
    ("names", "more"), [("problem, response, truncated", ""), ("example, text, cut", ", scale=2.0, **options")]
)
def test_a_third_name_for_the_cut_is_rljaxs_form(names, more):
    first, second, third = names.split(", ")
    reward = eval(f"lambda {names}{more}: ({first}['answer'] == {second}) - 3 * {third}")
    assert NamedReward(reward)(PLAIN, "7", False) == 1.0
    assert NamedReward(reward)(PLAIN, "8", True) == -3.0


FORMS = "verl's (data_source, solution_str, ground_truth, extra_info) or TRL's (prompts, completions, **columns)"
LACKING = {
    **{"args, sample, **kwargs": "args, sample", "prompt, completion, answer, state": "state"},
    "prompt, completions, prompt_ids, completion_ids, answer, **kwargs": "completion_ids, prompt_ids",
    "completions, trainer_state, **kwargs": "trainer_state",
    "data_source, solution_str, ground_truth, extra_info, reward_router_address": "reward_router_address",
    **{"problem, response, ground_truth": "problem", "response, output, ground_truth": "output, response"},
    **{"*args, **kwargs": "", "problem, response": "", "problem, response, truncated, scale": ""},
    "problem, response, *, truncated": "",
}


@pytest.mark.parametrize("parameters", LACKING)
def test_what_is_not_recognised_shows_the_three_forms(parameters):
    with pytest.raises(ValueError, match="takes ") as refused:
        NamedReward(eval(f"lambda {parameters}: 0.0"))
    why = f", but {LACKING[parameters]} cannot be given" if LACKING[parameters] else ""
    expected = f"takes ({parameters}){why}; a reward takes (problem, response, truncated), {FORMS}"
    assert str(refused.value) == expected


def test_what_is_no_reward_raises():
    for reward, said in (
        (lambda completions, **columns: [None], "it returned None, so it does not apply to this row"),
        (lambda completions, **columns: [1.0, 0.0], "it returned 2 rewards for a list of one response"),
        (lambda completions, nums, **columns: [1.0], "it needs the column 'nums', but the row has only answer, ground"),
        (lambda solution_str, ground_truth: {"acc": 1}, "it returned a dict without 'score', with acc"),
        (lambda problem, response, truncated: None, "it returned None, so it does not apply to this row"),
    ):
        with pytest.raises(ValueError, match=said):
            NamedReward(reward)(CHAT, "8", False)
