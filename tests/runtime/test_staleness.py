"""The admission rule: whatever comes in whatever order, no token is too old, nothing is lost and nothing is learnt from twice."""

import numpy as np
import pytest

from adrl_jax.runtime import cursor, staleness
from adrl_jax.types import FinishReason, Rollout, SamplingParams


def rollout(versions, prompt_id=0, visit=0):
    n = len(versions)
    return Rollout(
        prompt_id, visit, 0, 0, np.zeros(1 + n, np.int32), 1, n, np.zeros(n, np.float32), np.array(versions, np.int32),
        FinishReason.LENGTH, SamplingParams(),
    )  # fmt: skip


def test_capacity_is_the_published_formula():
    book = staleness.ledger(2, 4)
    assert book.capacity() == (2 + 0 + 1) * 4 and book.capacity(3) == 24
    book = book.submit(10)
    assert book.capacity() == 2 and book.consume().capacity() == 6
    with pytest.raises(ValueError, match="3 groups submitted, but there is capacity for 2"):
        book.submit(3)
    with pytest.raises(ValueError, match="batch 2 is not complete: 10 groups of 4 a batch submitted"):
        book.consume().consume().consume()
    for bad in ({"limit": -1, "size": 4}, {"limit": 0, "size": 0}, {"limit": 0, "size": 1, "consumed": -1}):
        with pytest.raises(ValueError, match="must be >= "):
            staleness.ledger(**bad)


def test_at_limit_zero_a_batch_begins_when_the_one_before_was_learnt_from():
    book = staleness.ledger(0, 3)
    for batch in range(4):
        assert book.capacity() == 3
        book = book.submit(3)
        assert book.capacity() == 0
        book = book.consume()
        assert book.consumed == batch + 1


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_age_at_the_limit_is_kept_and_one_more_is_not(limit):
    """Off by one either way shows here: ages `limit` and `limit + 1`, in updates of 3 a version."""
    ok, bad = rollout([9 - 3 * limit, 9]), rollout([9 - 3 * limit - 1, 9])
    staleness.check_bound([ok], 9, 3 * limit)
    with pytest.raises(RuntimeError, match="a fault in admission"):
        staleness.check_bound([ok, bad], 9, 3 * limit)
    with pytest.raises(RuntimeError, match="a fault in admission"):
        staleness.check_bound([rollout([10])], 9, 3 * limit)
    book = staleness.ledger(limit, 2, consumed=3)
    groups = [(6, [ok]), (7, [ok, bad]), (8, [rollout([9 - 3 * limit + 2])]), (9, [rollout([9 - 3 * limit + 3])])]
    # Groups 8 and 9 are learnt from one version later.
    assert staleness.over_age(groups, book, 9, 3) == [7, 8]


def test_numbers_of_a_batch():
    found = staleness.numbers([rollout([2, 2, 3]), rollout([5])], 5)
    assert found["staleness/mean"] == pytest.approx((3 + 3 + 2 + 0) / 4) and found["staleness/max"] == 3
    assert found["staleness/hist"] == pytest.approx([0.25, 0, 0.25, 0.5])


