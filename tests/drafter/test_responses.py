"""Rollouts go to disk and come back, for the same key only."""

import dataclasses

import numpy as np
import pytest

from adrl_jax.drafter import responses
from adrl_jax.types import FinishReason, Rollout, SamplingParams


def made():
    rng = np.random.default_rng(0)
    out = []
    for i, (p, r) in enumerate([(3, 2), (1, 4), (2, 1)]):
        ids, law = rng.integers(0, 9, p + r).astype(np.int32), SamplingParams(0.7 + 0.1 * i, top_k=i)
        reason = FinishReason.STOP if i else FinishReason.LENGTH
        log_probs = rng.normal(size=r).astype(np.float32)
        out.append(Rollout(i, 2**31 - 2, i, 5 + i, ids, p, r, log_probs, np.full(r, i, np.int32), reason, law))
    return out


def test_round_trip(tmp_path):
    path, key = tmp_path / "r.npz", {"tokens": 3, "laws": ["0.7"]}
    responses.save(path, made(), key)
    for a, b in zip(responses.load(path, key), made(), strict=True):
        for field in dataclasses.fields(Rollout):
            x, y = getattr(a, field.name), getattr(b, field.name)
            np.testing.assert_array_equal(x, y)
            assert getattr(x, "dtype", None) == getattr(y, "dtype", None)
    assert list(tmp_path.iterdir()) == [path]


def test_another_key_or_no_file_is_nothing(tmp_path):
    path = tmp_path / "r.npz"
    assert responses.load(path, {}) is None
    responses.save(path, made(), {"tokens": 3})
    assert responses.load(path, {"tokens": 4}) is None


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "r.npz"
    responses.save(path, made(), {})
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"r\.npz: damaged"):
        responses.load(path, {})
    np.savez(path, other=np.zeros(3))
    with pytest.raises(ValueError, match=r"r\.npz: damaged"):
        responses.load(path, {})
