"""Work under way comes back from a checkpoint bit for bit."""

import dataclasses

import numpy as np

from adrl_jax.checkpoint import Checkpointer
from adrl_jax.rollout.stats import LaunchRecord
from adrl_jax.runtime import work
from adrl_jax.types import FinishReason, Rollout, SamplingParams


def groups():
    random = np.random.default_rng(0)

    def one(number, sample):
        p, r = int(random.integers(1, 5)), int(random.integers(1, 9))
        return Rollout(
            prompt_id=2**40 + number, visit=3, sample=sample, group_id=number % 4, token_ids=random.integers(0, 99, p + r).astype(np.int32),
            prompt_length=p, response_length=r, log_probs=random.normal(size=r).astype(np.float32),
            policy_versions=np.sort(random.integers(0, 9, r)).astype(np.int32), finish_reason=FinishReason(int(random.integers(1, 4))),
            sampling=SamplingParams(0.7, 5, 0.9, 0.01), accept_passes=4, accept_tokens=7, noise_visit=None if sample else 1,
        )  # fmt: skip

    return {n: [one(n, s) for s in range(3)] for n in (11, 5, 8)}


def same(a, b):
    for f in dataclasses.fields(Rollout):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype and x.tobytes() == y.tobytes()
        else:
            assert x == y and type(x) is type(y)


def test_rollouts_through_a_checkpoint(tmp_path):
    before = groups()
    saver = Checkpointer(tmp_path)
    saver.save(1, {"x": np.arange(3)}, {"n": 1}, work.to_arrays(before))
    saver.save(2, {"x": np.arange(3)}, {"n": 2}, work.to_arrays({}))
    saver.close()
    again = Checkpointer(tmp_path)
    after = work.from_arrays(again.work(1))
    assert list(after) == sorted(before)
    for number, rollouts in before.items():
        for a, b in zip(rollouts, after[number], strict=True):
            same(a, b)
    assert work.from_arrays(again.work(2)) == {} and again.restore(2, {"x": np.zeros(3, int)})["x"].tolist() == [0, 1, 2]
    again.close()


def test_launches_through_json():
    import json

    launch = LaunchRecord(1, 3, 4, 64, 5, 17, 0.25, 1.5, False, 9, 20, (4, 2), (3, 1), 0, 0.0)
    record = json.loads(json.dumps(work.launches_to_json({4: (launch, launch), 5: ()})))
    assert work.launches_from_json(record) == {4: (launch, launch), 5: ()}
