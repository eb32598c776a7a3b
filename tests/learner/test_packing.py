"""Packing: every token once, in the right place; few rows; few shapes; bad input refused."""

import dataclasses

import numpy as np
import pytest

from adrl_jax.learner import packing
from adrl_jax.types import FinishReason, Rollout, SamplingParams


def rollout(prompt, response, group=0, version=0):
    return Rollout(
        prompt_id=group,
        visit=0,
        sample=0,
        group_id=group,
        token_ids=np.array([*prompt, *response], np.int32),
        prompt_length=len(prompt),
        response_length=len(response),
        log_probs=-np.arange(1, len(response) + 1, dtype=np.float32),
        policy_versions=np.full(len(response), version, np.int32),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(),
    )


def test_prefix_shared_row_by_hand():
    group = [rollout([5, 6], [10, 11, 12], version=3), rollout([5, 6], [20], version=4)]
    batch = packing.pack(group, [0.5, np.array([-1.0])], row_length=8, target_multiple=3, version=5)
    expected = dict(
        token_ids=[5, 6, 10, 11, 12, 20, 0, 0],
        positions=[0, 1, 2, 3, 4, 2, 0, 0],  # siblings all start at 2
        segment_ids=[1, 1, 1, 1, 1, 1, 0, 0],
        branch_ids=[0, 0, 1, 1, 1, 2, 0, 0],
        source_index=[1, 2, 3, 1, 0, 0],  # both first tokens are predicted by the last prompt token
        target_index=[2, 3, 4, 5, 0, 0],
        target_ids=[10, 11, 12, 20, 0, 0],
        target_mask=[1, 1, 1, 1, 0, 0],
        log_probs=[-1, -2, -3, -1, 0, 0],
        advantages=[0.5, 0.5, 0.5, -1, 0, 0],
        rollout_index=[0, 0, 0, 1, 0, 0],
        staleness=[2, 2, 2, 1, 0, 0],
    )
    for name, value in expected.items():
        np.testing.assert_array_equal(getattr(batch, name)[0], value, err_msg=name)


def test_plain_row_by_hand():
    # Two samples of lengths 3 and 2 in a row of 8: places that end a sample predict nothing.
    pair = [rollout([1], [2, 3], group=0), rollout([4], [5], group=1)]
    batch = packing.pack(pair, [1.0, 1.0], row_length=8, layout="plain", target_multiple=4)
    np.testing.assert_array_equal(batch.segment_ids[0], [1, 1, 1, 2, 2, 0, 0, 0])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(batch.source_index[0], [0, 1, 3, 0])
    np.testing.assert_array_equal(batch.target_index[0], [1, 2, 4, 0])
    np.testing.assert_array_equal(batch.target_mask[0], [True, True, True, False])


@pytest.mark.parametrize("layout", packing.LAYOUTS)
@pytest.mark.parametrize("row_length", [20, 33, 64])
def test_every_token_is_packed_once(layout, row_length):
    rng = np.random.default_rng(row_length)
    rollouts = []
    for g in range(5):
        prompt = rng.integers(0, 50, rng.integers(1, 8))
        rollouts += [rollout(prompt, rng.integers(0, 50, rng.integers(1, 12)), group=g) for _ in range(4)]
    batch = packing.pack(rollouts, list(range(20)), row_length=row_length, layout=layout)
    for name, values in (("target_ids", "response_ids"), ("log_probs", "log_probs")):
        for got, r in zip(packing.unpack_targets(batch, getattr(batch, name), 20), rollouts, strict=True):
            np.testing.assert_array_equal(got, getattr(r, values))
    rows, at = np.nonzero(batch.target_mask)
    np.testing.assert_array_equal(batch.token_ids[rows, batch.target_index[rows, at]], batch.target_ids[rows, at])
    source = batch.source_index[rows, at]
    np.testing.assert_array_equal(batch.positions[rows, source] + 1, batch.positions[rows, batch.target_index[rows, at]])
    np.testing.assert_array_equal(batch.segment_ids[rows, source], batch.segment_ids[rows, batch.target_index[rows, at]])
    starts = ((batch.positions == 0) & (batch.segment_ids != 0)).sum()
    assert starts == 20 if layout == "plain" else 5 <= starts < 20


def test_a_group_too_long_for_a_row_repeats_its_prompt():
    group = [rollout([1, 2, 3], [4] * n) for n in (4, 5, 3)]
    batch = packing.pack(group, [0.0] * 3, row_length=11)
    used = (batch.segment_ids != 0).sum(axis=1)
    assert sorted(used) == [3 + 4, 3 + 5 + 3]
    for row in range(2):
        np.testing.assert_array_equal(batch.token_ids[row, :3], [1, 2, 3])


def test_first_fit_decreasing():
    assert packing.first_fit_decreasing([4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 3, 2, 5]]
    with pytest.raises(ValueError, match="11 tokens does not fit into row_length=10"):
        packing.first_fit_decreasing([11], 10)


def test_row_buckets_are_few():
    buckets = {packing.row_bucket(rows, 2) for rows in range(1, 65)}
    assert sorted(buckets) == [2, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert all(packing.row_bucket(rows, 2) >= rows for rows in range(1, 65))


def test_the_cheapest_row_length_is_chosen():
    # Three groups of 10 tokens: rows of 10, or one of 30.
    rollouts = [rollout([1, 2], [3] * 8, group=g) for g in range(3)]
    linear = packing.CostModel(per_token=1.0, per_row=1.0)
    quadratic = packing.CostModel(per_token=1.0, per_pair=1.0)
    assert packing.choose_row_length(rollouts, [10, 30, 64], linear) == 30
    assert packing.choose_row_length(rollouts, [10, 30, 64], quadratic) == 10
    with pytest.raises(ValueError, match="all shorter than the longest rollout"):
        packing.choose_row_length(rollouts, [8], linear)


def test_cost_model_from_measurements():
    truth = packing.CostModel(per_token=2e-3, per_pair=1e-6, fixed=0.1)
    samples = [(m, t, u, truth.seconds(m, t, u)) for m in (1, 2, 4, 8) for t in (64, 128, 512) for u in (32, 64)]
    fitted = packing.fit_cost_model(samples)
    for m, t, u, seconds in samples:
        np.testing.assert_allclose(fitted.seconds(m, t, u), seconds, rtol=1e-6)
    assert min(dataclasses.astuple(fitted)) >= 0


def test_bad_input_is_refused():
    good = [rollout([1], [2, 3])]
    with pytest.raises(ValueError, match="at least one rollout"):
        packing.pack([], [], row_length=8)
    with pytest.raises(ValueError, match="2 advantages for 1 rollouts"):
        packing.pack(good, [1.0, 2.0], row_length=8)
    with pytest.raises(ValueError, match=r"advantages\[0\] is not finite"):
        packing.pack(good, [float("nan")], row_length=8)
    with pytest.raises(ValueError, match=r"shape \(3,\), expected a number or \(2,\)"):
        packing.pack(good, [np.zeros(3)], row_length=8)
    with pytest.raises(ValueError, match="does not fit into row_length=2"):
        packing.pack(good, [1.0], row_length=2)
    with pytest.raises(ValueError, match="layout='dense' is unknown; choose one of prefix_shared, plain"):
        packing.pack(good, [1.0], row_length=8, layout="dense")
    with pytest.raises(ValueError, match="share group_id=0 but not their prompt"):
        packing.pack([*good, rollout([9], [2])], [1.0, 1.0], row_length=8)
    with pytest.raises(ValueError, match="row_multiple=0"):
        packing.pack(good, [1.0], row_length=8, row_multiple=0)
