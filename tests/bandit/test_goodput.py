import jax
import numpy as np
import pytest
from launches import ARMS, BATCHES, context, report, steady

from adrl_jax.bandit.goodput import RESERVE, STAY, goodput
from adrl_jax.speculation.strategy import OFF, Strategy

BANDIT = goodput(ARMS, BATCHES)
GREEDY = goodput(ARMS, BATCHES, exploration=0.0)


def key(i):
    return jax.random.fold_in(jax.random.key(9), i)


def rate(arm, running, chance, seconds):
    """Expected tokens a row and second in closed form, float64."""
    share, depth = chance.get(ARMS[arm].drafter, 0.0), ARMS[arm].depth
    return sum(share**d for d in range(depth + 1)) / seconds(arm, running)


def linear(unit=0.01, weight=0.03, draft=0.08):
    """Seconds of a round: weights read once, products by token, draft passes; ngram drafts are free."""

    def seconds(arm, running):
        strategy = ARMS[arm]
        passes = strategy.depth if strategy.drafter == "eagle" else 0
        batch = next(b for b in BATCHES if b >= running)
        return unit * (1 + weight * batch * strategy.verify_tokens + draft * passes)

    return seconds


def drive(bandit, state, launches, chance, seconds, running, start=0):
    picks = []
    for i in range(start, start + launches):
        rows = running(i)
        picks.append(int(bandit.select(state, key(i), context(rows))))
        state = bandit.update(state, steady(picks[-1], rows, chance, seconds))
    return state, picks


