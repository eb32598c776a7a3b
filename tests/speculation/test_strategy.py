import pytest

from adrl_jax.speculation.strategy import OFF, Strategy


def test_names_and_tokens_of_a_pass():
    assert OFF.name == "off" and OFF.verify_tokens == 1 and not OFF.speculates
    assert Strategy("eagle", 4).name == "eagle-d4" and Strategy("eagle", 4).verify_tokens == 5
    assert Strategy("eagle", 8, width=4, verify_tokens=32).name == "eagle-d8-w4-v32"
    assert Strategy("ngram", 2) == Strategy("ngram", 2, 1, 3) and len({Strategy("ngram", 2), Strategy("ngram", 2)}) == 1


@pytest.mark.parametrize(
    "fields, named",
    [
        (("eagle", 0), "depth"),
        (("none", 2), "depth"),
        (("eagle", -1), "depth"),
        (("eagle", 2.0), "depth"),
        (("eagle", True), "depth"),
        (("", 2), "drafter"),
        (("eagle", 2, 0), "width"),
        (("eagle", 2, 1, 1), "verify_tokens"),
        (("eagle", 2, 1, 9), "verify_tokens"),
        (("eagle", 4, 2, 3), "verify_tokens"),
        (("eagle", 4, 2, "8"), "verify_tokens"),
    ],
)
def test_wrong_fields_are_named(fields, named):
    with pytest.raises(ValueError, match=named):
        Strategy(*fields)
