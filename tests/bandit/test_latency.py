import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.bandit import latency
from adrl_jax.speculation.strategy import OFF, Strategy

ARMS = (OFF, Strategy("eagle", 1), Strategy("eagle", 2), Strategy("eagle", 4), Strategy("eagle", 8))
BATCHES = (1, 4, 16)
CELLS = latency.cells(ARMS, BATCHES, 12)


@jax.jit
def step(state, batch, cache, arm, log_seconds):
    row, column = latency.locate(CELLS, batch, cache)
    expected, deviation = latency.predict(state, CELLS, row, column)
    return latency.update(state, (row, column, arm), expected[arm], deviation[arm], log_seconds)


def tell(state, batch, cache, arm, seconds):
    return step(state, jnp.int32(batch), jnp.int32(cache), jnp.int32(arm), jnp.float32(np.log(seconds)))


@jax.jit
def _look(state, batch, cache):
    return latency.predict(state, CELLS, *latency.locate(CELLS, batch, cache))


def look(state, batch, cache):
    """Seconds and deviations."""
    log_seconds, deviation = _look(state, jnp.int32(batch), jnp.int32(cache))
    return np.exp(np.asarray(log_seconds)), np.asarray(deviation)


def law(batch, cache, arm, unit=0.01):
    """Weights read, products, keys and values, draft passes."""
    depth = ARMS[arm].depth
    return unit * (1 + 0.03 * batch * (depth + 1) + 0.02 * batch * cache / 1000 + (depth > 0) * 0.05 + 0.08 * depth)


def test_sizes_find_their_buckets():
    def at(batch, cache):
        return [int(x) for x in latency.locate(CELLS, jnp.int32(batch), jnp.int32(cache))]

    assert at(1, 32) == [0, 0] and at(2, 64) == [1, 2] and at(16, 90) == [2, 3]
    assert at(999, 10**6) == [2, 11], "beyond the last, the last"
    assert at(1, 1) == [0, 0]


def test_a_measured_cell_has_the_measured_time():
    state, rng = latency.init(CELLS), np.random.default_rng(0)
    for i in range(40):
        arm = i % 2
        state = tell(state, 4, 256, arm, (0.02, 0.05)[arm] * np.exp(0.05 * rng.normal()))
    seconds, deviation = look(state, 4, 256)
    np.testing.assert_allclose(seconds[:2], (0.02, 0.05), rtol=0.05)
    assert (deviation[:2] < 0.05).all() and (deviation[2:] > 0.08).all()


def test_one_slow_launch_hardly_counts_and_a_slower_machine_does():
    state = latency.init(CELLS)
    for _ in range(10):
        state = tell(state, 4, 256, 0, 0.02)
    once = look(tell(state, 4, 256, 0, 0.1), 4, 256)[0][0]
    assert once < 0.021
    for _ in range(300):
        state = tell(state, 4, 256, 0, 0.03)
    np.testing.assert_allclose(look(state, 4, 256)[0][0], 0.03, rtol=0.1)


def test_the_very_first_launch_is_believed_whatever_the_machine():
    for unit in (1e-4, 1e-2, 10.0):
        state = tell(latency.init(CELLS), 16, 256, 0, law(16, 256, 0, unit))
        seconds, deviation = look(state, 16, 256)
        assert 0.8 < seconds[0] / law(16, 256, 0, unit) < 1.25
        # The rest of the machine is known from the prior law, to within a factor.
        assert 0.4 < seconds[2] / law(16, 256, 2, unit) < 2.5 and deviation[2] < 0.5


def test_unmeasured_cells_follow_the_law_of_the_measured_ones():
    state = latency.init(CELLS)
    for batch, arm in ((1, 0), (4, 0), (16, 0), (1, 2), (1, 4), (4, 1)):
        for _ in range(5):
            state = tell(state, batch, 256, arm, law(batch, 256, arm))
    for batch in BATCHES:
        seconds, _ = look(state, batch, 256)
        np.testing.assert_allclose(seconds, [law(batch, 256, arm) for arm in range(5)], rtol=0.25)


