"""The reward of the stories by hand: the share of the words that a problem asks for, unless the text is cut off."""

import pytest
from story_task import problems, reward


@pytest.mark.parametrize(
    ("text", "truncated", "expected"),
    [
        ("", False, 0.0),
        ("A cat isn't 3 dogs.", False, 0.8),  # numbers are no words
        ("One two three four five six", False, 1.0),
        ("One two three four five six", True, 0.0),
    ],
)
def test_a_text_is_scored_by_its_words_and_its_end(text, truncated, expected):
    assert reward({"answer": "5"}, text, truncated) == expected


def test_each_problem_asks_for_its_answer():
    made = problems()
    assert len({problem["prompt"] for problem in made}) == len(made) == 24 * 9
    assert all(f"at least {problem['answer']} words" in problem["prompt"] for problem in made)
