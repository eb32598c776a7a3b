import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launches import ARMS, BATCHES, report

from adrl_jax.bandit.base import batch_bucket, off_arm, report_depth, reward, signature
from adrl_jax.speculation.strategy import OFF, Strategy


def test_the_arm_without_speculation():
    assert off_arm(ARMS) == 0
    assert off_arm((Strategy("eagle", 2), OFF)) == 1


def test_reports_are_as_long_as_the_deepest_strategy():
    assert report_depth(ARMS) == 4
    assert report_depth((OFF,)) == 1


def test_batches_land_in_the_smallest_bucket_that_holds_them():
    got = [int(batch_bucket(BATCHES, b)) for b in (1, 2, 4, 5, 16, 64, 1000)]
    assert got == [0, 1, 1, 2, 2, 3, 3]


def test_reward_is_tokens_per_second_and_request():
    assert reward(report(0, 4, 24.0, 2.0)) == 3.0


def test_signature_tells_arms_their_order_and_sizes_apart():
    same = [signature("goodput", ARMS, batch_buckets=BATCHES) for _ in range(2)]
    assert same[0] == same[1]
    others = {
        signature("ucb", ARMS, batch_buckets=BATCHES),
        signature("goodput", ARMS[::-1], batch_buckets=BATCHES),
        signature("goodput", ARMS[:-1], batch_buckets=BATCHES),
        signature("goodput", (*ARMS[:-1], Strategy("ngram", 3)), batch_buckets=BATCHES),
        signature("goodput", ARMS, batch_buckets=(1, 4)),
        signature("goodput", (*ARMS[:-1], Strategy("ngram", 2, 2, 5)), batch_buckets=BATCHES),
    }
    assert len(others) == 6 and same[0] not in others
    assert "eagle-d4" in same[0], "a person reads it in the message of a refused resume"


def test_checks_leave_traced_values_alone():
    """Inside a program the values are not there yet; whoever compiles it vouches for them."""
    from adrl_jax.bandit.fixed import fixed

    bandit = fixed(0, 1)
    tell = jax.jit(lambda state, running: bandit.update(state, report(0, 1, 1.0, 1.0)._replace(running=running)))
    assert int(tell(bandit.init(), jnp.int32(-3)).reports) == 1
    with pytest.raises(ValueError, match="running"):
        bandit.update(bandit.init(), report(0, 1, 1.0, 1.0)._replace(running=np.int32(-3)))
