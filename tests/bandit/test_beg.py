import dataclasses

import jax
import numpy as np
import pytest
from launches import context, report

from adrl_jax.bandit.base import tokens_to_verify
from adrl_jax.bandit.beg import beg, beg_static, bucket_of, bucket_table, medians


@dataclasses.dataclass(frozen=True)
class Arm:
    depth: int
    verify_tokens: int | None = None


def key(i):
    return jax.random.fold_in(jax.random.key(11), i)


def test_groups_by_tokens_to_verify_most_first():
    arms = (Arm(8, 16), Arm(0), Arm(8, 48), Arm(4, 16), Arm(8, 32), Arm(8, 8))
    table = bucket_table(arms, (1, 2, 5, 21))
    assert [np.flatnonzero(row).tolist() for row in table] == [[1, 2], [1, 4], [0, 1, 3], [1, 5]]


def test_a_chain_verifies_its_depth_and_one():
    assert tokens_to_verify(Arm(4)) == 5
    assert tokens_to_verify(Arm(0)) == 1


def test_batch_sizes_land_in_the_bucket_as_written():
    thresholds = (1, 64, 128)
    assert [int(bucket_of(b, thresholds)) for b in (1, 63, 64, 127, 128, 10_000)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    "arms, thresholds, match",
    [
        ((Arm(4),), (1,), "without speculation"),
        ((Arm(0), Arm(0)), (1,), "without speculation"),
        ((Arm(0), Arm(4)), (2,), "must start at 1"),
        ((Arm(0), Arm(4), Arm(8)), (1, 1), "increase"),
        ((Arm(0), Arm(4)), (), "must start at 1"),
        ((Arm(0), Arm(4), Arm(8)), (1,), "one entry for each"),
        ((Arm(0), Arm(4)), (1, 8), "one entry for each"),
    ],
)
def test_thresholds_that_do_not_fit_are_errors(arms, thresholds, match):
    with pytest.raises(ValueError, match=match):
        beg(arms, thresholds)


