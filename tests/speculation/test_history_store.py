"""The store against a plain list of everything ever added, its limits, and its way through a checkpoint."""

import numpy as np
import pytest

from adrl_jax.checkpoint import Checkpointer
from adrl_jax.speculation.history import SEPARATOR, UNALIGNED
from adrl_jax.speculation.history_store import HistoryStore
from adrl_jax.types import FinishReason, Rollout, SamplingParams

SMALL = dict(max_tokens=60, max_texts=9, max_responses=3, context=2)


def rollout(prompt_id=0, visit=0, sample=0, prompt=(91, 92, 93), response=(1, 2)):
    ids, n = np.array([*prompt, *response], np.int32), len(response)
    return Rollout(
        prompt_id, visit, sample, 0, ids, len(prompt), n, np.zeros(n, np.float32), np.zeros(n, np.int32),
        FinishReason.STOP, SamplingParams(),
    )  # fmt: skip


def random_rollouts(count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        prompt_id = int(rng.integers(4))
        yield rollout(
            prompt_id,
            int(rng.integers(3)),
            int(rng.integers(3)),
            tuple(90 + np.arange(1 + prompt_id)),
            rng.integers(0, 50, rng.integers(1, 15)).tolist(),
        )


class Oracle:
    """The definition, by brute force over a list."""

    def __init__(self, max_tokens, max_texts, max_responses, context):
        self.limits, self.context, self.texts = (max_tokens, max_texts, max_responses), context, []

    def add(self, r):
        name = (r.prompt_id, r.visit, r.sample)
        start = max(r.prompt_length - self.context, 0)
        ids = r.token_ids[start:].tolist()
        cut = max(len(ids) - self.limits[0], 0)
        self.texts = [t for t in self.texts if t[0] != name] + [(name, ids[cut:], start + cut)]
        own = [t for t in self.texts if t[0][0] == r.prompt_id]
        if len(own) > self.limits[2]:
            self.texts.remove(own[0])
        while self.tokens() > self.limits[0] or len(self.texts) > self.limits[1]:
            self.texts.pop(0)

    def tokens(self):
        return sum(len(t[1]) for t in self.texts)

    def reference(self, prompt_id, capacity, sample=None):
        own = [t for t in self.texts if t[0][0] == prompt_id]
        mine = [t for t in own if t[0][2] == sample][-1:]
        ids = []
        for text in [t for t in own if t not in mine] + mine:
            ids += [SEPARATOR, *text[1]]
        ids = ids[1:][-capacity:]
        if ids[:1] == [SEPARATOR]:
            ids = ids[1:]
        offset = len(ids) - len(mine[0][1]) - mine[0][2] if mine else UNALIGNED
        return ids, offset


def check_references(store, oracle):
    for prompt_id in range(5):
        for capacity in (1, 7, 16, 100):
            for sample in (None, 0, 1, 2):
                found = store.reference(prompt_id, capacity, sample)
                ids, offset = oracle.reference(prompt_id, capacity, sample)
                assert found.token_ids.shape == (capacity,) and found.token_ids.dtype == np.int32
                assert found.token_ids[: found.length].tolist() == ids and found.length == len(ids)
                assert (found.token_ids[found.length :] == SEPARATOR).all()
                assert found.offset == offset


@pytest.mark.parametrize("limits", [{}, {"max_texts": 4}, {"max_tokens": 11}, {"max_responses": 1}, {"context": 0}], ids=str)
def test_store_is_the_definition(limits):
    store, oracle = HistoryStore(**SMALL | limits), Oracle(**SMALL | limits)
    for i, r in enumerate(random_rollouts(120)):
        store.add(r), oracle.add(r)
        assert store.tokens == oracle.tokens() <= store.max_tokens
        assert len(store) == len(oracle.texts) <= store.max_texts
        if i % 10 == 0:
            check_references(store, oracle)


def test_the_end_of_the_prompt_stands_before_a_response():
    store = HistoryStore(**SMALL)
    store.add(rollout(response=(1, 2)))
    store.add(rollout(sample=1, response=(3,)))
    found = store.reference(0, 20)
    assert found.token_ids[: found.length].tolist() == [92, 93, 1, 2, SEPARATOR, 92, 93, 3]


def test_the_rows_own_sample_goes_last_and_is_aligned():
    store = HistoryStore(**SMALL)
    mine = rollout(visit=0, sample=0, prompt=range(70, 79), response=(1, 2, 3))
    store.add(mine)
    store.add(rollout(visit=0, sample=1, prompt=range(70, 79), response=(4, 5)))
    for capacity in (20, 5, 4):
        found = store.reference(0, capacity, sample=0)
        for position in range(9, 12):
            assert found.token_ids[found.offset + position] == mine.token_ids[position]
    assert store.reference(0, 20, sample=2).offset == UNALIGNED
    assert store.reference(0, 20).offset == UNALIGNED


def test_nothing_is_known_of_a_new_prompt():
    found = HistoryStore().reference(7, 4)
    assert found.length == 0 and found.offset == UNALIGNED and (found.token_ids == SEPARATOR).all()


def test_rows_are_stacked():
    store = HistoryStore(**SMALL)
    for r in random_rollouts(30):
        store.add(r)
    rows = [(0, 1), (3, 0), (0, 1), (2, 2)]
    found = store.references([p for p, _ in rows], 16, [s for _, s in rows])
    plain = store.references([p for p, _ in rows], 16)
    assert found.token_ids.shape == (4, 16) and found.length.shape == found.offset.shape == (4,)
    for b, (prompt_id, sample) in enumerate(rows):
        for got, expected in ((found, store.reference(prompt_id, 16, sample)), (plain, store.reference(prompt_id, 16))):
            for x, y in zip(got, expected):
                np.testing.assert_array_equal(x[b], y)
    assert store.references([], 16).token_ids.shape == (0, 16)


def test_memory_stays_bounded_and_adding_stays_fast():
    store = HistoryStore(max_tokens=1000, max_texts=64, max_responses=8)
    for i in range(5000):
        store.add(rollout(prompt_id=i, response=[5] * (1 + i % 40)))
    assert store.tokens <= 1000 and len(store) <= 64
    assert store.reference(4999, 64).length > 0 and store.reference(4000, 64).length == 0
    assert len(store._of_prompt) == len(store)


def test_a_restored_store_goes_on_like_the_one_saved(tmp_path):
    store, big = HistoryStore(**SMALL), 2**63 + 5
    for r in random_rollouts(40):
        store.add(r)
    store.add(rollout(prompt_id=big))
    saver = Checkpointer(tmp_path)
    saver.save(1, {"history": store.state_dict()}, {})
    saver.wait()
    twin = HistoryStore(**SMALL)
    twin.load_state_dict(saver.restore(1, {"history": twin.state_dict()})["history"])
    saver.close()
    for r in [None, *random_rollouts(60, seed=1)]:
        if r is not None:
            store.add(r), twin.add(r)
        ours, theirs = store.state_dict(), twin.state_dict()
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])
            assert ours[name].dtype == theirs[name].dtype
        for prompt_id in (0, 1, 2, 3, big):
            for x, y in zip(store.reference(prompt_id, 16, 1), twin.reference(prompt_id, 16, 1)):
                np.testing.assert_array_equal(x, y)


