import pytest

from adrl_jax.rewards.extract import extract_answer, extract_number, last_boxed


@pytest.mark.parametrize(
    "response, text",
    [
        ("so\n#### 72", "72"),
        ("#### 1,000", "1,000"),
        ("#### $3.50", "$3.50"),
        ("#### -7", "-7"),
        ("#### 42.", "42."),
        ("#### 1e3", "1e3"),
        ("#### 72 clips", "72"),
        ("#### 5 + 3 = 8 apples", "8"),
        ("#### 1\n#### 2", "2"),
        ("2+40=42\n#### 42\n" + "The reason for 7 is simple. " * 18, "42"),
        ("#### ,", None),
        ("####", None),
        ("no marker: 42", None),
        (r"\boxed{42}", None),
        ("The answer is 42.", None),
    ],
)
def test_strict_reads_the_marked_line_only(response, text):
    assert extract_number(response, "strict").text == text


@pytest.mark.parametrize(
    "response, text, form",
    [
        (r"\boxed{42}", "42", "boxed"),
        (r"\boxed{840}. So **Final Answer** \boxed{840}", "840", "boxed"),
        (r"\boxed{004} or \boxed{004}", "004", "boxed"),
        (r"\boxed{18 \text{ dollars}}", "18", "boxed"),
        (r"\boxed{x = 18}", "18", "boxed"),
        (r"\boxed{3x}", None, "boxed"),
        (r"\boxed{(1, 2)}", None, "boxed"),
        (r"\boxed{7} and \boxed{", None, "boxed"),
        (r"\boxed{7} and \boxed{}", None, "boxed"),
        ("The answer is 42.", "42.", "phrase"),
        ("The final answer is: $42 per week", "$42", "phrase"),
        ("the answer is 6*3=18 apples", "18", "phrase"),
        ("So 3 + 4 = 7\nA: 7", "7", "phrase"),
        ("The answer is clear.", None, "none"),
        ("The total is 72 clips, altogether.", "72", "number"),
        ("It is $29.00.", "$29.00", "number"),
        ("It is \u22125", "-5", "number"),
        ("#### ,\nor perhaps 5", None, "marker"),
        ("#### 42 but then \\boxed{7}", "42", "marker"),
        ("", None, "none"),
    ],
)
def test_flexible_takes_the_strongest_form(response, text, form):
    assert extract_number(response, "flexible") == (text, form)


def test_braces_are_balanced():
    assert last_boxed(r"\boxed{\frac{1}{2}}, done") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{\frac{1}{2}") == ""
    assert last_boxed("none") is None


@pytest.mark.parametrize("extract", [extract_answer, extract_number])
def test_unknown_mode_is_an_error(extract):
    with pytest.raises(ValueError, match=r"mode='loose'.*strict, flexible"):
        extract("5", "loose")