class World:
    """A generator and a learner reduced to their bookkeeping, driven by chance.

    Running groups draw tokens with the version that is served at the time, so long ones mix versions; they finish in any
    order; some fail and are begun again; the process dies and comes back with what a checkpoint held, now and then with
    another limit. `finished` and `book` are all that the rule needs.
    """

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.size, self.prompts = int(self.random.integers(1, 5)), int(self.random.integers(4, 13))
        self.book = staleness.ledger(int(self.random.integers(0, 5)), self.size)
        self.ahead = self.consumed_cursor = cursor.init(seed, self.prompts)
        self.running, self.finished, self.names = {}, {}, {}
        self.served, self.learnt, self.lengths = 0, [], {"made": [], "learnt": []}
        self.checkpoint()

    def checkpoint(self):
        self.saved = (
            self.book.consumed,
            self.consumed_cursor,
            dict(self.finished),
            list(self.learnt),
            len(self.lengths["learnt"]),
        )

    def submit(self):
        self.served = self.book.consumed if self.random.random() < 0.7 else self.served  # a generator may lag behind
        room = self.book.capacity(self.served)
        if not room:
            return
        for _ in range(int(self.random.integers(1, room + 1))):
            number = self.book.submitted
            self.book = self.book.submit(1, self.served)
            index, visit, self.ahead = cursor.draw(self.ahead, 1)
            self.names[number] = (int(index[0]), int(visit[0]))
            if number not in self.finished:
                self.running[number] = [self.served]

    def decode(self):
        for versions in self.running.values():
            versions.append(max(versions[-1], self.served))

    def finish(self):
        if self.running:
            number = self.random.choice(list(self.running))
            versions = self.running.pop(number)
            if self.random.random() < 0.2:  # failed or refused: the same request once more
                self.book = self.book.redo()
                self.running[number] = [self.served]
                return
            self.finished[number] = [rollout(versions, *self.names[number])]
            self.lengths["made"].append(len(versions))

    def learn(self):
        numbers = range(self.book.consumed * self.size, (self.book.consumed + 1) * self.size)
        if self.book.submitted <= numbers[-1] or not all(n in self.finished for n in numbers):
            return
        batch = [r for n in numbers for r in self.finished.pop(n)]
        staleness.check_bound(batch, self.book.consumed, self.book.limit)
        if self.book.limit == 0:
            assert all(len(set(r.policy_versions.tolist())) == 1 for r in batch)
        indices, visits, self.consumed_cursor = cursor.draw(self.consumed_cursor, self.size)
        assert [(r.prompt_id, r.visit) for r in batch] == list(zip(indices.tolist(), visits.tolist()))
        self.learnt += [(r.prompt_id, r.visit) for r in batch]
        self.lengths["learnt"] += [r.response_length for r in batch]
        self.book = self.book.consume()

    def crash(self):
        consumed, self.consumed_cursor, finished, self.learnt, kept = self.saved
        self.lengths["learnt"] = self.lengths["learnt"][:kept]
        limit = self.book.limit if self.random.random() < 0.7 else int(self.random.integers(0, 5))
        self.book = staleness.ledger(limit, self.size, consumed=consumed)
        old = staleness.over_age(finished.items(), self.book, consumed, 1)
        self.book = self.book.redo(len(old))
        self.finished = {n: r for n, r in finished.items() if n not in old}
        self.running, self.served, self.ahead = {}, consumed, self.consumed_cursor

    def act(self):
        moves = [self.submit, self.decode, self.finish, self.finish, self.learn, self.learn, self.checkpoint, self.crash]
        self.random.choice(moves, p=[0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.08, 0.02])()


@pytest.mark.parametrize("seed", range(40))
def test_chance_never_breaks_the_bound_and_loses_nothing(seed):
    world = World(seed)
    for _ in range(1500):
        world.act()
    assert world.book.consumed > 3
    # Each prompt once an epoch, in the epoch's order, whatever was begun again.
    for epoch in range(len(world.learnt) // world.prompts):
        part = world.learnt[epoch * world.prompts : (epoch + 1) * world.prompts]
        assert sorted(p for p, _ in part) == list(range(world.prompts)) and {v for _, v in part} == {epoch}


def test_long_responses_are_learnt_from_as_often_as_they_are_made():
    """Nothing is dropped: in a run without crashes the lengths learnt from are those made, up to what is still waiting."""
    for seed in range(5):
        world = World(100 + seed)
        world.crash = lambda: None
        for _ in range(4000):
            world.act()
        waiting = [r[0].response_length for r in world.finished.values()]
        assert sorted(world.lengths["made"]) == sorted(world.lengths["learnt"] + waiting)
