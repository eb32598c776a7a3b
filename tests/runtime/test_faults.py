"""Parts that die, hang or run out of disk: the first error, soon, no thread left, and a run that goes on where it was."""

import contextlib
import random
import threading
import time

import pytest
from async_world import Worlds, by_length

from adrl_jax.checkpoint import Checkpointer
from adrl_jax.metrics import read_lines
from adrl_jax.rewards.pool import ScorerPool
from adrl_jax.runtime.collect import RewardError
from adrl_jax.runtime.partner import Stalled
from adrl_jax.types import Score

MODES = ("overlap", "in_flight")


class Broken(RuntimeError):
    pass


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        made = Worlds(stack)
        made.run(tmp_path_factory.mktemp("warm"), "overlap")  # programs are compiled before anything is timed
        made.run(tmp_path_factory.mktemp("warm"), "in_flight")
        yield made


@pytest.fixture(scope="module")
def expected(worlds, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("expected")
    worlds.run(workdir, "overlap")
    return consumed(workdir)


def consumed(workdir):
    return [
        (s["step"], s["prompt_id"], s["visit"], s["sample"])
        for s in read_lines(workdir / "samples.jsonl")
        if s["phase"] == "train"
    ]


def no_thread_left():
    return not any(t.name == "generator" and t.is_alive() for t in threading.enumerate())


class Failing:
    """A callable that breaks at its n-th call and notes when."""

    def __init__(self, inner, at, error=Broken):
        self.inner, self.left, self.error, self.when = inner, at, error, None

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            self.when = time.monotonic()
            raise self.error("broke on purpose")
        return self.inner(*args, **kwargs)


class Engine:
    """The engine, with one of its launches failing or hanging."""

    def __init__(self, inner, spoil):
        self._inner, self._spoil = inner, spoil

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def _with(self, kwargs):
        tell = kwargs.get("on_launch")

        def on_launch(record):
            if threading.current_thread().name == "generator":
                self._spoil(record)
            tell(record)

        return kwargs | {"on_launch": on_launch}

    def generate(self, *args, **kwargs):
        return self._inner.generate(*args, **self._with(kwargs))

    def serving(self, *args, **kwargs):
        return self._inner.serving(*args, **self._with(kwargs))


def parts_of(worlds):
    return worlds._parts[True]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", ["generator", "learner", "reward"])
def test_the_first_error_ends_the_run_and_the_run_goes_on_after(worlds, expected, tmp_path, mode, part):
    parts, where = parts_of(worlds), random.Random(f"{mode} {part}")
    changes = {"checkpoint.every": 1}
    if part == "generator":
        failing = Failing(lambda record: None, where.randrange(3, 12))
        broken = {"engine": Engine(parts.engine, failing)}
    elif part == "learner":
        failing = Failing(parts.update, where.randrange(1, 6))
        broken = {"update": failing}
    else:
        failing = Failing(by_length, where.randrange(2, 6))
        broken = {"scorer": failing}
    with pytest.raises(Broken, match="broke on purpose"):
        worlds.run(tmp_path, mode, parts=broken, **changes)
    assert time.monotonic() - failing.when < 2 and no_thread_left()
    assert worlds.run(tmp_path, mode, **changes).status == "done"
    assert consumed(tmp_path) == expected and no_thread_left()


def test_a_generator_that_hangs_is_noticed(worlds, tmp_path):
    release = threading.Event()
    calls = []

    def hang(record):
        calls.append(record)
        if len(calls) == 4:
            release.wait(20)

    broken = {"engine": Engine(parts_of(worlds).engine, hang)}
    began = time.monotonic()
    with pytest.raises(Stalled, match=r"the generator gave no sign of life for .* \(limit 0.5 s\)"):
        worlds.run(tmp_path, "overlap", parts=broken, **{"runtime.heartbeat_timeout": 0.5})
    assert time.monotonic() - began < 15
    release.set()
    for _ in range(100):
        if no_thread_left():
            break
        time.sleep(0.05)
    assert no_thread_left()


def hanging(number):
    if number == 1:
        time.sleep(60)
    return Score(float(number), "x", "match")


def dying(number):
    import os

    if number == 1:
        os._exit(7)
    return Score(float(number), "x", "match")


def test_a_reward_that_hangs_costs_its_time_out_and_no_more(worlds, tmp_path):
    """One response in a run hangs: a time-out, counted, and the run goes on."""
    calls = []

    with ScorerPool(hanging, workers=1, timeout_s=0.5) as pool:

        def scorer(items):
            calls.append(time.monotonic())
            found = pool.score([(int(len(calls) == 3 and i == 0),) for i in range(len(items))])
            calls[-1] = time.monotonic() - calls[-1]
            plain = by_length(items)
            return [f if f.reason == "timeout" else p for f, p in zip(found, plain)]

        assert worlds.run(tmp_path, "overlap", parts={"scorer": scorer}).status == "done"
    assert max(calls[1:]) < 0.5 + 2 and no_thread_left()
    rows = [r for r in read_lines(tmp_path / "metrics.jsonl") if r["phase"] == "train"]
    assert sum(r["score/timeout"] > 0 for r in rows) == 1


def test_a_reward_worker_that_dies_ends_the_run_with_its_exit_code(worlds, tmp_path):
    with ScorerPool(dying, workers=1, timeout_s=5.0) as pool:
        calls = []

        def scorer(items):
            calls.append(0)
            pool.score([(int(len(calls) == 3),)])
            return by_length(items)

        with pytest.raises(RuntimeError, match="the scorer's process died with exit code 7"):
            worlds.run(tmp_path, "in_flight", parts={"scorer": scorer})
    assert no_thread_left()


def test_a_reward_that_is_no_number_ends_an_overlapped_run_too(worlds, tmp_path):
    with pytest.raises(RewardError, match="is a finite number"):
        worlds.run(tmp_path, "overlap", parts={"scorer": lambda items: [Score(float("nan"), None, "mismatch")] * len(items)})
    assert no_thread_left()


def test_a_full_disk_during_a_save_is_told_and_the_run_goes_on_from_the_last_whole_one(worlds, expected, tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    real, calls = ocp.CheckpointManager.save, []

    def full(self, step, *args, **kwargs):
        calls.append(step)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        return real(self, step, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        with pytest.raises(OSError, match="No space left on device"):
            worlds.run(tmp_path, "overlap", **{"checkpoint.every": 1})
    assert no_thread_left()
    saver = Checkpointer(tmp_path / "checkpoints")
    assert saver.latest() == 2
    saver.close()
    assert worlds.run(tmp_path, "overlap", **{"checkpoint.every": 1}).status == "done"
    assert consumed(tmp_path) == expected