def test_shapes_of_the_state_depend_on_the_limits_only():
    store = HistoryStore(**SMALL)
    empty = {name: (x.shape, x.dtype) for name, x in store.state_dict().items()}
    for r in random_rollouts(50):
        store.add(r)
    assert {name: (x.shape, x.dtype) for name, x in store.state_dict().items()} == empty


def test_fewer_responses_a_prompt_evict_the_oldest_on_loading():
    store = HistoryStore(**SMALL)
    for sample in range(3):
        store.add(rollout(sample=sample, response=(sample,)))
    fewer = HistoryStore(**SMALL | {"max_responses": 1})
    fewer.load_state_dict(store.state_dict())
    assert len(fewer) == 1 and fewer.reference(0, 8).token_ids[:3].tolist() == [92, 93, 2]


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda s: s.pop("start"), "start"),
        (lambda s: s.update(token_ids=s["token_ids"][:-1]), r"token_ids is int32\[59\].*max_tokens=60"),
        (lambda s: s.update(visit=s["visit"].astype(np.int32)), r"visit is int32\[9\]"),
        (lambda s: s.update(count=np.array(10, np.int32)), "count=10"),
        (lambda s: s.update(size=s["size"] * 0), "sizes"),
        (lambda s: s.update(size=s["size"] * 0 + 60), "sizes"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(change, text):
    store = HistoryStore(**SMALL)
    for r in random_rollouts(10):
        store.add(r)
    before = store.state_dict()
    state = store.state_dict()
    change(state)
    with pytest.raises(ValueError, match=text):
        store.load_state_dict(state)
    for name, x in store.state_dict().items():
        np.testing.assert_array_equal(x, before[name])


@pytest.mark.parametrize("name, value", [("max_tokens", 0), ("max_texts", -1), ("max_responses", 1.5), ("context", -1)])
def test_wrong_limits_are_refused(name, value):
    with pytest.raises(ValueError, match=f"HistoryStore.{name}={value}"):
        HistoryStore(**{name: value})


def test_wrong_arguments_are_refused():
    store = HistoryStore()
    with pytest.raises(ValueError, match="capacity=0"):
        store.reference(0, 0)
    with pytest.raises(ValueError, match="contains -1"):
        store.add(rollout(response=(3, -1)))
    assert len(store) == 0
