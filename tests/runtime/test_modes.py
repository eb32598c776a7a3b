"""Four modes, one interface: which policy drew which token, and what equals what bit for bit."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest
from async_world import Worlds

from adrl_jax.checkpoint import Checkpointer
from adrl_jax.learner.update import policy_params
from adrl_jax.metrics import read_lines
from adrl_jax.models.transformer import engine_layout
from adrl_jax.runtime import cursor, publish, stop
from adrl_jax.runtime.batches import Maker
from adrl_jax.runtime.parts import RunState


@pytest.fixture(scope="module")
def worlds():
    with contextlib.ExitStack() as stack:
        yield Worlds(stack)


@pytest.fixture(scope="module")
def runs(worlds, tmp_path_factory):
    """One finished run a mode, made when first asked for."""
    made = {}

    def get(mode, **changes):
        key = (mode, *sorted(changes.items()))
        if key not in made:
            workdir = tmp_path_factory.mktemp(mode)
            assert worlds.run(workdir, mode, **changes).status == "done"
            made[key] = workdir
        return made[key]

    return get


def rows(workdir, phase="train"):
    return [r for r in read_lines(workdir / "metrics.jsonl") if r["phase"] == phase]


def learnt(workdir):
    """What was learnt, without times: fingerprints and rewards by step."""
    return [(r["step"], r["fingerprint"], r["reward/mean"], r["len/mean"]) for r in rows(workdir)]


def tokens(workdir):
    return [
        (s["step"], s["prompt_id"], s["visit"], s["sample"], s["response"], s["version"])
        for s in read_lines(workdir / "samples.jsonl")
        if s["phase"] == "train"
    ]


def ages(row):
    """The ages, in updates, that tokens of a batch have."""
    return {i for i, share in enumerate(row["staleness/hist"]) if share > 0}


def test_lag_zero_is_sync_bit_for_bit(runs):
    a, b = runs("sync"), runs("lagged", **{"runtime.lag": 0})
    assert learnt(a) == learnt(b) and tokens(a) == tokens(b)
    assert len({fingerprint for _, fingerprint, *_ in learnt(a)}) == 6  # weights do move


@pytest.mark.parametrize("lag", [1, 2])
def test_lagged_versions_are_as_predicted(runs, lag):
    workdir = runs("lagged", **{"runtime.lag": lag})
    for b, row in enumerate(rows(workdir)):  # batch b meets version b, and is of version max(0, b - lag)
        assert ages(row) == {min(b, lag)} and row["staleness/max"] == min(b, lag)
    versions = {(s[0], s[-1]) for s in tokens(workdir)}
    assert versions == {(b + 1, max(0, b - lag)) for b in range(6)}
    assert learnt(workdir)[1:] != learnt(runs("sync"))[1:]


def test_sync_is_never_stale_and_agrees_with_itself(runs):
    for row in rows(runs("sync")):
        assert ages(row) == {0} and row["staleness/disagreement"] == 0 and "queue/depth" in row


def test_stale_data_disagree_and_the_older_the_more(runs):
    one, two = (np.mean([r["staleness/disagreement"] for r in rows(runs("lagged", **{"runtime.lag": k}))[2:]]) for k in (1, 2))
    assert 0 < one and 0 < two


def test_pinned_overlap_is_lagged_bit_for_bit(runs):
    a, b = runs("pinned"), runs("lagged")
    assert learnt(a) == learnt(b) and tokens(a) == tokens(b)
    for row in rows(a):
        assert row["time/generator_wait"] >= 0 and row["time/learner_wait"] >= 0 and "time/rollout" not in row


@pytest.mark.parametrize("mode", ["overlap", "in_flight", "recompute"])
def test_overlapped_modes_stay_within_the_limit(runs, mode):
    workdir = runs(mode)
    for b, row in enumerate(rows(workdir)):
        assert ages(row) <= set(range(min(b, 2) + 1))
    sync = [s[:4] for s in tokens(runs("sync"))]
    assert [s[:4] for s in tokens(workdir)] == sync  # the same prompts, visits and samples in the same order
    assert [e["step"] for e in rows(workdir, "evaluate")] == [0, 6]


@pytest.mark.parametrize("mode", ["overlap", "in_flight"])
def test_limit_zero_equals_sync_and_mixes_nothing(runs, mode):
    workdir = runs(mode, **{"runtime.max_staleness": 0})
    assert all(ages(row) == {0} for row in rows(workdir))
    assert learnt(workdir) == learnt(runs("sync")) and tokens(workdir) == tokens(runs("sync"))


def test_minibatches_and_passes_count_as_one_version(worlds, tmp_path):
    changes = {"learner.minibatches": 2, "learner.epochs": 2, "runtime.lag": 1, "train.steps": 3}
    worlds.run(tmp_path, "lagged", **changes)
    assert [r["version"] for r in rows(tmp_path)] == [4, 8, 12]
    assert [ages(r) for r in rows(tmp_path)] == [{0}, {4}, {4}]


@pytest.mark.parametrize("mode", ["lagged", "overlap"])
def test_refreshed_batches_are_on_policy(runs, mode):
    """Whatever the lag, the run is the synchronous one: same tokens, same weights, and no disagreement left."""
    workdir = runs(mode, **{"runtime.refresh": "always"})
    sync = runs("sync")
    assert [s[:-1] for s in tokens(workdir)] == [s[:-1] for s in tokens(sync)]
    assert {s[-1] - s[0] for s in tokens(workdir)} == {-1}
    for row, other in zip(rows(workdir), rows(sync)):
        assert row["staleness/max"] == 0 and row["staleness/disagreement"] == 0
        assert row["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-12)
    refreshed = [r for r in rows(workdir) if r["refresh/share"] == 1]
    assert refreshed and all(0 <= r["refresh/reused"] <= 1 for r in refreshed)
    assert min(r["refresh/reused"] for r in refreshed) < 1


def test_lagged_stopped_and_resumed_equals_unbroken(worlds, runs, tmp_path):
    """Stopped within a step with two batches waiting; what was generated is not generated again."""
    from async_world import by_length

    stopper, calls = stop.Stop(), []

    def counting(items):
        calls.append(len(items))
        if len(calls) == 4:  # the evaluation, then steps 1, 2, 3
            stopper.request()
        return by_length(items)

    assert worlds.run(tmp_path, "lagged", stopper=stopper, parts={"scorer": counting}).status == "stopped"
    saver = Checkpointer(tmp_path / "checkpoints")
    assert saver.latest() == 2 and saver.host(2)["work"]["groups"] == 2 * 2
    saver.close()
    assert worlds.run(tmp_path, "lagged").status == "done"
    assert learnt(tmp_path) == learnt(runs("lagged")) and tokens(tmp_path) == tokens(runs("lagged"))
    arms = [line["arms"] for line in read_lines(tmp_path / "arms.jsonl")]
    assert arms == [line["arms"] for line in read_lines(runs("lagged") / "arms.jsonl")]


@pytest.mark.parametrize("mode", ["overlap", "in_flight"])
def test_overlapped_stopped_and_resumed_learns_from_every_prompt_once(worlds, runs, tmp_path, mode):
    from async_world import by_length

    stopper, calls = stop.Stop(), []

    def counting(items):
        calls.append(len(items))
        if len(calls) == 4:
            stopper.request()
        return by_length(items)

    assert worlds.run(tmp_path, mode, stopper=stopper, parts={"scorer": counting}).status == "stopped"
    assert worlds.run(tmp_path, mode).status == "done"
    assert [s[:4] for s in tokens(tmp_path)] == [s[:4] for s in tokens(runs("sync"))]
    assert all(row["staleness/max"] <= 2 for row in rows(tmp_path))


def test_a_lower_limit_on_resume_begins_over_age_groups_again(worlds, tmp_path):
    from async_world import by_length

    stopper, calls = stop.Stop(), []

    def counting(items):
        calls.append(len(items))
        if len(calls) == 5:
            stopper.request()
        return by_length(items)

    worlds.run(tmp_path, "lagged", stopper=stopper, parts={"scorer": counting})
    assert worlds.run(tmp_path, "overlap", **{"runtime.max_staleness": 0}).status == "done"
    after = rows(tmp_path)[3:]
    assert all(ages(row) == {0} for row in after) and after[0]["queue/redone"] == 4
    assert len({s[1:4] for s in tokens(tmp_path)}) == len(tokens(tmp_path))


def test_the_trace_has_a_lane_for_each_side(worlds, tmp_path):
    worlds.run(tmp_path, "overlap", **{"log.trace": True, "train.steps": 3})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    seen = {lane: sum(e["ph"] == "X" and e["tid"] == tid for e in events) for lane, tid in lanes.items()}
    assert seen["learner"] == 3 and seen["publish"] == 4 and seen["evaluate"] == 2 and seen["generator"] >= 3
    depth = [e["args"]["value"] for e in events if e["name"] == "queue depth"]
    assert depth and max(depth) <= 3 and min(depth) >= 0


def test_publishing_reaches_the_generators_device(worlds, tmp_path):
    worlds.run(tmp_path, "overlap", **{"train.steps": 2})
    parts = worlds._parts[True, 1, 1]
    assert parts.generator_device == jax.devices()[1]
    assert {d for x in jax.tree.leaves(parts.engine.params) for d in x.devices()} == {jax.devices()[1]}


@pytest.mark.parametrize("mode", ["sync", "lagged", "pinned", "in_flight"])
def test_ratios_are_one_for_fresh_data_and_not_for_stale_data(runs, mode):
    """Log-probs are those of the law that drew, whoever learns: recomputed ones would hide how old a batch is."""
    for row in rows(runs(mode)):
        assert row["mismatch/max_abs_delta"] < 1e-4 if ages(row) == {0} else row["mismatch/max_abs_delta"] > 1e-3


@pytest.mark.parametrize("mode", ["sync", "lagged", "overlap", "in_flight"])
def test_what_is_served_in_the_end_are_the_learners_weights(worlds, tmp_path, mode):
    """The last publish reached the engine, whose layout holds the very numbers of the last checkpoint."""
    worlds.run(tmp_path, mode, **{"train.steps": 2})
    parts = worlds._parts[mode in ("overlap", "in_flight"), 1, 1]
    saver = Checkpointer(tmp_path / "checkpoints")
    state = RunState(parts.init_learner(), parts.bandit.init(), cursor.init(0, 12), np.int32(0), np.int32(0))
    learner = saver.restore(saver.latest(), state).learner
    saver.close()
    assert parts.engine.version == int(learner.version) == 2
    wanted = jax.tree.leaves(engine_layout(policy_params(learner), parts.model_config))
    for served, own in zip(jax.tree.leaves(parts.engine.params), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(served), np.asarray(own))
    assert publish.fingerprint(policy_params(learner)) == rows(tmp_path)[-1]["fingerprint"]


@pytest.mark.parametrize("mode", ["sync", "lagged"])
def test_tokens_of_an_illegal_age_end_the_run_before_anything_is_learnt(worlds, tmp_path, monkeypatch, mode):
    """Should admission ever fail, the loop says so: here tokens claim a policy that does not exist yet."""
    made = Maker.batch

    def early(self, *args, **more):
        batch, bandit = made(self, *args, **more)
        wrong = [dataclasses.replace(r, policy_versions=r.policy_versions + 50) for r in batch.rollouts]
        return dataclasses.replace(batch, rollouts=wrong), bandit

    monkeypatch.setattr(Maker, "batch", early)
    with pytest.raises(RuntimeError, match="updates old, outside"):
        worlds.run(tmp_path, mode)
    assert not rows(tmp_path)
