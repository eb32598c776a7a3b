"""From scored rollouts to packed batches: what is left out, what rewards become, which passes are made."""

import dataclasses
import functools

import numpy as np
import pytest

from adrl_jax.learner import advantages, packing
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.update import LearnerState
from adrl_jax.runtime import refill
from adrl_jax.runtime.collect import Scored
from adrl_jax.runtime.experience import Experience, ExperienceConfig, GaeConfig
from adrl_jax.types import FinishReason, Prompt, Rollout, SamplingParams, Score

NAN = float("nan")


def scored_of(rewards, lengths=None, cut=(), reasons=None):
    """Two responses a prompt; those in `cut` did not end by themselves."""
    rollouts, n = [], len(rewards)
    lengths = [2] * n if lengths is None else lengths
    for i in range(n):
        r = lengths[i]
        ids = np.concatenate([[i // 2], np.arange(r)]).astype(np.int32)
        reason = FinishReason.LENGTH if i in cut else FinishReason.STOP
        facts = (np.full(r, -1.0, np.float32), np.zeros(r, np.int32), reason, SamplingParams())
        rollouts.append(Rollout(i // 2, 0, i % 2, i // 2, ids, 1, r, *facts))
    scores = [Score(float(v), None, (reasons or {}).get(i, "match")) for i, v in enumerate(rewards)]
    prompts = [Prompt(i // 2, np.array([i // 2])) for i in range(n)]
    return Scored(rollouts, prompts, [""] * n, scores, np.zeros(n, np.float32))


GRPO = LossConfig()


def prepare(scored, loss=GRPO, advantage=advantages.group_centered, scalars=None, step=1, learner=None, **fields):
    """Reference log-probs are 0.5 and those of the learner 0.25 below the stored ones."""

    def log_probs(params, batch):
        return batch.log_probs - params, None

    def pack(rollouts, values, version):
        return packing.pack(rollouts, values, row_length=32, version=version, together=loss.keeps_groups)

    config = ExperienceConfig(loss=loss, max_new_tokens=8, **fields)
    state = LearnerState(*[np.int32(0)] * 7)._replace(params=np.float32(0.25), reference=np.float32(0.5), version=np.int32(3))
    learner = state if learner is None else learner
    return Experience(config, advantage, pack, log_probs, scalars)(learner, scored, step)


def advantage_of(prepared, rollouts):
    """Advantages `[R_i]` of each packed rollout, by its place."""
    out = {}
    for batch in prepared.batches:
        for i, values in enumerate(packing.unpack_targets(batch, batch.advantages, len(rollouts))):
            if values.size:
                out[i] = values
    return out


def test_unusable_rewards_drop_their_response_and_not_the_batch():
    scored = scored_of([1, NAN, 0, 1, 3, 1], reasons={4: "unparsed_reference"})
    out = prepare(scored)
    assert out.facts["reward/dropped"] == pytest.approx(2 / 6) and out.facts["train/responses"] == 4
    np.testing.assert_array_equal(out.scored.advantages, [0, 0, -0.5, 0.5, 0, 0])
    (batch,) = out.batches
    assert int(batch.target_mask.sum()) == 4 * 2 and np.all(np.isfinite(batch.advantages))


def test_what_is_dropped_shapes_no_baseline():
    cut = scored_of([100, 1, 0, 1], cut=(0,))
    kept = prepare(cut).scored.advantages
    dropped = prepare(cut, drop_truncated=True).scored.advantages
    np.testing.assert_array_equal(kept, [49.5, -49.5, -0.5, 0.5])
    np.testing.assert_array_equal(dropped, [0, 0, -0.5, 0.5])


def test_groups_without_a_difference_are_left_out_where_that_is_asked_for():
    scored = scored_of([1, 1, 0, 1])
    assert [int(b.target_mask.sum()) for b in prepare(scored).batches] == [8]
    assert [int(b.target_mask.sum()) for b in prepare(scored, drop_zero_variance=True).batches] == [4]
    assert prepare(scored_of([1, 1, 0, 0]), drop_zero_variance=True).batches == []


def test_penalties_reach_the_advantages():
    scored = scored_of([0.4, 1.0], lengths=[8, 2], cut=(0,))
    subtract = prepare(scored, eos_rule="subtract", eos_penalty=1.0)
    np.testing.assert_allclose(subtract.scored.advantages, [-0.8, 0.8], rtol=1e-6)
    replace = prepare(scored, eos_rule="replace", eos_penalty=1.0)
    np.testing.assert_allclose(replace.scored.advantages, [-1.0, 1.0], rtol=1e-6)
    overlong = prepare(scored, overlong_margin=4, overlong_penalty=0.2)
    np.testing.assert_allclose(overlong.scored.advantages, [-0.4, 0.4], rtol=1e-6)


def test_kl_in_the_reward_uses_the_old_log_probs():
    scored = scored_of([1.0, 1.0], lengths=[4, 2])
    out = prepare(scored, reward_kl_coef=0.1)
    # 0.5 nats a token: rewards 1 - 0.2 and 1 - 0.1.
    np.testing.assert_allclose(out.scored.advantages, [-0.05, 0.05], rtol=1e-5)
    measured = prepare(scored, LossConfig(old_log_probs="recompute", weight="token"), reward_kl_coef=0.1)
    np.testing.assert_allclose(measured.scored.advantages, [-0.025, 0.025], rtol=1e-5)
    assert measured.batches[0].proximal is not None and measured.batches[0].reference is None


def test_batches_carry_what_their_loss_needs_and_nothing_else():
    scored = scored_of([1, 0, 0, 1])
    plain = prepare(scored).batches[0]
    assert plain.reference is plain.proximal is plain.proximal_lag is plain.keep is plain.returns is None
    loss = LossConfig(kl_coef=0.1, old_log_probs="recompute", mask="m2po", mask_threshold=0.05)
    batch = prepare(scored, loss).batches[0]
    mask = batch.target_mask
    np.testing.assert_allclose(batch.reference[mask], -1.5)
    np.testing.assert_allclose(batch.proximal[mask], -1.25)
    assert not batch.keep[mask].any()  # every token is a quarter nat off, 0.0625 > 0.05
    lag = prepare(scored, LossConfig(old_log_probs="interpolate"), minibatches=2, epochs=2).batches
    assert [int(b.proximal_lag.max()) for b in lag] == [0, 1, 2, 3]
    assert np.all(lag[0].staleness[lag[0].target_mask] == 3)


def test_pairs_share_a_row_and_ties_are_skipped_and_counted():
    loss = LossConfig(surrogate="online_dpo", aggregation="group")
    out = prepare(scored_of([1, 0, 1, 1, 0, 1]), loss, advantages.pairs, minibatches=2)
    assert out.facts["tie_fraction"] == pytest.approx(1 / 3) and len(out.batches) == 2
    signs = [set(b.advantages[b.target_mask].tolist()) for b in out.batches]
    assert signs == [{1.0, -1.0}] * 2


def test_a_value_model_gives_token_advantages():
    scored = scored_of([1.0, 0.0], lengths=[3, 2], cut=(1,))

    def scalars(params, batch):
        return np.full(batch.log_probs.shape, 0.5), np.full(batch.log_probs.shape, 0.75)

    learner = LearnerState(*[np.int32(0)] * 7)._replace(
        reference=np.float32(0.5), value=LearnerState(*[np.int32(0)] * 7), version=np.int32(0)
    )
    make = functools.partial(prepare, scored, advantage=None, scalars=scalars, learner=learner)
    out = make(gae=GaeConfig(lam=1.0, whiten=False))
    found = advantage_of(out, scored.rollouts)
    # Ended: 1 - 0.5 at every token. Cut off: worth 0.75 beyond the end, or nothing.
    np.testing.assert_allclose(found[0], [0.5] * 3)
    np.testing.assert_allclose(found[1], [0.25] * 2)
    without = make(gae=GaeConfig(lam=1.0, whiten=False, bootstrap=False))
    np.testing.assert_allclose(advantage_of(without, scored.rollouts)[1], [-0.5] * 2)
    batch = out.batches[0]
    np.testing.assert_allclose(batch.returns[batch.target_mask], [1.0] * 3 + [0.75] * 2)
    with_kl = make(gae=GaeConfig(lam=0.0, whiten=False), reward_kl_coef=0.1)
    np.testing.assert_allclose(advantage_of(with_kl, scored.rollouts)[0], [-0.05, -0.05, 0.45], atol=1e-6)


def test_minibatches_are_whole_groups_in_order():
    scored = scored_of([1, 0, 0, 1, 1, 0, 0, 1])
    batches = prepare(scored, minibatches=2).batches
    firsts = [np.unique(b.token_ids[(b.segment_ids != 0) & (b.branch_ids == 0)]).tolist() for b in batches]
    assert firsts == [[0, 1], [2, 3]]  # a prompt is the number of its group
    few = prepare(scored_of([1, 0]), minibatches=4).batches
    assert len(few) == 1


def test_the_reference_is_refreshed_when_due():
    scored = scored_of([1, 0])
    loss = LossConfig(kl_coef=0.1)
    values = [float(prepare(scored, loss, step=s, reference_every=2).learner.reference) for s in (1, 2, 3, 4, 5)]
    assert values == [0.5, 0.5, 0.25, 0.5, 0.25]
    frozen = prepare(scored, loss, step=3).learner.reference
    assert float(frozen) == 0.5


def test_refilling_keeps_groups_apart_and_stops_with_a_clear_error():
    first, second = scored_of([1, 1, 0, 1]), scored_of([0, 0, 1, 0])
    assert refill.live_groups(first) == [1]
    assert refill.enough(first, 2, 0, 1) is None
    both = refill.joined(first, second)
    assert refill.live_groups(both) == [1, 3] and len({r.group_id for r in both.rollouts}) == 4
    chosen = refill.enough(both, 2, 1, 1)
    np.testing.assert_array_equal(chosen.rewards, [0, 1, 1, 0])
    with pytest.raises(refill.RefillError, match="2 of 4 groups have unequal rewards after 1 refills; a batch needs 3"):
        refill.enough(both, 3, 1, 1)
    nothing = dataclasses.replace(first, scores=[dataclasses.replace(s, value=NAN) for s in first.scores])
    assert refill.live_groups(nothing) == []
