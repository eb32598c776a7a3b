"""Batches have the lengths of a whole step however early they are drawn; bytes are bounded; stale features are refused."""

import threading

import numpy as np
import pytest

from adrl_jax.drafter.buffer import DataBuffer, EmptyBuffer, Sample
from adrl_jax.drafter.lessons import pack_samples
from adrl_jax.types import FinishReason, Rollout, SamplingParams

CHANNELS = 4


def rollout(prompt_id, response, *, prompt=3, version=0, temperature=1.0, **law):
    ids = np.arange(prompt + response, dtype=np.int32)
    versions = np.full(response, version, np.int32)
    facts = (np.full(response, -1.0, np.float32), versions, FinishReason.STOP, SamplingParams(temperature, **law))
    return Rollout(prompt_id, 0, 0, prompt_id, ids, prompt, response, *facts)


def sample(prompt_id, response, step=0, version=0, **changes):
    r = rollout(prompt_id, response, version=version, **changes)
    return Sample(r, np.zeros((len(r.token_ids) - 1, CHANNELS), np.float32), version, step)


def filled(lengths_before, lengths_now, *, max_bytes=1 << 30, row_length=1000):
    buffer = DataBuffer(max_bytes, row_length)
    for step, lengths in ((0, lengths_before), (1, lengths_now)):
        buffer.begin_step(step)
        for i, n in enumerate(lengths):
            buffer.add(sample(i, int(n), step))
    return buffer


def test_lengths_follow_the_whole_step_while_only_short_responses_have_ended():
    """Two steps of one heavy-tailed law; of the second only what is shorter than some cut has ended."""
    rng = np.random.default_rng(0)
    before, now = (np.minimum(rng.lognormal(3.5, 1.0, 400).astype(int) + 1, 900) for _ in range(2))

    def share_of_long(lengths, cut):
        return lengths[lengths > cut].sum() / lengths.sum()

    for ended in (0.0, 0.3, 0.8):
        cut = np.quantile(now, ended) if ended else 0
        buffer = filled(before, now[now <= cut])
        tokens = {}
        for _ in range(1500):
            drawn = buffer.draw(rng, rows=1)
            lengths = np.array([s.length for s in drawn])
            # Each lesson counts alike in training, whatever it holds.
            for n in lengths:
                tokens[n] = tokens.get(n, 0.0) + n / lengths.sum() / 1500
        for threshold in np.quantile(now, [0.5, 0.9, 0.97]):
            got = sum(share for n, share in tokens.items() if n > threshold)
            assert abs(got - share_of_long(now, threshold)) < 0.08, (ended, threshold)
    # What the early finishers alone would give: nothing of the tail.
    assert share_of_long(now[now <= cut], np.quantile(now, 0.97)) == 0


def test_each_stratum_comes_in_full_before_any_of_it_comes_again():
    buffer = filled([50, 60, 70, 5], [10, 20, 30, 8, 9], row_length=80)
    rng = np.random.default_rng(1)
    for stratum in ("early", "late"):
        members = {s.key for s in buffer._stratum(stratum)}
        assert len(members) == (5 if stratum == "early" else 3)
        seen = []
        while len(seen) < 6 * len(members):
            drawn = buffer.draw(rng, rows=1)
            assert sum(s.tokens for s in drawn) <= 80 and len({s.step for s in drawn}) == 1
            seen += [s.key for s in drawn if s.key in members]
        for k in range(5):
            assert set(seen[k * len(members) : (k + 1) * len(members)]) == members


def test_the_step_before_last_is_forgotten_and_lengths_of_the_evicted_still_count():
    one = sample(0, 10).nbytes
    buffer = filled([40, 10, 12, 9], [11], max_bytes=7 * one, row_length=80)
    assert buffer.nbytes <= buffer.max_bytes and buffer.evicted == 1
    # Long ones of the step before stay, those that are no longer drawn go first.
    assert {(s.step, s.length) for s in buffer._samples.values()} == {(0, 40), (0, 10), (0, 12), (1, 11)}
    assert buffer.late_share() == pytest.approx((40 + 12) / (40 + 10 + 12 + 9))
    buffer.begin_step(2)
    assert {s.step for s in buffer._samples.values()} == {1} and buffer.late_share() == 1.0
    buffer.begin_step(5)
    assert len(buffer) == 0 and buffer.nbytes == 0
    with pytest.raises(EmptyBuffer, match="empty"):
        buffer.draw(np.random.default_rng(0), rows=1)


