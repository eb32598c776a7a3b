"""The drafter's training goes on after a restart as if there had been none; and never reads features through another head."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from loop_world import by_length, settings

from adrl_jax.checkpoint import Checkpointer
from adrl_jax.drafter.buffer import DataBuffer
from adrl_jax.drafter.lessons import places_of
from adrl_jax.drafter.trainer import Heads
from adrl_jax.metrics import read_lines
from adrl_jax.runtime import loop
from adrl_jax.runtime.stop import Stop
from experiments import build, resolve

FEW = {"compare_repeats": 0, "report": False}
COMMON = {
    "bandit.name": "fixed",
    "bandit.arm": "eagle-d2",
    "learner.minibatches": 1,
    "learner.learning_rate": 0.05,
    "train.steps": 4,
    "checkpoint.every": 2,
    "task.max_prompt_tokens": 6,
    "train.prompts_per_step": 2,
}
MODES = {
    "spot": {"drafter.when": "spot", "drafter.spot_steps": 4, "drafter.spot_rows": 1},
    "on_demand": {"drafter.when": "on_demand", "drafter.fall": 0.01},
}


class Broken(Exception):
    pass


@contextlib.contextmanager
def opened(mode):
    c = settings(**COMMON, **MODES[mode])
    with build.opened(c) as parts:
        yield dataclasses.replace(parts, scorer=by_length), dataclasses.replace(resolve.loop_config(c), **FEW)


def broken():
    raise Broken


def scorer_that(does, at):
    """Does something at its `at`-th call; the first of a fresh run is the evaluation before training."""
    calls = iter(range(1, 99))

    def scorer(items):
        if next(calls) == at:
            does()
        return by_length(items)

    return scorer


def end_of(workdir):
    """Every array of the last checkpoint but the controller's (it looks at the clock), and what was logged."""
    saver = Checkpointer(workdir / "checkpoints")
    step = saver.latest()
    items = {"state": saver._manager.restore(step)["state"], "work": saver.work(step)}
    saver.close()
    leaves = jax.tree_util.tree_leaves_with_path(items)
    arrays = {jax.tree_util.keystr(k): np.asarray(x) for k, x in leaves}
    rows = [r for r in read_lines(workdir / "metrics.jsonl") if r["phase"] == "train"]
    keys = ("step", "fingerprint", "drafter/fingerprint", "drafter/version", "drafter/acceptance", "drafter/training")
    return {k: x for k, x in arrays.items() if "'bandit'" not in k}, [[r.get(k) for k in keys] for r in rows]


class Watched:
    """Notes what a trainer's step is given; the features of the first lessons may be spoilt."""

    def __init__(self, step, lessons, spoilt=0):
        self.step, self.lessons, self.spoilt = step, lessons, spoilt

    def __call__(self, state, fixed, head, lesson):
        if len(self.lessons) < self.spoilt:
            lesson = lesson._replace(hidden=lesson.hidden * np.nan)
        self.lessons.append((lesson, jax.tree.map(np.asarray, dict(head))))
        return self.step(state, fixed, head, lesson)


@pytest.fixture(scope="module", params=sorted(MODES))
def runs(request, tmp_path_factory):
    """An unbroken run; one that was asked to stop in its second step, went on, broke in its third, and went on in what might be
    another process; and (spot) one that forgets the heads of older policies and one whose first three lessons are spoilt. Late
    samples are wanted at every step, as in the tail of a long rollout."""
    mode = request.param
    folders = {name: tmp_path_factory.mktemp(name) for name in ("whole", "broken", "forgetful", "spoilt")}
    seen = {"whole": [], "forgetful": [], "spoilt": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataBuffer, "_cut", lambda self: 4)
        with opened(mode) as (parts, config):
            step = None if mode != "spot" else parts.adapting.trainer._step
            if step is not None:
                parts.adapting.trainer._step = Watched(step, seen["whole"])
            loop.run(parts, config, folders["whole"])
            stop = Stop()
            stopping = dataclasses.replace(parts, scorer=scorer_that(stop.request, 3))
            assert loop.run(stopping, config, folders["broken"], stop).status == "stopped"
            with pytest.raises(Broken):
                loop.run(dataclasses.replace(parts, scorer=scorer_that(broken, 2)), config, folders["broken"])
            if step is not None:
                seen["whole"] = seen["whole"][:16]
                parts.adapting.trainer._step = Watched(step, seen["forgetful"])
                keep = Heads.keep
                with pytest.MonkeyPatch.context() as forgets:
                    forgets.setattr(Heads, "keep", lambda self, versions: keep(self, sorted(versions)[-1:]))
                    loop.run(parts, config, folders["forgetful"])
                parts.adapting.trainer._step = Watched(step, seen["spoilt"], 3)
                loop.run(parts, config, folders["spoilt"])
            size = parts.tokenizer.size
        with opened(mode) as (parts, config):
            assert loop.run(parts, config, folders["broken"]).status == "done"
    return mode, folders, seen, size


