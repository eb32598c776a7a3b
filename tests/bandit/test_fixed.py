import jax
import pytest
from launches import context, report

from adrl_jax.bandit.fixed import fixed


def test_always_the_same_arm_whatever_is_reported():
    bandit = fixed(1, num_arms=3)
    state = bandit.init()
    for i in range(20):
        assert int(bandit.select(state, jax.random.key(i), context(i + 1))) == 1
        state = bandit.update(state, report(1, i + 1, 1, 1e6))
    assert int(state.reports) == 20


@pytest.mark.parametrize("arm, num_arms", [(-1, 3), (3, 3), (0, 0)])
def test_an_arm_that_does_not_exist_is_an_error(arm, num_arms):
    with pytest.raises(ValueError, match=f"arm={arm}"):
        fixed(arm, num_arms)
