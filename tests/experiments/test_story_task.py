"""The reward of the stories by hand: the share of the words that a problem asks for, unless the text is cut off."""

from story_task import problems, reward


def test_a_text_is_scored_by_its_words_and_its_end():
    texts = ["", "A cat isn't 3 dogs.", "One two three four five six"]  # numbers are no words
    assert [reward({"answer": "5"}, text, False) for text in texts] == [0.0, 0.8, 1.0]
    assert reward({"answer": "5"}, texts[-1], True) == 0.0


def test_each_problem_asks_for_its_answer():
    made = problems()
    assert len({problem["prompt"] for problem in made}) == len(made) == 24 * 9
    assert all(f"at least {problem['answer']} words" in problem["prompt"] for problem in made)
