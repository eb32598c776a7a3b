"""Every loss that can be composed: against float64 numpy, and one result however it is laid out."""

import dataclasses

import numpy as np
import pytest
from loss_world import CASES, CONFIGS, batch_of, by_response, differences, for_config, oracle, responses, run

from adrl_jax.learner import surrogates, weights
from adrl_jax.learner.aggregation import AGGREGATIONS
from adrl_jax.learner.kl import ESTIMATORS
from adrl_jax.learner.loss_config import Conflict, LossConfig
from adrl_jax.learner.row import OLD_LOG_PROBS

EVERY = pytest.mark.parametrize("name", CASES)


def test_nothing_that_can_be_chosen_is_left_out():
    chosen = {field: {getattr(c, field) for c in CONFIGS.values()} for field in ("surrogate", "weight", "mask")}
    assert chosen["surrogate"] == set(surrogates.SURROGATES)
    assert chosen["weight"] == {"none", *weights.WEIGHTS} and chosen["mask"] == {"none", *weights.MASKS}
    assert {c.aggregation for c in CONFIGS.values()} == set(AGGREGATIONS)
    assert {c.old_log_probs for c in CONFIGS.values()} == set(OLD_LOG_PROBS)
    assert {c.kl_estimator for c in CONFIGS.values() if c.kl_coef} == set(ESTIMATORS)


@EVERY
def test_equals_float64_numpy_in_value_and_gradient(name):
    config = CONFIGS[name]
    chosen = for_config(config, responses())
    value, by_log_probs, by_entropy = by_response(config, chosen)
    current, entropy = [r.current for r in chosen], [r.entropy for r in chosen]
    np.testing.assert_allclose(value, oracle(config, chosen, current, entropy), rtol=2e-5, atol=1e-6)
    expected = differences(lambda x: oracle(config, chosen, x, entropy), current)
    assert np.linalg.norm(expected) > 0
    np.testing.assert_allclose(by_log_probs, expected, rtol=1e-4, atol=1e-5 * np.linalg.norm(expected))
    np.testing.assert_allclose(by_entropy, differences(lambda x: oracle(config, chosen, current, x), entropy), atol=1e-7)


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.mask != "none"])
def test_the_masks_of_the_hand_batch_drop_a_part_and_are_counted(name):
    config = CONFIGS[name]
    loss, _ = run(config, *batch_of(config, for_config(config, responses())))
    assert 0 < float(loss.masked) < float(loss.tokens)


@EVERY
def test_one_result_for_every_layout_order_and_split(name):
    config = CONFIGS[name]
    chosen = for_config(config, responses())
    value, gradient, _ = by_response(config, chosen)

    def same(other_value, other, tolerance=1e-5):
        np.testing.assert_allclose(other_value, value, rtol=1e-5, atol=1e-6)
        assert np.linalg.norm(other - gradient) <= tolerance * np.linalg.norm(gradient)

    # Long rows with many groups, short rows with one, a row a response, and rows of padding.
    layouts = [
        dict(layout="plain", padded=True),
        dict(layout="prefix_shared", row_length=64),
        dict(layout="prefix_shared", row_length=9, row_multiple=6),
    ]
    for layout in layouts:
        same(*by_response(config, chosen, **layout)[:2])
    # Responses in another order; groups are told apart by id.
    order = [5, 0, 3, 2, 4, 1]
    shuffled = by_response(config, [chosen[i] for i in order], layout="prefix_shared", row_length=9)
    bounds = np.cumsum([0, *(len(chosen[i].current) for i in order)])
    parts = {i: shuffled[1][a:b] for i, a, b in zip(order, bounds, bounds[1:])}
    same(shuffled[0], np.concatenate([parts[i] for i in range(6)]))
    # Microbatches and devices: numerators and denominators of the rows add up.
    batch, log_probs, entropy = batch_of(config, chosen, padded=True)
    parts = []
    for rows in (slice(0, 2), slice(2, 6)):
        mask = np.zeros_like(batch.target_mask)
        mask[rows] = batch.target_mask[rows]
        parts.append(run(config, batch._replace(target_mask=mask), log_probs, entropy)[0])
    total = sum(float(r.numerator) for r in parts) / sum(float(r.denominator) for r in parts)
    np.testing.assert_allclose(total, value, rtol=1e-5, atol=1e-6)


@EVERY
def test_padding_is_irrelevant_and_has_no_gradient(name):
    config = CONFIGS[name]
    batch, log_probs, entropy = batch_of(config, for_config(config, responses()), padded=True)
    mask = batch.target_mask
    assert not mask.all()
    before = run(config, batch, log_probs, entropy)
    fill = {"owner": 99, "float": np.nan, "bool": False}
    garbage = {}
    for field in ("log_probs", "advantages", "proximal", "reference"):
        if getattr(batch, field) is not None:
            garbage[field] = np.where(mask, getattr(batch, field), fill["float"])
    for field in ("rollout_index", "group_index", "staleness"):
        garbage[field] = np.where(mask, getattr(batch, field), fill["owner"]).astype(np.int32)
    noisy = np.where(mask, log_probs, np.inf), np.where(mask, entropy, np.nan)
    after = run(config, batch._replace(keep=batch.keep & mask, **garbage), *noisy)
    assert float(before[0].numerator) == float(after[0].numerator) and float(before[0].denominator) == float(
        after[0].denominator
    )
    for a, b in zip(before[1], after[1]):
        np.testing.assert_array_equal(a, b)
        assert np.all(b[~mask] == 0)


@EVERY
def test_a_batch_of_padding_gives_zero_and_finite_gradients(name):
    config = CONFIGS[name]
    batch, log_probs, entropy = batch_of(config, for_config(config, responses()), padded=True)
    empty = batch._replace(target_mask=np.zeros_like(batch.target_mask))
    loss, gradients = run(config, empty, log_probs, entropy)
    assert float(loss.numerator) == float(loss.denominator) == 0
    assert all(np.all(g == 0) for g in gradients)


