import pytest

from adrl_jax.models.tokenizer import CharTokenizer
from adrl_jax.tasks.arithmetic import Arithmetic

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def tokenizer():
    return CharTokenizer("".join(chr(i) for i in range(32, 127)), chat_template=TEMPLATE)


def test_every_problem_is_in_exactly_one_split(tokenizer):
    task = Arithmetic(operations=("+", "-")).encode(tokenizer)
    train, test = ({p.metadata["problem"] for p in task.prompts(split)} for split in task.splits)
    assert len(train) + len(test) == 81 + 45 and not train & test
    assert len(test) == 26


def test_prompts_and_references(tokenizer):
    task = Arithmetic(operations=("*",), system="Be brief.").encode(tokenizer)
    for prompt in task.prompts("train"):
        a, _, b = prompt.metadata["problem"].split()
        assert prompt.reference == int(a) * int(b)
        assert prompt.text == f"[system]Be brief.[user]What is {a} * {b}? Answer with one number.[assistant]"
        assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_order_depends_on_the_seed_alone(tokenizer):
    texts = [[p.text for p in Arithmetic(seed=s).encode(tokenizer).prompts("train")] for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "response, truncated, value, reason",
    [
        ("12", False, 1.0, "match"),
        ("7 + 5 = 12.", False, 1.0, "match"),
        ("The answer is 12. Since 7", True, 1.0, "match"),
        ("7 + 5 = 12", True, 0.0, "unparsed_response"),
        ("13", False, 0.0, "mismatch"),
        ("twelve", False, 0.0, "unparsed_response"),
    ],
)
def test_scores(tokenizer, response, truncated, value, reason):
    task = Arithmetic().encode(tokenizer)
    prompt = next(p for p in [*task.prompts("train"), *task.prompts("test")] if p.metadata["problem"] == "7 + 5")
    score = task.score(prompt, response, truncated)
    assert (score.value, score.reason) == (value, reason)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"operations": ()}, "operations="),
        ({"operations": ("/",)}, r"operations=.*\+, -, \*"),
        ({"low": 5, "high": 5}, "low < high"),
        ({"low": -1}, "low=-1"),
        ({"low": 1, "high": 2}, "only 4 problems"),
        ({"question": "What is {a} plus {b}?"}, "lacks {op}"),
        ({"mode": "any"}, "mode='any'"),
    ],
)
def test_settings_out_of_range_are_errors(options, match):
    with pytest.raises(ValueError, match=match):
        Arithmetic(**options)


def test_needs_a_tokenizer_and_a_known_split(tokenizer):
    with pytest.raises(ValueError, match=r"call task\.encode"):
        Arithmetic().prompts("train")
    with pytest.raises(ValueError, match="split='valid'"):
        Arithmetic().encode(tokenizer).prompts("valid")
