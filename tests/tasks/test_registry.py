import pytest

from adrl_jax.tasks.arithmetic import Arithmetic
from adrl_jax.tasks.registry import TASKS, build


def test_builds_by_name():
    assert build("arithmetic", high=5) == Arithmetic(high=5)
    assert all(builder.name == name for name, builder in TASKS.items())


def test_unknown_names_and_options_are_errors():
    with pytest.raises(ValueError, match=r"task='chess' is unknown; choose one of arithmetic, division, gsm8k"):
        build("chess")
    with pytest.raises(ValueError, match=r"'division' has no option 'digits'; choose from seed, median_steps"):
        build("division", digits=3)
    with pytest.raises(ValueError, match="no option 'tokenizer'"):
        build("division", tokenizer=None)