# A value other than the default for every knob. Bases that between them read all of them.
OTHER = {
    "clip_low": 0.01,
    "clip_high": 0.01,
    "aggregation": "sequence_sum",
    "entropy_coef": 0.1,
    "surrogate": "reinforce",
    "old_log_probs": "recompute",
    "dual_clip": 1.05,
    "weight": "token",
    "weight_low": 1.01,
    "weight_high": 1.01,
    "mask": "opsm",
    "mask_low": 0.99,
    "mask_high": 1.01,
    "mask_threshold": 3.0,
    "beta": 0.7,
    "kl_coef": 0.3,
    "kl_estimator": "k2",
    "kl_correction": True,
}
HIDDEN = {("opsm", "clip_low")}
"""Knobs with nothing left to act on in this batch: OPSM takes out the very responses whose tokens `clip_low` would clip."""
BASES = ("grpo", "icepop", "gspo", "topr", "aipo", "copg", "opsm", "k3", "reinforce")


def test_every_knob_that_is_accepted_acts():
    assert set(OTHER) | {"constant_length"} == {f.name for f in dataclasses.fields(LossConfig)}
    acted = set()
    for base in BASES:
        config = CONFIGS[base]
        chosen = for_config(config, responses())
        before = by_response(config, chosen)
        for field, value in OTHER.items():
            try:
                changed = dataclasses.replace(config, **{field: value})
            except Conflict:
                continue
            if changed == config or (base, field) in HIDDEN:
                continue
            after = by_response(changed, for_config(changed, responses()))
            moved = before[0] != after[0] or any(not np.array_equal(a, b) for a, b in zip(before[1:], after[1:]))
            assert moved, f"{field}={value!r} does nothing on {base}"
            acted.add(field)
    assert acted == set(OTHER)


MESSAGES = [
    (dict(clip_low=0.0), ["clip_low=0.0"]),
    (dict(clip_low=1.5), ["clip_low=1.5"]),
    (dict(clip_high=-0.1), ["clip_high=-0.1"]),
    (dict(aggregation="mean"), ["aggregation='mean' is unknown; choose one of token, sequence"]),
    (dict(aggregation="constant"), ["constant_length=None with aggregation='constant'"]),
    (dict(constant_length=5), ["constant_length=5 with aggregation='token'"]),
    (dict(aggregation="constant", constant_length=0), ["constant_length=0"]),
    (dict(entropy_coef=-1.0), ["entropy_coef=-1.0"]),
    (dict(entropy_coef=float("nan")), ["entropy_coef=nan"]),
    (dict(beta=0.0), ["beta=0.0"]),
    (dict(dual_clip=0.9), ["dual_clip=0.9"]),
    (dict(surrogate="grpo"), ["surrogate='grpo' is unknown", "ppo_clip"]),
    (dict(weight="token"), ["weight='token' with old_log_probs='behaviour'", "count it twice"]),
    (dict(surrogate="cispo", weight="sequence"), ["weight='sequence' with old_log_probs='behaviour'"]),
    (dict(surrogate="gspo"), ["aggregation='token' with surrogate='gspo'", "'sequence'"]),
    (dict(surrogate="online_dpo"), ["aggregation='token' with surrogate='online_dpo'", "'group'"]),
    (dict(surrogate="topr", old_log_probs="recompute"), ["old_log_probs='recompute' with surrogate='topr'"]),
    (dict(surrogate="reinforce", old_log_probs="recompute"), ["old_log_probs='recompute' with surrogate='reinforce'"]),
    (dict(surrogate="best_of_n", weight="token"), ["weight='token' with surrogate='best_of_n'"]),
    (dict(surrogate="copg", aggregation="group", mask="opsm"), ["mask='opsm' with surrogate='copg'"]),
    (
        dict(surrogate="gspo", aggregation="sequence", old_log_probs="recompute", weight="token"),
        ["weight='token' with surrogate='gspo'", "sequence, geometric, vespo"],
    ),
    (dict(mask="m2po"), ["mask='m2po' with old_log_probs='behaviour'"]),
    (dict(kl_coef=0.1, kl_estimator="k1"), ["kl_estimator='k1' with kl_correction=False", "gradient is 0"]),
    (dict(kl_estimator="k2"), ["kl_estimator='k2' with kl_coef=0.0"]),
    (dict(surrogate="reinforce", clip_low=0.1), ["clip_low=0.1 with surrogate='reinforce'"]),
    (dict(weight_high=3.0), ["weight_high=3.0 with weight='none'"]),
    (dict(mask="opsm", mask_low=0.1), ["mask_low=0.1 with mask='opsm'"]),
    (dict(mask="token", mask_low=2.0, mask_high=1.0), ["mask_low=2.0 with mask_high=1.0"]),
    (dict(beta=0.2), ["beta=0.2 with surrogate='ppo_clip'"]),
]


@pytest.mark.parametrize("fields,words", MESSAGES)
def test_what_does_not_go_together_names_both_fields(fields, words):
    with pytest.raises(ValueError) as error:
        LossConfig(**fields)
    for word in words:
        assert word in str(error.value)


def test_a_loss_refuses_a_batch_without_what_it_needs():
    for name, field in (("k3", "reference"), ("token tis", "proximal"), ("interpolated", "proximal_lag"), ("m2po", "keep")):
        config = CONFIGS[name]
        batch, log_probs, entropy = batch_of(config, for_config(config, responses()))
        with pytest.raises(ValueError, match=f"PackedBatch.{field}"):
            run(config, batch._replace(**{field: None}), log_probs, entropy)