def test_a_run_that_goes_on_equals_an_unbroken_one(runs):
    mode, folders, seen, _ = runs
    (a, rows), (b, again) = end_of(folders["whole"]), end_of(folders["broken"])
    assert rows == again and len(rows) == 4
    assert a.keys() == b.keys() and any("drafter_params" in k for k in a)
    assert [k for k in a if a[k].tobytes() != b[k].tobytes()] == []
    if mode == "spot":  # the third step learnt from the second rollout, across the break
        assert any("hidden" in k for k in a) and any("head_3_embedding" in k for k in a)
        assert 1 in {lesson.version for lesson, _ in seen["whole"][8:12]}
    else:
        assert {r[-1] for r in rows} == {0.0, 1.0}


def law_gap(lesson, head, size):
    """Largest distance, in nats, between the recorded log-probs of a lesson's responses and what `head` makes of its features."""
    weights = np.asarray(head.get("head_t", head["embedding"]), np.float64)[:size]
    worst = 0.0
    for row, places in places_of(lesson.batch, 1 + int(lesson.batch.rollout_index[lesson.batch.target_mask].max())):
        targets = np.flatnonzero(lesson.batch.target_mask[row] & np.isin(lesson.batch.target_index[row], places))
        predicting = places[-len(targets) - 1 : -1]
        logits = np.asarray(lesson.hidden[row, predicting], np.float64) @ weights.T / lesson.temperature
        law = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        own = law[np.arange(len(targets)), lesson.batch.token_ids[row, places[-len(targets) :]]]
        worst = max(worst, float(np.abs(own - lesson.batch.log_probs[row, targets]).max()))
    return worst


def test_every_lesson_meets_the_head_of_the_policy_that_made_its_features(runs):
    mode, folders, seen, size = runs
    if mode != "spot":
        return
    current = [i // 4 for i in range(16)]  # four steps after each of four rollouts, of policies 0 to 3
    lessons = seen["whole"]
    assert len(lessons) == 16 and len({lesson.version for lesson, _ in lessons}) >= 3
    assert all(now - 1 <= lesson.version <= now for (lesson, _), now in zip(lessons, current))
    assert sum(lesson.version == now - 1 for (lesson, _), now in zip(lessons, current)) >= 3
    newest = {lesson.version: head for lesson, head in lessons}
    for (lesson, head), now in zip(lessons, current):
        assert law_gap(lesson, head, size) < 1e-4
        if lesson.version < now and now in newest:  # a wrong head would have shown
            assert law_gap(lesson, newest[now], size) > 1e-2
    # Without that head the features are refused, and counted; the run goes on with what it has.
    refused = seen["forgetful"]
    assert len(refused) == 16 and all(lesson.version == now for (lesson, _), now in zip(refused, current))
    rows = [r for r in read_lines(folders["forgetful"] / "metrics.jsonl") if r["phase"] == "train"]
    assert rows[0]["drafter/stale"] == 0 < rows[1]["drafter/stale"] < rows[2]["drafter/stale"]


def test_lessons_that_are_not_finite_are_skipped_and_counted_and_the_run_goes_on(runs):
    mode, folders, _, _ = runs
    if mode != "spot":
        return
    rows = [r for r in read_lines(folders["spoilt"] / "metrics.jsonl") if r["phase"] == "train"]
    assert [r["drafter/spot_skipped"] for r in rows] == [3.0, 0.0, 0.0, 0.0]
    assert [r["drafter/spot_steps"] for r in rows] == [4.0] * 4
    # Two updates of the warm start, then those that were not skipped; the policy is what it is without.
    assert [r["drafter/version"] for r in rows] == [3, 7, 11, 15]
    _, whole = end_of(folders["whole"])
    assert [r["fingerprint"] for r in rows] == [r[1] for r in whole]