def test_caches_nearby_tell_about_each_other():
    state = latency.init(CELLS)
    for batch in BATCHES:
        for _ in range(5):
            state = tell(state, batch, 128, 0, law(batch, 128, 0))
    for _ in range(5):
        state = tell(state, 16, 128, 2, 3 * law(16, 128, 2))  # a bad tile that no law foresees
    near, far = look(state, 16, 181)[0][2] / law(16, 181, 2), look(state, 1, 1024)[0][2] / law(1, 1024, 2)
    assert near > 1.5 and near > far


def test_a_guess_is_never_cheaper_than_plain_nor_dearer_than_one_pass_a_token():
    rng = np.random.default_rng(1)
    for _ in range(20):
        state = latency.init(CELLS)
        for _ in range(6):
            batch, cache, arm = rng.choice(BATCHES), rng.choice([64, 256, 512]), rng.integers(0, 5)
            state = tell(state, batch, cache, arm, np.exp(rng.normal(-4, 1)))
        seconds, _ = look(state, 4, 64)
        row, column = (int(x) for x in latency.locate(CELLS, jnp.int32(4), jnp.int32(64)))
        unmeasured = np.asarray(state.weight[row, column]) == 0
        if unmeasured[0]:
            ratio = seconds[unmeasured] / seconds[0]
            assert (ratio > 0.999).all() and (ratio <= np.exp(CELLS.most[unmeasured]) * 1.001).all()


def test_a_slow_down_that_all_arms_share_does_not_change_their_order():
    """Arm 1 is 1.15 times as fast as arm 2; the machine is 1.3 times as slow while arm 1 runs ten times."""
    state = latency.init(CELLS)
    for _ in range(15):
        for arm, seconds in ((1, 0.02), (2, 0.023)):
            state = tell(state, 4, 256, arm, seconds)
    for _ in range(10):
        state = tell(state, 4, 256, 1, 0.026)
    seconds, _ = look(state, 4, 256)
    assert seconds[1] < seconds[2]
    assert float(state.weather) > 0.1


def test_the_fit_is_ridge_least_squares_in_relative_error():
    """Against numpy in float64: measured cells as rows divided by what was measured, the prior as further rows."""
    state, rng = latency.init(CELLS), np.random.default_rng(4)
    for _ in range(60):
        batch, cache, arm = rng.choice(BATCHES), rng.choice([64, 256, 1024]), int(rng.integers(0, 5))
        state = tell(state, batch, cache, arm, law(batch, cache, arm) * np.exp(0.1 * rng.normal()))
    measured = np.asarray(state.weight) > 0
    trust = (np.asarray(state.weight) / (np.asarray(state.weight) + 1))[measured].astype(np.float64)
    terms, logs = CELLS.terms[measured].astype(np.float64), np.asarray(state.log_seconds)[measured].astype(np.float64)
    prior, spread = CELLS.prior.astype(np.float64), CELLS.spread.astype(np.float64)
    unit = (trust * (logs - np.log(terms @ prior))).sum() / trust.sum()
    rows = np.sqrt(trust)[:, None] * terms * np.exp(unit - logs)[:, None]
    stiff = np.diag(latency.OWN / spread)
    theta = np.linalg.lstsq(np.vstack([rows, stiff]), np.concatenate([np.sqrt(trust), stiff @ prior]), rcond=None)[0]
    want = np.log(CELLS.terms.astype(np.float64) @ np.maximum(theta, 1e-4 * prior)) + unit
    np.testing.assert_allclose(latency._fit(state, CELLS), want, atol=2e-3)


def test_what_a_launch_will_tell():
    """Knowing a cell to within s, one more launch moves its estimate by s^2 / sqrt(s^2 + OWN^2): Kalman, by simulation."""
    rng, s = np.random.default_rng(7), 0.2
    truth = s * rng.normal(size=200_000)
    seen = truth + latency.OWN * rng.normal(size=truth.size)
    moved = seen * s**2 / (s**2 + latency.OWN**2)
    np.testing.assert_allclose(float(latency.told(jnp.float32(s))), moved.std(), rtol=0.01)


@pytest.mark.parametrize("cache_buckets", [0, -1])
def test_there_is_at_least_one_cache_bucket(cache_buckets):
    with pytest.raises(ValueError, match=f"cache_buckets={cache_buckets}"):
        latency.cells(ARMS, BATCHES, cache_buckets)