@pytest.mark.parametrize("chance", [{"eagle": 0.9}, {"eagle": 0.55, "ngram": 0.6}, {"ngram": 0.9, "eagle": 0.3}])
@pytest.mark.parametrize("weight", [0.005, 0.05])
def test_ends_up_with_the_arm_of_the_closed_form(chance, weight):
    """At every batch size, on a machine where width is cheap and on one where it is not; within 3 % where arms are close."""
    seconds, sizes = linear(weight=weight), (64, 12, 4, 1)
    state, _ = drive(BANDIT, BANDIT.init(), 240, chance, seconds, lambda i: sizes[i // 10 % 4])
    for running in sizes:
        rates = [rate(arm, running, chance, seconds) for arm in range(len(ARMS))]
        _, picks = drive(BANDIT, state, 8, chance, seconds, lambda _, running=running: running, start=1000)
        usual = np.bincount(picks).argmax()
        assert rates[usual] > 0.97 * max(rates), (running, usual, np.argmax(rates))


def test_a_shallow_launch_is_enough_to_know_that_a_deep_one_pays():
    """Only eagle-d1 ever ran; its drafts nearly always stand, width is free and drafting cheap: the deepest is next."""
    seconds, state = linear(weight=0.001, draft=0.01), GREEDY.init()
    for i in range(30):
        for running in (1, 12):
            state = GREEDY.update(state, steady(i % 2, running, {"eagle": 0.97}, seconds))
    for running in (1, 12):
        assert int(GREEDY.select(state, key(0), context(running))) == 3


def test_a_hopeless_arm_is_not_tried_at_full_batch():
    """Width is dear and drafts fall: known from small batches, so at 64 rows nothing deep runs even once."""
    seconds, chance = linear(weight=0.05), {"eagle": 0.3, "ngram": 0.1}
    state, _ = drive(BANDIT, BANDIT.init(), 120, chance, seconds, lambda i: (1, 4)[i // 6 % 2])
    _, picks = drive(BANDIT, state, 100, chance, seconds, lambda _: 64, start=120)
    assert 3 not in picks, np.bincount(picks)
    assert np.mean(np.asarray(picks) == 0) > 0.9


@pytest.mark.parametrize("bandit", [BANDIT, GREEDY])
def test_plain_decoding_is_measured_at_every_batch_size_first(bandit):
    """However good drafts were elsewhere: here a small batch is three times as quick as any law of the others would say."""

    def seconds(arm, running):
        each = linear(weight=0.001)(arm, running)
        return each / 3 if running == 4 and arm == 0 else each

    state, picks = drive(bandit, bandit.init(), 60, {"eagle": 0.6}, seconds, lambda i: (64, 12)[i // 5 % 2])
    assert np.mean(np.asarray(picks[-20:]) > 0) >= 0.4  # at 12 rows speculation won
    _, picks = drive(bandit, state, 30, {"eagle": 0.6}, seconds, lambda _: 4, start=60)
    assert picks[0] == 0
    if bandit is BANDIT:  # one launch proves little; looking again does
        assert np.mean(np.asarray(picks) == 0) > 0.7


def test_exploration_stays_within_its_share():
    """Drafts never stand. What all speculative launches lose is at most the purse's reserve and its share of the time."""
    seconds, chance = linear(), {}
    _, picks = drive(BANDIT, BANDIT.init(), 900, chance, seconds, lambda _: 12)
    spent = np.asarray([8 * seconds(arm, 12) for arm in picks])
    lost = np.asarray([8 * (seconds(arm, 12) - seconds(0, 12)) for arm in picks])
    learning = 30  # before anything is known, losses are not foreseen
    assert lost[learning:].sum() <= RESERVE * spent.mean() + 0.01 * spent.sum()
    assert lost[learning:].sum() > 0, "but it does go on looking"


def test_without_exploration_only_the_best_runs():
    seconds, chance = linear(), {"eagle": 0.9, "ngram": 0.2}
    state, _ = drive(GREEDY, GREEDY.init(), 60, chance, seconds, lambda _: 4)
    _, picks = drive(GREEDY, state, 100, chance, seconds, lambda _: 4, start=60)
    assert len(set(picks)) == 1
    assert float(state.purse) == 0


@pytest.mark.parametrize("running", [1, 12])
def test_a_drafter_that_got_better_is_found_again(running):
    """Hopeless for 300 launches, then nearly always right. Probes are rationed, so it takes some launches, not hundreds."""
    seconds = linear(weight=0.01)
    state, picks = drive(BANDIT, BANDIT.init(), 300, {"eagle": 0.02}, seconds, lambda _: running)
    assert np.mean(np.asarray(picks[100:]) == 0) > 0.5  # probes of a cheap pass may be many, what they cost is bounded
    after = {"eagle": 0.95}
    _, picks = drive(BANDIT, state, 120, after, seconds, lambda _: running, start=300)
    best = np.argmax([rate(arm, running, after, seconds) for arm in range(len(ARMS))])
    found = [rate(arm, running, after, seconds) > 0.9 * rate(best, running, after, seconds) for arm in picks]
    assert found.index(True) < 90
    assert np.mean(found[-20:]) > 0.8


def test_a_drafter_that_got_worse_is_dropped_in_a_few_launches():
    seconds = linear(weight=0.03)
    state, _ = drive(BANDIT, BANDIT.init(), 150, {"eagle": 0.9}, seconds, lambda _: 12)
    _, picks = drive(BANDIT, state, 30, {"eagle": 0.02}, seconds, lambda _: 12, start=150)
    assert np.mean(np.asarray(picks[6:]) == 0) > 0.85, picks


def test_a_drafter_that_often_has_nothing_to_offer_is_judged_by_what_it_yields():
    """ngram drafts in a tenth of the passes and is always right then: its launches commit 1.2 tokens a pass, not 3."""
    seconds = (0.01, 0.011, 0.012, 0.014, 0.0125)
    state = GREEDY.init()
    for _ in range(20):
        state = GREEDY.update(state, report(0, 4, 32, 8 * seconds[0]))
        offered = [3.2, 3.2, 0, 0]
        state = GREEDY.update(state, report(4, 4, 32 + 6.4, 8 * seconds[4], examined=offered, accepted=offered))
        state = GREEDY.update(state, steady(2, 4, {"eagle": 0.05}, seconds))
    assert int(GREEDY.select(state, key(0), context(4))) == 0


def test_what_a_launch_pays_before_its_rounds_is_not_the_price_of_a_round():
    """A drafter that was caught up with first: the next launch will not pay for that."""
    state, told = BANDIT.init(), steady(2, 12, {"eagle": 0.7}, linear())
    late = told._replace(seconds=told.seconds + 0.4, overhead=0.4)
    plain, after = (BANDIT.update(state, r).latency.log_seconds for r in (told, late))
    np.testing.assert_allclose(plain, after, atol=1e-5)


def test_trees_of_one_width_do_not_count_for_chains():
    """Wide trees stand far more often than chains of the same drafter; both are judged by their own launches."""
    arms = (OFF, Strategy("eagle", 4), Strategy("eagle", 4, 4, 16))
    bandit = goodput(arms, (8,), exploration=0.0)
    state, seconds = bandit.init(), (0.010, 0.018, 0.022)
    for _ in range(25):
        for arm, share in ((0, 0.0), (1, 0.3), (2, 0.9)):
            state = bandit.update(state, steady(arm, 8, {"none": 0.0, "eagle": share}, seconds, arms=arms))
    assert int(bandit.select(state, key(0), context(8, batch=8))) == 2
    state = bandit.init()
    for _ in range(25):
        for arm, share in ((0, 0.0), (1, 0.9), (2, 0.9)):
            state = bandit.update(state, steady(arm, 8, {"none": 0.0, "eagle": share}, seconds, arms=arms))
    assert int(bandit.select(state, key(0), context(8, batch=8))) == 1


def gapped(arms, gap):
    """An eagle that lacks `gap` tokens of each row; looking up lacks nothing."""
    return np.array([gap if a.drafter == "eagle" else 0 for a in arms], np.float32)


@pytest.mark.parametrize("rows", [4, 12])
def test_a_drafter_that_must_catch_up_first_has_to_be_worth_it(rows):
    """Catching up on 64 tokens takes as long as a launch: a gain of a fifth does not pay for that in a few launches."""
    arms = (OFF, Strategy("eagle", 2))
    bandit, seconds = goodput(arms, BATCHES, exploration=0.0), (0.010, 0.014)
    tokens = 1.2 * 1.4 - 1  # of drafts a round: 1.2 times plain decoding
    share = (-1 + np.sqrt(1 + 4 * tokens)) / 2  # x + x ** 2 = tokens

    def told(arm, overhead=0.0, gap=0.0):
        found = steady(arm, rows, {"eagle": share}, seconds, arms=arms, depth=2)
        return found._replace(seconds=found.seconds + overhead, overhead=overhead, gap=gap)

    state = bandit.init()
    for arm in (0, 1) * 20:
        state = bandit.update(state, told(arm))
    state = state._replace(since=np.zeros(1, np.float32))  # how long it stays is not known

    def pick(state, gap):
        return int(bandit.select(state, key(0), context(rows)._replace(gap=gapped(arms, gap))))

    assert pick(state, 64) == 1  # what catching up takes is not known yet
    state = bandit.update(state, told(1, overhead=8 * 0.014, gap=64.0))
    assert float(state.stay[0]) == STAY
    assert [pick(state, gap) for gap in (0, 4, 64, 1000)] == [1, 1, 0, 0]
    for _ in range(30):
        state = bandit.update(state, told(1, overhead=0.02 * 8 * 0.014, gap=64.0))
    assert pick(state, 64) == 1  # though it never stays


def test_how_long_a_drafter_stays_decides_what_catching_up_may_cost():
    """The same gain, the same cost: worth it where a stretch lasts, not where every launch begins with it."""
    arms = (OFF, Strategy("eagle", 2))
    bandit, seconds = goodput(arms, BATCHES, exploration=0.0), (0.010, 0.014)
    picks = {}
    for stretch in (1, 40):
        state = bandit.init()
        for i in range(160):
            plain = steady(0, 4, {"eagle": 0.6}, seconds, arms=arms, depth=2)
            drafted = steady(1, 4, {"eagle": 0.6}, seconds, arms=arms, depth=2)
            again = i % stretch == 0
            cost = 0.05 * again
            drafted = drafted._replace(seconds=drafted.seconds + cost, overhead=cost, gap=64.0 * again)
            for report_ in (plain, drafted):
                state = bandit.update(state, report_)
        picks[stretch] = int(bandit.select(state, key(0), context(4)._replace(gap=gapped(arms, 64))))
    assert picks == {1: 0, 40: 1}


def test_catching_up_on_one_drafter_says_nothing_of_another():
    seconds = linear()
    state, _ = drive(GREEDY, GREEDY.init(), 60, {"eagle": 0.9, "ngram": 0.2}, seconds, lambda _: 4)
    slow = steady(2, 4, {"eagle": 0.9}, seconds)
    state = GREEDY.update(state, slow._replace(seconds=slow.seconds * 2, overhead=slow.seconds, gap=100.0))
    assert sorted(np.asarray(state.catch_up) > 0) == [False, True]