@pytest.mark.parametrize("field, value", [("epsilon", -0.1), ("epsilon", 1.1), ("window", 0), ("max_age", 0)])
def test_settings_out_of_range_are_errors(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        beg((Arm(0), Arm(4)), (1,), **{field: value})


def test_no_speculation_alone_is_a_legal_run():
    bandit = beg((Arm(0),), (1,))
    assert int(bandit.select(bandit.init(), key(0), context(9))) == 0


def test_reports_are_credited_to_the_arm_that_ran():
    """A was started, B chosen before A reports: A = 10, B = 1."""
    bandit = beg((Arm(0), Arm(4)), (1,))
    state = bandit.init()
    state = bandit.update(state, report(0, 4, 10, 1.0))
    state = bandit.update(state, report(1, 4, 1, 1.0))
    state = bandit.update(state, report(0, 4, 10, 1.0))
    np.testing.assert_allclose(medians(state), [[10.0, 1.0]])


def test_each_bucket_learns_for_itself():
    """Depth 7 is best at batch 4, off is best at batch 128."""
    arms = (Arm(0), Arm(7), Arm(3), Arm(1))
    bandit = beg(arms, (1, 64, 128), epsilon=0.1)
    tokens_per_s = {4: (10, 30, None, None), 64: (100, None, 120, None), 128: (200, None, None, 90)}
    state, last = bandit.init(), {}
    for i in range(150):
        for running, speeds in tokens_per_s.items():
            arm = int(bandit.select(state, key(3 * i + running), context(running)))
            assert speeds[arm] is not None, "an arm of another bucket was picked"
            state = bandit.update(state, report(arm, running, speeds[arm], 1.0, depth=7))
            last.setdefault(running, []).append(arm)
    majority = {running: np.bincount(arms[10:]).argmax() for running, arms in last.items()}
    assert majority == {4: 1, 64: 2, 128: 0}
    got = np.asarray(medians(state))
    np.testing.assert_allclose(got[0, :2], [10, 30])
    np.testing.assert_allclose(got[2, [0, 3]], [200, 90])
    assert np.isnan(got[0, 2:]).all()


def test_untried_arms_come_before_any_repeat_even_when_exploring():
    arms = (Arm(0), Arm(4, 8), Arm(6, 8), Arm(8, 8))
    for epsilon in (0.0, 1.0):
        bandit, picks = beg(arms, (1,), epsilon=epsilon), []
        state = bandit.init()
        for i in range(4):
            picks.append(int(bandit.select(state, key(i), context(2))))
            state = bandit.update(state, report(picks[-1], 2, 5, 1.0, depth=8))
        assert sorted(picks) == [0, 1, 2, 3]


def test_untried_in_one_bucket_does_not_mean_untried_in_another():
    bandit = beg((Arm(0), Arm(7), Arm(3)), (1, 8), epsilon=0.0)
    state = bandit.init()
    for arm, running in ((0, 2), (1, 2), (2, 8)):
        state = bandit.update(state, report(arm, running, 50 + arm, 1.0, depth=7))
    assert int(bandit.select(state, key(0), context(2))) == 1
    assert int(bandit.select(state, key(0), context(8))) == 0, "off was never run at this batch size"


def test_the_median_outlives_one_slow_launch():
    bandit = beg((Arm(0), Arm(4)), (1,), epsilon=0.0)
    state = bandit.init()
    for seconds in (1.0, 1.0, 10.0):  # the last one was disturbed
        state = bandit.update(state, report(1, 1, 20, seconds))
        state = bandit.update(state, report(0, 1, 10, 1.0))
    assert int(bandit.select(state, key(0), context(1))) == 1
    np.testing.assert_allclose(medians(state), [[10, 20]])


def test_median_of_an_even_number_is_the_mean_of_the_middle_two():
    bandit = beg((Arm(0), Arm(4)), (1,), window=4)
    state = bandit.init()
    for tokens in (100, 1, 4, 2, 8):  # the window forgets the 100
        state = bandit.update(state, report(0, 1, tokens, 1.0))
    np.testing.assert_allclose(medians(state)[0, 0], 3.0)


def test_epsilon_is_the_share_of_random_picks():
    arms = (Arm(0), Arm(4, 8), Arm(6, 8), Arm(8, 8))
    bandit = beg(arms, (1,), epsilon=0.4)
    state = bandit.init()
    for arm, tokens in enumerate((1, 9, 2, 3)):
        state = bandit.update(state, report(arm, 1, tokens, 1.0, depth=8))
    keys = jax.random.split(jax.random.key(5), 4000)
    picks = np.asarray(jax.vmap(lambda k: bandit.select(state, k, context(1)))(keys))
    shares = np.bincount(picks, minlength=4) / len(picks)
    np.testing.assert_allclose(shares, [0.1, 0.7, 0.1, 0.1], atol=0.03)


@pytest.mark.parametrize(
    "before, after, max_age",
    [((100.0, 40.0), (20.0, 40.0), None), ((50.0, 30.0), (50.0, 120.0), 100)],
    ids=["the best arm gets worse", "a poor arm gets better"],
)
def test_a_new_best_arm_holds_the_majority_200_launches_after_the_change(before, after, max_age):
    bandit = beg((Arm(0), Arm(4)), (1,), epsilon=0.1, window=100, max_age=max_age)
    state, picks = bandit.init(), []
    for i in range(500):
        arm = int(bandit.select(state, key(i), context(3)))
        state = bandit.update(state, report(arm, 3, (before if i < 300 else after)[arm], 1.0))
        picks.append(arm)
    assert np.mean(picks[200:300]) < 0.5
    assert np.mean(picks[450:]) > 0.5


def test_entries_past_their_age_count_as_untried():
    bandit = beg((Arm(0), Arm(4)), (1,), epsilon=0.0, max_age=3)
    state = bandit.update(bandit.init(), report(1, 1, 1, 1.0))
    for i in range(3):
        arm = int(bandit.select(state, key(i), context(1)))
        assert arm == 0, i
        state = bandit.update(state, report(arm, 1, 100, 1.0))
    assert int(bandit.select(state, key(9), context(1))) == 1


def test_the_static_rule_runs_one_strategy_a_bucket_and_never_learns():
    """The published set-up: the more requests, the fewer tokens to verify; nothing above 32 requests."""
    arms = (Arm(8, 48), Arm(8, 32), Arm(8, 16), Arm(8, 8), Arm(0))
    bandit = beg_static(arms, (1, 2, 5, 21))
    state = bandit.update(bandit.init(), report(4, 20, 1, 1.0, rounds=10, depth=8))
    for i, speed in enumerate((1, 1e6, 1, 1e6)):
        picks = [int(bandit.select(state, key(i), context(n))) for n in (1, 2, 4, 5, 20, 21, 32, 33, 500)]
        assert picks == [0, 1, 1, 2, 2, 3, 3, 4, 4]
        state = bandit.update(state, report(picks[i], 20, speed, 1.0, depth=8))


def test_the_static_rule_waits_for_the_batch_to_stay_small():
    bandit, picks = beg_static((Arm(0), Arm(4)), (1,), off_above=32, patience=10), []
    state = bandit.init()
    for running in (40, 30, 30, 30, 33, 30, 30, 30):
        picks.append(int(bandit.select(state, key(0), context(running))))
        state = bandit.update(state, report(picks[-1], running, 1, 1.0, rounds=8))
    assert picks == [0, 0, 0, 1, 0, 0, 0, 1]


def test_the_static_rule_without_a_limit_speculates_at_once():
    bandit = beg_static((Arm(0), Arm(4), Arm(2, 5)), (1,), off_above=None)
    assert [int(bandit.select(bandit.init(), key(0), context(n))) for n in (1, 500)] == [1, 1], "the first of its group"


@pytest.mark.parametrize("field, value", [("off_above", -1), ("patience", -1)])
def test_settings_of_the_static_rule_out_of_range_are_errors(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        beg_static((Arm(0), Arm(4)), (1,), **{field: value})
