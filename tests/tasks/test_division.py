import numpy as np
import pytest

from adrl_jax.models.tokenizer import CharTokenizer
from adrl_jax.tasks.division import ALPHABET, Division, working
from adrl_jax.types import Prompt


@pytest.fixture(scope="module")
def task():
    return Division().encode(CharTokenizer(ALPHABET))


def test_working_by_hand():
    assert working(97, 12, 2) == "85 73 61 49 37 25 13 01=01"
    assert working(14, 7, 2) == "07 00=00"
    assert working(100, 33, 3) == "067 034 001=001"


def test_slips_come_at_the_stated_rate_and_the_rest_follows_from_them():
    task = Division(slip_rate=0.2)
    steps = wrong = 0
    for i in range(2000):
        text, response = task.supervised_example(i)
        left, divisor = map(int, text.rstrip("=").split("%"))
        shown, answer = response.split("=")
        for number in map(int, shown.split()):
            assert 0 <= number < left and abs(number - (left - divisor)) <= 9
            steps, wrong = steps + 1, wrong + (number != left - divisor)
            left = number
        assert int(answer) == left < divisor
    assert abs(wrong / steps - 0.2) < 0.02


def test_prompts_are_encoded_repeatable_and_indexable(task):
    prompts = task.prompts("train")
    assert len(prompts) == 100_000
    first = prompts[17]
    assert first.prompt_id == 17 and first.text == task.tokenizer.decode(first.token_ids)
    assert prompts[17].text == first.text and prompts[-1].prompt_id == 99_999
    assert [p.prompt_id for p in prompts[3:6]] == [3, 4, 5]
    with pytest.raises(IndexError, match="100000"):
        prompts[100_000]
    dividend, divisor = map(int, first.text.rstrip("=").split("%"))
    assert first.reference == dividend % divisor and first.metadata["steps"] == dividend // divisor


def test_seeds_name_different_problems():
    a, b = Division(seed=0), Division(seed=1)
    assert [a.problem("train", i) for i in range(20)] != [b.problem("train", i) for i in range(20)]
    assert [a.problem("train", i) for i in range(20)] != [a.problem("supervised", i) for i in range(20)]


def test_test_problems_are_never_trained_on(task):
    test = {task.problem("test", i) for i in range(256)}
    seen = {task.problem(stream, i) for stream in ("train", "supervised") for i in range(3000)}
    assert len(test) > 100 and not test & seen


def test_supervised_responses_without_slips_score_1(task):
    prompts, careful = task.prompts("train"), Division(slip_rate=0.0)
    for i in range(200):
        text, response = careful.supervised_example(i)
        dividend, divisor = map(int, text.rstrip("=").split("%"))
        assert set(text + response) <= set(ALPHABET)
        prompt = Prompt(0, prompts[0].token_ids, text, reference=dividend % divisor)
        assert task.score(prompt, response, False).value == 1.0


def test_lengths_have_a_heavy_tail(task):
    lengths = np.array([len(task.supervised_example(i)[1]) for i in range(4000)])
    median, p99 = np.percentile(lengths, [50, 99])
    assert p99 / median >= 6
    assert lengths.max() <= 98
    assert np.mean(lengths > 3 * median) < 0.15


@pytest.mark.parametrize(
    "response, truncated, value, reason",
    [
        ("85 73 01=01", False, 1.0, "match"),
        ("85 73 01=1", False, 1.0, "match"),
        ("85 73 01=02", False, 0.0, "mismatch"),
        ("85 73 01=01", True, 0.0, "unparsed_response"),
        ("85 73 01", False, 0.0, "unparsed_response"),
        ("85=01 01", False, 0.0, "unparsed_response"),
        ("=02=01", False, 1.0, "match"),
        ("01=", False, 0.0, "unparsed_response"),
        ("", False, 0.0, "unparsed_response"),
    ],
)
def test_scores(task, response, truncated, value, reason):
    score = task.score(Prompt(0, np.array([2]), reference=1), response, truncated)
    assert (score.value, score.reason) == (value, reason)


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_steps", 0),
        ("max_steps", 2.5),
        ("train_size", -1),
        ("median_steps", 0.5),
        ("median_steps", 40.0),
        ("median_steps", float("nan")),
        ("sigma", -1.0),
        ("max_divisor", 2),
        ("slip_rate", 1.0),
        ("slip_rate", -0.1),
        ("max_dividend", 50),
    ],
)
def test_settings_out_of_range_are_errors(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        Division(**{field: value})


def test_needs_a_tokenizer_and_a_known_split(task):
    with pytest.raises(ValueError, match=r"call task\.encode"):
        Division().prompts("train")
    with pytest.raises(ValueError, match=r"split='valid'.*train, test"):
        task.prompts("valid")
