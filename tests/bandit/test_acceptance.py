import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launches import ARMS, DEPTH, report, steady

from adrl_jax.bandit import acceptance
from adrl_jax.speculation.strategy import OFF, Strategy

TREES = (OFF, Strategy("eagle", 4), Strategy("eagle", 4, 4, 8), Strategy("eagle", 4, 4, 16), Strategy("ngram", 2))


def logit(p):
    return np.log(p / (1 - p))


def learn(layout, state, curve, counts):
    """Updates with a list of (trials, stood), each `[D]`."""
    step = jax.jit(lambda s, n, k: acceptance.update(s, layout, curve, n, k))
    for trials, stood in counts:
        state = step(state, jnp.asarray(trials, jnp.float32), jnp.asarray(stood, jnp.float32))
    return state


def launch(chances, passes):
    """Expected counts of a launch: whatever stood at a depth comes to the next."""
    reach = passes * np.concatenate([[1.0], np.cumprod(chances)])
    return reach[:-1], reach[1:]


def test_expected_tokens_in_closed_form():
    rng = np.random.default_rng(0)
    a = rng.uniform(0.01, 0.99, (3, 5, 7))
    want = np.ones((3, 5, 8))
    for index in np.ndindex(3, 5):
        for depth in range(8):
            # By the law of the number that stand: L = l with chance (1 - a[l]) * prod_{j < l} a[j], and L = depth else.
            chances = [np.prod(a[index][:l]) * (1 - a[index][l]) for l in range(depth)] + [np.prod(a[index][:depth])]
            want[index][depth] = 1 + sum(l * p for l, p in enumerate(chances))
    np.testing.assert_allclose(acceptance.expected_tokens(jnp.asarray(a, jnp.float32)), want, rtol=2e-6)


def test_strategies_of_one_drafter_share_a_curve_and_trees_do_by_shape():
    layout = acceptance.curves(TREES, 4)
    assert layout.names == ("eagle", "eagle-w4-v8", "eagle-w4-v16", "ngram")
    assert layout.of_arm.tolist()[1:] == [0, 1, 2, 3]
    assert layout.owner.tolist() == [0, 0, 0, 1]
    assert acceptance.curves(ARMS, DEPTH).of_arm.tolist()[1:] == [0, 0, 0, 1]


def test_evidence_counts_every_row_pass():
    """3 rows, 4 passes, 2 depths: 12 row-passes, 10 drafts offered, 6 stood, then 6 looked at, 2 stood."""
    told = report(1, 3, 12 + 8, 1.0, rounds=4, examined=[10, 6, 0, 0], accepted=[6, 2, 0, 0])
    told = jax.tree.map(jnp.asarray, told)
    trials, stood = acceptance.evidence(told, jnp.int32(2))
    assert trials.tolist() == [12, 6, 0, 0] and stood.tolist() == [6, 2, 0, 0]
    assert float(acceptance.expected_tokens(stood[:2] / trials[:2])[-1]) * 12 == pytest.approx(20), "gives the tokens back"


def test_evidence_where_drafts_stood_beyond_the_end_of_a_response():
    """8 drafts stood but 3 lie past the end: the passes cannot be fewer than the drafts looked at first."""
    told = jax.tree.map(jnp.asarray, report(1, 2, 10, 1.0, rounds=3, examined=[5, 5, 3, 0], accepted=[5, 3, 0, 0]))
    trials, _ = acceptance.evidence(told, jnp.int32(3))
    assert float(trials[0]) == 5


def test_a_plain_launch_teaches_nothing_but_makes_old_beliefs_less_sure():
    layout = acceptance.curves(ARMS, DEPTH)
    state = learn(layout, acceptance.init(layout), 0, [launch([0.8] * 4, 60)] * 20)
    told = jax.tree.map(jnp.asarray, steady(0, 4, {}, np.ones(5)))
    trials, stood = acceptance.evidence(told, jnp.int32(0))
    later = learn(layout, state, 0, [(trials, stood)] * 50)
    np.testing.assert_allclose(later.logit, state.logit, atol=1e-5)
    before, after = np.diag(state.covariance)[:4], np.diag(later.covariance)[:4]
    assert (after > before + 0.01).all()
    assert (after <= np.diag(layout.shape)[:4] + 1e-3).all(), "never less sure than at first"
    np.testing.assert_allclose(later.age[0], state.age[0] + 50, rtol=1e-5)


@pytest.mark.parametrize("trials, stood", [(1, 0), (1, 1), (6, 2), (20, 19), (200, 30), (200, 0)])
def test_one_update_is_close_to_the_exact_posterior(trials, stood):
    """One depth, one curve: normal law of the log-odds times binomial counts, integrated on a grid in float64."""
    layout = acceptance.curves((OFF, Strategy("eagle", 1)), 1)
    weight = 1 / (1 + trials / acceptance.FULL_LAUNCH)
    prior_mean, prior_variance = float(layout.logit[0, 0]), float(layout.shape[0, 0])
    x = np.linspace(-12, 12, 20001)
    log = -((x - prior_mean) ** 2) / 2 / prior_variance
    log += weight * (stood * -np.log1p(np.exp(-x)) + (trials - stood) * -np.log1p(np.exp(x)))
    p = np.exp(log - log.max())
    p /= p.sum()
    mean = (p * x).sum()
    deviation = np.sqrt((p * (x - mean) ** 2).sum())
    state = learn(layout, acceptance.init(layout), 0, [([trials], [stood])])
    assert abs(float(acceptance.means(state)[0, 0]) - 1 / (1 + np.exp(-mean))) < 0.05
    assert 0.6 < float(np.sqrt(state.covariance[0, 0])) / deviation < 1.6