def test_bytes_stay_bounded_whatever_comes():
    rng = np.random.default_rng(0)
    buffer = DataBuffer(max_bytes=100_000, row_length=500)
    for step in range(4):
        buffer.begin_step(step)
        for i in range(60):
            buffer.add(sample(i, int(rng.integers(1, 400)), step))
            assert buffer.nbytes == sum(s.nbytes for s in buffer._samples.values()) <= 100_000
    lengths = [s.length for s in buffer._samples.values() if s.step == 3]
    assert np.mean(lengths) > 250  # of a step, the long ones stay


def test_a_lesson_has_one_version_and_one_temperature():
    buffer = DataBuffer(1 << 20, 200)
    buffer.begin_step(0)
    for i in range(12):
        buffer.add(sample(i, 5, version=i % 2, temperature=(0.7, 1.0)[i // 6]))
    rng, kinds = np.random.default_rng(0), set()
    for _ in range(8):
        drawn = buffer.draw(rng, rows=3)
        (kind,) = {(s.version, s.rollout.sampling.temperature) for s in drawn}
        kinds.add(kind)
    assert kinds == {(0, 0.7), (1, 0.7), (0, 1.0), (1, 1.0)}


def test_features_whose_head_is_gone_are_refused_unless_refreshed():
    buffer = DataBuffer(1 << 20, 100)
    buffer.begin_step(3)
    for i in range(4):
        buffer.add(sample(i, 6, step=3, version=7))
    old = sample(9, 6, step=2, version=6)
    buffer.add(old)
    fresh = np.ones((8, CHANNELS), np.float32)
    buffer.refresh((3, 1, 0, 0), fresh, 8, np.full(6, -2.0, np.float32))
    assert buffer.versions == (6, 7, 8)
    drawn = buffer.draw(np.random.default_rng(0), rows=5, versions={8})
    assert [s.key for s in drawn] == [(3, 1, 0, 0)] and buffer.stale == 4 and len(buffer) == 1
    # The tokens and the law that drew them stay; features and the law they belong to are new.
    assert drawn[0].version == 8 and set(drawn[0].rollout.policy_versions) == {7}
    np.testing.assert_array_equal(drawn[0].hidden, fresh)
    np.testing.assert_array_equal(drawn[0].rollout.log_probs, -1.0)
    np.testing.assert_array_equal(drawn[0].log_probs, -2.0)
    with pytest.raises(KeyError, match="prompt 9"):
        buffer.refresh((2, 9, 0, 0), fresh, 8, np.zeros(6, np.float32))
    with pytest.raises(EmptyBuffer):
        buffer.draw(np.random.default_rng(0), rows=5, versions={9})


def test_hidden_states_are_owned():
    r, hidden = rollout(0, 4), np.zeros((7, CHANNELS), np.float32)
    s = Sample(r, hidden, 0, 0)
    hidden += 1
    assert s.hidden.shape == (6, CHANNELS) and not s.hidden.any()


def test_several_threads_add_while_one_draws():
    buffer, faults = DataBuffer(40_000, 100), []
    buffer.begin_step(0)
    buffer.add(sample(10_000, 3))

    def work(base):
        try:
            for i in range(200):
                buffer.add(sample(base + i, 1 + i % 50))
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(3)]
    [t.start() for t in threads]
    rng = np.random.default_rng(0)
    while any(t.is_alive() for t in threads):
        assert buffer.draw(rng, rows=2)
    [t.join() for t in threads]
    assert not faults and buffer.nbytes <= 40_000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataBuffer(0, 10), "DataBuffer.max_bytes=0"),
        (lambda: DataBuffer(10, True), "DataBuffer.row_length=True"),
        (lambda: Sample(rollout(0, 4), np.zeros((4, 2)), 0, 0), "Sample.hidden has shape (4, 2), expected (6, channels)"),
        (lambda: Sample(rollout(0, 4), np.zeros((6, 2)), 1, 0), "versions [0] drew prompt 0's response: give log_probs"),
        (
            lambda: Sample(rollout(0, 4), np.zeros((6, 2)), 1, 0, np.zeros(3)),
            "Sample.log_probs has shape (3,), expected (4,)",
        ),
        (lambda: sample(0, 4, temperature=0.0), "no law to learn from"),
        (lambda: sample(0, 4, top_k=2), "no law to learn from"),
        (lambda: DataBuffer(10, 10).add(sample(0, 4)), "sample of step 0: the buffer holds step None"),
        (lambda: filled([5], [5]).add(sample(3, 4, step=7)), "sample of step 7: the buffer holds step 1 and the one before"),
        (lambda: filled([], [5], row_length=20).add(sample(3, 40, step=1)), "43 tokens and do not fit into row_length=20"),
        (lambda: filled([], [], max_bytes=50).add(sample(3, 40, step=1)), "bytes exceeds max_bytes=50 alone"),
        (lambda: filled([], [5]).draw(np.random.default_rng(0), 0), "rows=0"),
        (lambda: filled([], [5]).begin_step(0), "step=0 comes after step 1"),
    ],
)
def test_bad_input_names_what_is_wrong(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert words in str(error.value)


def test_other_channels_are_refused():
    buffer, r = filled([], [5]), rollout(2, 3)
    with pytest.raises(ValueError, match="9 channels, the buffer's have 4"):
        buffer.add(Sample(r, np.zeros((5, 9), np.float32), 0, 1))


def test_what_is_remembered_of_a_step_is_all_that_the_next_one_draws_from():
    buffer = filled([50, 60, 5], [10, 40, 30, 8, 9], row_length=80)
    step, samples, lengths = buffer.remembered()
    assert step == 1 and [s.length for s in samples] == [10, 40, 30, 8, 9] and sorted(lengths.values()) == [8, 9, 10, 30, 40]
    other = filled([7], [7, 7], row_length=80)
    other.recall(step, samples, lengths | {(1, 99, 0, 0): 70})  # one more had ended, and was evicted
    buffer._lengths[1][1, 99, 0, 0] = 70
    for b in (buffer, other):
        b.begin_step(2)
        b.add(sample(0, 12, step=2))
    assert other.nbytes == buffer.nbytes and other.late_share() == buffer.late_share() > 0
    draws = [[[s.key for s in b.draw(np.random.default_rng([0, i]), rows=1)] for i in range(20)] for b in (buffer, other)]
    assert draws[0] == draws[1] and {k[0] for drawn in draws[0] for k in drawn} == {1, 2}
    # Smaller sizes than it was filled with: what does not fit is gone, and its length still counts.
    narrow = DataBuffer(1 << 30, 20)
    narrow.recall(step, samples, lengths)
    assert sorted(s.length for s in narrow._samples.values()) == [8, 9, 10] and narrow.evicted == 2
    assert narrow.remembered()[2] == lengths


def test_what_is_drawn_can_be_packed():
    """Two rows of 10 hold 4 4 2, 5 3 2 in that order; by size, as the packer goes, 5 4 | 4 3 2 leaves the last 2 a third row."""
    lengths = (4, 4, 2, 5, 3, 2)
    for seed in range(50):
        buffer = DataBuffer(1 << 30, row_length=10)
        buffer.begin_step(0)
        for i, n in enumerate(lengths):
            r = rollout(i, n - 1, prompt=1)
            buffer.add(Sample(r, np.zeros((n - 1, CHANNELS), np.float32), 0, 0, np.zeros(n - 1, np.float32)))
        drawn = buffer.draw(np.random.default_rng(seed), rows=2)
        lesson = pack_samples(drawn, rows=2, row_length=10)
        assert lesson.tokens == sum(s.length for s in drawn) >= 10
