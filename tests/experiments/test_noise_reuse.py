import numpy as np
import pytest

from experiments.ablations import noise_reuse


@pytest.fixture(scope="module")
def toys():
    return {noise: noise_reuse.toy(noise == "reused", epochs=6, replicas=8000) for noise in noise_reuse.NOISES}


def test_fresh_noise_is_unbiased(toys):
    for epoch in toys["fresh"]:
        assert abs(epoch["bias"]) < 4 * epoch["standard_error"]


def test_reused_noise_leans_to_what_was_reinforced(toys):
    first, *later = toys["reused"]
    assert abs(first["bias"]) < 4 * first["standard_error"]  # not trained on yet
    for epoch in later:
        assert epoch["bias"] > 5 * epoch["standard_error"]


def test_both_learn(toys):
    for epochs in toys.values():
        assert epochs[0]["true_reward"] == pytest.approx(noise_reuse.REWARDS.mean())
        assert np.all(np.diff([e["true_reward"] for e in epochs]) > 0)


def test_the_runs_differ_in_noise_only():
    fresh, reused = (noise_reuse.settings(noise, 1, 8) for noise in noise_reuse.NOISES)
    assert not fresh.sampling.reuse_noise_across_epochs and reused.sampling.reuse_noise_across_epochs
    assert fresh.task == reused.task and fresh.learner == reused.learner and fresh.rollout == reused.rollout
