import warnings

import pytest

from adrl_jax.rewards.checks import warn_if_unparsed
from adrl_jax.types import Score

UNPARSED, WRONG = Score(0.0, None, "unparsed_response"), Score(0.0, "5", "mismatch")


def test_warns_where_nothing_parses():
    with pytest.warns(UserWarning, match=r"none of 2 responses.*'well, well'"):
        warn_if_unparsed([UNPARSED, UNPARSED], ["well, well", "?"])


@pytest.mark.parametrize("scores", [[], [UNPARSED, WRONG], [WRONG]])
def test_is_silent_otherwise(scores):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_unparsed(scores, ["?"] * len(scores))