def test_beliefs_find_the_true_chances():
    layout, rng = acceptance.curves(ARMS, DEPTH), np.random.default_rng(3)
    truth, counts = np.asarray([0.85, 0.7, 0.6, 0.75]), []
    for _ in range(150):
        came, row = [40], []
        for p in truth:
            row.append(rng.binomial(came[-1], p))
            came.append(row[-1])
        counts.append((came[:-1], row))
    state = learn(layout, acceptance.init(layout), 0, counts)
    np.testing.assert_allclose(acceptance.means(state)[0], truth, atol=0.07)


def test_shallow_counts_tell_about_deeper_drafts_and_no_other_drafter():
    layout = acceptance.curves(ARMS, DEPTH)
    first = acceptance.init(layout)
    for chance in (0.05, 0.97):
        state = learn(layout, first, 0, [([40, 0, 0, 0], [40 * chance, 0, 0, 0])])
        moved = np.asarray(state.logit - first.logit)
        sign = np.sign(logit(chance) - first.logit[0, 0])
        assert (sign * moved[0] > 0.5).all(), "every depth of the drafter"
        assert (np.abs(moved[0, 1:]) <= np.abs(moved[0, :-1]) + 1e-4).all(), "the deeper the less"
        np.testing.assert_allclose(moved[1], 0, atol=1e-5)
        deviations = np.sqrt(np.diag(state.covariance))[:4]
        assert (np.diff(deviations) > 0).all(), "and the deeper the less sure"


def test_a_tree_tells_about_the_drafters_other_trees():
    layout = acceptance.curves(TREES, 4)
    first = acceptance.init(layout)
    state = learn(layout, first, 2, [launch([0.95] * 4, 40)] * 5)
    moved = np.asarray(state.logit - first.logit)
    assert (moved[:3] > 0.3).all() and np.abs(moved[3]).max() < 1e-5
    assert moved[2, 0] >= moved[1, 0], "itself most"


def test_a_jump_is_believed_at_once_and_noise_is_not():
    layout = acceptance.curves(ARMS, DEPTH)
    state = learn(layout, acceptance.init(layout), 0, [launch([0.8] * 4, 60)] * 60)
    noisy = learn(layout, state, 0, [launch([0.72] * 4, 12)])
    assert float(acceptance.means(noisy)[0, 0]) > 0.77
    for chance in (0.1, 0.99):
        jumped = learn(layout, state, 0, [launch([chance] * 4, 60)] * 2)
        assert abs(float(acceptance.means(jumped)[0, 0]) - chance) < abs(0.8 - chance) / 3


def test_the_covariance_stays_one_through_hundreds_of_launches():
    layout, rng = acceptance.curves(TREES, 4), np.random.default_rng(5)
    step = jax.jit(lambda s, c, n, k: acceptance.update(s, layout, c, n, k))
    state = acceptance.init(layout)
    for i in range(600):
        passes = rng.choice([0, 1, 8, 100, 4096])
        came, stood = launch(rng.uniform(0, 1, 4), passes)
        state = step(state, int(rng.integers(0, 4)), jnp.asarray(came, jnp.float32), jnp.asarray(stood, jnp.float32))
        if i % 50 == 0:
            eigenvalues = np.linalg.eigvalsh(np.asarray(state.covariance, np.float64))
            assert eigenvalues.min() > -1e-5 and np.isfinite(np.asarray(state.logit)).all()


def test_draws_have_the_conditional_law_of_the_belief():
    """Known down to depth 2: those chances are at their means, the rest has the Schur complement as covariance."""
    layout = acceptance.curves(ARMS, DEPTH)
    state = learn(layout, acceptance.init(layout), 0, [launch([0.7] * 4, 6)])._replace(age=jnp.zeros(2))
    a, changed = acceptance.sample(state, layout, jax.random.key(1), 20_000, jnp.int32(0), jnp.int32(2))
    drawn = logit(np.asarray(a, np.float64)).reshape(20_000, -1)
    assert not np.asarray(changed).any()
    np.testing.assert_allclose(drawn[:, :2], np.broadcast_to(np.asarray(state.logit)[0, :2], (20_000, 2)), atol=0.05)
    c = np.asarray(state.covariance, np.float64)
    want = c[2:, 2:] - c[2:, :2] @ np.linalg.solve(c[:2, :2], c[:2, 2:])
    got = np.cov(drawn[:, 2:].T)
    np.testing.assert_allclose(got, want, atol=0.05 * np.sqrt(np.outer(np.diag(want), np.diag(want))).max())
    np.testing.assert_allclose(drawn.mean(0), np.asarray(state.logit).ravel(), atol=0.04)


def test_a_drafter_that_nobody_runs_may_have_changed():
    layout, draws = acceptance.curves(ARMS, DEPTH), 8000
    state = acceptance.init(layout)._replace(age=jnp.asarray([0.0, 30.0]))
    _, changed = acceptance.sample(state, layout, jax.random.key(2), draws, jnp.int32(0), jnp.int32(1))
    share = np.asarray(changed).mean(0)
    want = 1 - np.exp(-acceptance.HAZARD * 30)
    assert share[0] == 0
    assert abs(share[1] - want) < 4 * np.sqrt(want * (1 - want) / draws)
    _, changed = acceptance.sample(state, layout, jax.random.key(2), 64, jnp.int32(1), jnp.int32(2))
    assert not np.asarray(changed).any(), "the one that runs anyway is no mystery"


def test_evidence_makes_a_drafter_young_again():
    layout = acceptance.curves(TREES, 4)
    state = learn(layout, acceptance.init(layout), 1, [launch([0.5] * 4, 50)] * 8)
    assert (np.asarray(state.age)[:3] < 1).all(), "its trees with it"
    assert float(state.age[3]) == acceptance.NEVER
