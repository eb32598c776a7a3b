import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import DEPTHS, STRATEGIES, TARGET
from test_identity import assert_same

from adrl_jax.rollout import round as rounds
from adrl_jax.rollout.shared_slots import share_out
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.strategy import OFF, Strategy

SHARED = (Strategy("eagle", 5, 1, 3), Strategy("ngram", 3, 1, 2), Strategy("twin", 5, 1, 4), Strategy("model", 3, 1, 3))


@pytest.mark.parametrize("slots", [3, 7, 12])
def test_slots_go_to_the_chains_most_likely_to_stand(slots):
    """Against trying out every way to give them away."""
    random = np.random.default_rng(slots)
    log_chance = np.log(random.uniform(0.05, 1, (4, 3))).astype(np.float32)
    count, running = np.array([3, 1, 2, 3]), np.array([True, True, False, True])
    shares = share_out(jnp.asarray(log_chance), jnp.asarray(count), jnp.asarray(running), slots)

    gains = np.exp(np.cumsum(log_chance.astype(np.float64), axis=1))
    legal = [range(c + 1) if r else [0] for c, r in zip(count, running)]
    options = (x for x in np.stack(np.meshgrid(*legal), -1).reshape(-1, 4) if x.sum() + running.sum() <= slots)
    best = max(options, key=lambda x: sum(gains[b, :n].sum() for b, n in enumerate(x)))
    np.testing.assert_array_equal(shares.drafts, best)
    chosen = {(int(b), int(j)) for b, j in zip(shares.rows, shares.places)}
    assert len(chosen) == slots  # none twice
    assert {(b, j) for b in range(4) for j in range(best[b] + 1) if running[b]} <= chosen


def test_equal_chances_are_equal_shares():
    shares = share_out(jnp.full((3, 4), -0.1), jnp.full(3, 4), jnp.full(3, True), 9)
    np.testing.assert_array_equal(shares.drafts, [2, 2, 2])


@pytest.mark.parametrize("strategy", SHARED, ids=lambda s: s.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shared_slots_change_nothing(world, requests_of, temperature, strategy):
    settings = {"strategies": (OFF, *SHARED)}
    plain = world.run(requests_of(), temperature, OFF, **settings)
    assert_same(plain, world.run(requests_of(), temperature, strategy, **settings))


def test_likely_drafts_get_more(world, requests_of):
    """As many slots as two drafts a row: given to the likeliest of five, more stand, by a drafter that knows what it knows."""
    strategies = (OFF, Strategy("eagle", 2), SHARED[0])
    lengths = [world.run(requests_of(forced=True), 1.0, s, strategies=strategies).stats.accept_length for s in strategies[1:]]
    assert lengths[1] > lengths[0], lengths


def test_rejection_is_refused(world):
    config = rounds.RoundConfig(TARGET, Law(), (1,), "rejection")
    with pytest.raises(ValueError, match=r"'rejection' with 'eagle-d5-v3'.*coupled"):
        jax.eval_shape(lambda: rounds.decode_round(config, SHARED[0], None, None, None, None))


def test_names_tell_shared_slots_from_equal_ones():
    assert [s.name for s in SHARED] == ["eagle-d5-v3", "ngram-d3-v2", "twin-d5-v4", "model-d3-v3"]
    assert not any(s.shares_slots for s in STRATEGIES)
    assert Strategy("eagle", 3, 1, 4).name == "eagle-d3" and max(DEPTHS) == 5
