"""Names to bits: known answers, the same bits in numpy and JAX, and that the bits look random where it could go wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from adrl_jax.sampling import noise
from adrl_jax.sampling.noise import Role

VOCAB = 49152


def target_keys(seed=0, requests=1, positions=1):
    names = noise.request_keys(seed, np.arange(requests), 0, 0)
    places = np.broadcast_to(np.arange(positions), (requests, positions))
    return noise.position_keys(names, places, Role.TARGET)


def signed(words):
    """uint32 to floats of mean 0 and variance 1."""
    return (words.astype(np.float64) * 2.0**-32 - 0.5) * np.sqrt(12.0)


# Random123's own test vectors for threefry2x32 with 20 rounds: counter, key, result.
@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_vectors(counter, key, expected):
    for xp in (np, jnp):
        words = noise.threefry2x32([xp.array([k], np.uint32) for k in key], [xp.array([c], np.uint32) for c in counter])
        assert tuple(int(w[0]) for w in words) == expected


def test_bits_are_a_32_bit_integer_hash_and_equal_in_numpy_and_jax():
    def by_hand(k0, k1, index):
        mask = 0xFFFFFFFF
        x = index ^ k0
        x ^= x >> 16
        x = (x * 0x7FEB352D) & mask
        x ^= x >> 15
        x = (x * 0x846CA68B) & mask
        x ^= x >> 16
        x = (x + k1) & mask
        x ^= x >> 17
        x = (x * 0xAC4C1B51) & mask
        x ^= x >> 15
        x = (x * 0x31848BAB) & mask
        return x ^ (x >> 14)

    keys = target_keys(seed=3, requests=2, positions=3)
    in_numpy = noise.bits(keys, 1000)
    assert in_numpy.dtype == np.uint32 and in_numpy.shape == (2, 3, 1000)
    np.testing.assert_array_equal(in_numpy, jax.jit(noise.bits, static_argnums=1)(jnp.asarray(keys), 1000))
    expected = [by_hand(int(keys[1, 2, 0]), int(keys[1, 2, 1]), i) for i in range(1000)]
    np.testing.assert_array_equal(in_numpy[1, 2], np.array(expected, np.uint32))


def test_position_keys_are_equal_in_numpy_and_jax_and_do_not_depend_on_the_batch():
    names = noise.request_keys(7, np.arange(5), 2, 1)
    places = np.arange(20).reshape(5, 4)
    keys = noise.position_keys(names, places, Role.DRAFT)
    np.testing.assert_array_equal(keys, noise.position_keys(jnp.asarray(names), jnp.asarray(places), Role.DRAFT))
    np.testing.assert_array_equal(keys[3:4, 1:3], noise.position_keys(names[3:4], places[3:4, 1:3], Role.DRAFT))
    streams = {noise.position_keys(names, places, role).tobytes() for role in Role}
    assert len(streams) == len(Role)


def test_names_are_folded_one_after_the_other_never_added():
    # Prompt 3 sample 1 and prompt 4 sample 0, and any other pair of names, are different requests.
    grid = np.stack(np.meshgrid(np.arange(24), np.arange(4), np.arange(4), indexing="ij"), -1).reshape(-1, 3)
    keys = noise.request_keys(0, *grid.T)
    assert len(np.unique(keys, axis=0)) == len(grid)
    np.testing.assert_array_equal(noise.request_keys(0, 3, 0, 1), noise.request_keys(0, [9, 3], [5, 0], [2, 1])[1:])
    assert not np.array_equal(noise.request_keys(0, 1, 2, 3), noise.request_keys(1, 1, 2, 3))
    assert not np.array_equal(noise.request_keys(0, 5, 0, 0), noise.request_keys(0, 5 + 2**32, 0, 0))
    assert len(np.unique(noise.request_keys(0, np.arange(200_000), 0, 0), axis=0)) == 200_000


@pytest.mark.parametrize("names", [(0, [-1], 0, 0), (0, 0, [-3], 0), (-1, 0, 0, 0), (0, 0, 0, [0.5])])
def test_bad_names_are_refused(names):
    with pytest.raises(ValueError, match=r"seed|prompt_ids|visits|samples"):
        noise.request_keys(*names)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_byte_is_uniform(seed):
    words = noise.bits(target_keys(seed, requests=8, positions=8), VOCAB)
    for shift in (0, 8, 16, 24):
        counts = np.bincount(((words >> np.uint32(shift)) & np.uint32(255)).ravel(), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
    # Bytes of one vocabulary id over many positions.
    words = noise.bits(target_keys(seed, requests=400, positions=100), 3)[..., 2]
    assert stats.chisquare(np.bincount((words >> np.uint32(24)).ravel(), minlength=256)).pvalue > 1e-4


def test_neighbours_are_uncorrelated_over_ids_positions_and_requests():
    words = noise.bits(target_keys(5, requests=12, positions=12), 16384)
    x = signed(words)

    def z_score(a, b):
        return np.mean(a * b) * np.sqrt(a.size)

    scores = [z_score(x[..., lag:], x[..., :-lag]) for lag in (1, 2, 3, 4, 8, 16, 64, 127, 128, 129, 256, 384, 1024, 4096)]
    scores += [z_score(x[:, lag:], x[:, :-lag]) for lag in (1, 2, 3, 5)]
    scores += [z_score(x[lag:], x[:-lag]) for lag in (1, 2, 3, 5)]
    # The same with ids shifted against each other, as counters that were added up would show.
    scores += [z_score(x[:, 1:, :-lag], x[:, :-1, lag:]) for lag in (1, 2, 128)]
    scores += [z_score(x[1:, :, :-lag], x[:-1, :, lag:]) for lag in (1, 2, 128)]
    # And of the low halves only.
    low = signed(words << np.uint32(16))
    scores += [z_score(low[..., 1:], low[..., :-1]), z_score(low[:, 1:], low[:, :-1]), z_score(low[1:], low[:-1])]
    assert np.max(np.abs(scores)) < 4.5


def test_pairs_of_neighbouring_ids_fill_the_square():
    words = noise.bits(target_keys(11, requests=8, positions=8), VOCAB)
    cells = (words[..., 1:] >> np.uint32(28)) * np.uint32(16) + (words[..., :-1] >> np.uint32(28))
    assert stats.chisquare(np.bincount(cells.ravel(), minlength=256)).pvalue > 1e-4


def test_keys_that_differ_in_one_bit_share_nothing():
    base = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
    flips = np.concatenate([base ^ np.array([[1 << i, 0]], np.uint32) for i in range(32)])
    flips = np.concatenate([flips, *[base ^ np.array([[0, 1 << i]], np.uint32) for i in range(32)]])
    one, other = noise.bits(base, 8192), noise.bits(flips, 8192)
    changed = np.unpackbits((one ^ other).view(np.uint8), axis=-1).reshape(64, 8192, 32).sum(-1)
    # 16 of 32 bits on average (standard error 0.03); threefry keys never come this close in practice.
    assert np.abs(changed.mean(axis=-1) - 16).max() < 0.25


def test_rows_collide_as_often_as_independent_ones():
    # Values that neighbouring positions share: Poisson in number. A key that only shifts a counter gives 0 or thousands.
    words = np.sort(noise.bits(target_keys(2, positions=500)[0], 32768), axis=-1)
    shared = [len(np.intersect1d(a, b, assume_unique=True)) for a, b in zip(words[1:], words[:-1])]
    expected = 32768**2 / 2.0**32
    assert abs(np.mean(shared) - expected) < 4.5 * np.sqrt(expected / len(shared))
    assert abs(np.var(shared) - expected) < 4.5 * np.sqrt((expected + 2 * expected**2) / len(shared))


def test_equal_upper_halves_at_one_id_are_as_rare_as_they_should_be():
    words = noise.bits(target_keys(2, positions=250)[0], 32768)
    equal = np.sum((words[1:] >> np.uint32(16)) == (words[:-1] >> np.uint32(16)))
    expected = words[1:].size / 2.0**16
    assert abs(equal - expected) < 4.5 * np.sqrt(expected)


def test_gumbel_moments_and_upper_tail():
    g = np.asarray(noise.gumbel(target_keys(4, requests=10, positions=10), VOCAB), np.float64).ravel()
    assert abs(g.mean() - np.euler_gamma) < 4.5 * np.pi / np.sqrt(6 * g.size)
    assert abs(g.var() - np.pi**2 / 6) < 0.01
    for level in (6.0, 8.0, 10.0, 12.0):
        expected = -np.expm1(-np.exp(-level)) * g.size
        assert abs(np.sum(g > level) - expected) < 4.5 * np.sqrt(expected) + 1
    largest = np.asarray(noise.gumbel(target_keys(6, requests=40, positions=50), 4096)).max(axis=-1).ravel()
    assert stats.kstest(largest - np.log(4096), "gumbel_r").pvalue > 1e-4


def test_gumbel_is_exact_at_both_ends():
    words = np.concatenate([np.arange(2000), 2**32 - 1 - np.arange(2000), np.random.default_rng(0).integers(0, 2**32, 20_000)])
    words = words.astype(np.uint32)
    ours = -np.log(np.asarray(noise.exponential_of_bits(jnp.asarray(words)), np.float64))
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    reference = -np.log(-np.log1p(-np.minimum(u, 1 - 2.0**-24)))
    assert np.isfinite(ours).all()
    assert ours.max() == pytest.approx(33 * np.log(2), abs=1e-5)
    # float32 has 24 bits: near u = 1 that limits the *lower* tail, which never wins a maximum that matters.
    upper = u < 0.99
    np.testing.assert_allclose(ours[upper], reference[upper], atol=5e-6)


def test_uniforms_are_in_the_unit_interval_uniform_and_named():
    keys = noise.position_keys(noise.request_keys(0, np.arange(2000), 0, 0), np.tile(np.arange(50), (2000, 1)), Role.ACCEPT)
    u = np.asarray(noise.uniform(keys))
    assert u.min() >= 0 and u.max() < 1 and len(np.unique(u)) > 0.99 * u.size
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-4
    other = noise.position_keys(noise.request_keys(1, np.arange(2000), 0, 0), np.tile(np.arange(50), (2000, 1)), Role.ACCEPT)
    assert abs(np.corrcoef(u.ravel(), np.asarray(noise.uniform(other)).ravel())[0, 1]) < 0.015
    np.testing.assert_array_equal(u, noise.uniform(keys))


def test_a_group_gets_different_noise_and_the_same_again():
    names = noise.request_keys(0, 0, 0, np.arange(4))
    keys = noise.position_keys(names, np.tile(np.arange(8), (4, 1)), Role.TARGET)
    rows = np.asarray(jnp.argmax(noise.gumbel(keys, 1000), axis=-1))
    assert len({tuple(r) for r in rows}) == 4
    np.testing.assert_array_equal(rows, np.asarray(jnp.argmax(noise.gumbel(keys, 1000), axis=-1)))
