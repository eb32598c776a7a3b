"""kill -9 at any point, restart, and the end is the same to the last bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from adrl_jax.checkpoint import Checkpointer, named_arrays
from adrl_jax.metrics import read_lines

ROOT = Path(__file__).resolve().parents[2]
WARM, STEPS = 6, 12
PATIENCE = 900  # seconds after which a process is taken to hang, also on a machine that has other work

CONFIG = f"""
from experiments import config

def get_config():
    c = config.get_config()
    c.task.train_prompts, c.task.eval_prompts, c.task.max_prompt_tokens = 10, 4, 8
    c.task.max_steps, c.task.median_steps = 5, 2.0
    m = c.model
    m.num_layers, m.hidden_size, m.intermediate_size = 1, 16, 32
    m.num_heads, m.num_kv_heads, m.head_dim, m.max_positions = 2, 1, 8, 64
    c.train.steps, c.train.prompts_per_step, c.train.group_size, c.train.max_new_tokens = {STEPS}, 2, 2, 28
    c.rollout.strategies, c.rollout.max_batch, c.rollout.batch_buckets = ("off", "ngram-d2"), 4, (4,)
    c.rollout.rounds_per_launch = 4
    c.bandit.name, c.bandit.arm = "fixed", "ngram-d2"
    c.learner.learning_rate, c.learner.row_length, c.learner.row_multiple = 1e-3, 64, 4
    c.learner.schedule, c.learner.warmup_steps = "cosine", 3
    c.warm_start.steps, c.warm_start.batch_size, c.warm_start.examples = {WARM}, 4, 16
    c.checkpoint.every, c.checkpoint.keep = 2, 2
    c.evaluation.every = 5
    c.log.compare_repeats, c.log.tensorboard, c.log.report = 0, False, False
    c.runtime.compilation_cache = "CACHE"
    return c
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A function that starts the training program on a workdir; compiled programs are shared by all processes."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "tiny.py").write_text(CONFIG.replace("CACHE", str(folder / "cache")))
    env = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    env.pop("XLA_FLAGS", None)

    def start(workdir: Path, *flags: str, devices: int = 1) -> subprocess.Popen:
        here = env | {"JAX_NUM_CPU_DEVICES": str(devices)}
        command = [sys.executable, "-m", "experiments.train", f"--config={folder / 'tiny.py'}", f"--workdir={workdir}", *flags]
        return subprocess.Popen(command, env=here, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    return output


def wait_for(process: subprocess.Popen, condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, f"ended before {what}:\n{process.stdout.read()}"
        assert time.monotonic() < deadline, f"no {what} in time"
        time.sleep(0.0005)


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def lines(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def final_state(workdir: Path) -> dict[str, np.ndarray]:
    """Every saved array of the last checkpoint, by name, read without any of our types; but not the bandit's, who counts
    only launches that needed no compiling, and a restarted process compiles again."""
    step = Checkpointer(workdir / "checkpoints").latest()
    assert step == WARM + STEPS
    manager = ocp.CheckpointManager(workdir / "checkpoints", item_names=("state", "host"))
    state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    manager.close()
    return {name: np.asarray(x) for name, x in named_arrays(state).items() if not name.startswith("bandit/")}


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys() and "learner/params/embedding" in a and "cursor/order" in a
    different = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    assert not different


def history(workdir: Path) -> list[tuple]:
    """What was learnt, in order; times and rates left out."""
    rows = read_lines(workdir / "metrics.jsonl")
    keys = ("phase", "step", "loss", "loss/pg", "reward/mean", "fingerprint", "mismatch/k3", "len/mean")
    return [tuple(row.get(k) for k in keys) for row in rows]


@pytest.fixture(scope="module")
def unbroken(program, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken")
    finish(program(workdir))
    return workdir


def test_five_kills_one_of_them_within_a_save_change_nothing(program, unbroken, tmp_path):
    rng = random.Random(0)
    kills = 0
    for at in (2, 5, 9, 13):  # rows of metrics.jsonl: within the warm start, at its end, and twice in the main loop
        process = program(tmp_path)
        wait_for(process, lambda at=at: lines(tmp_path) >= at, f"row {at}")
        time.sleep(rng.random() * 0.05)
        kill(process)
        kills += 1
    process = program(tmp_path)
    saved = tmp_path / "checkpoints"
    before = {p.name for p in saved.iterdir()}
    wait_for(process, lambda: any(p.name not in before and "tmp" in p.name for p in saved.iterdir()), "save")
    kill(process)
    kills += 1
    assert kills == 5
    output = finish(program(tmp_path))
    assert "going on from" in output
    assert history(tmp_path) == history(unbroken)
    assert_same_bits(final_state(tmp_path), final_state(unbroken))
    samples = [(s["phase"], s["step"], s["prompt_id"], s["visit"], s["sample"]) for s in read_lines(tmp_path / "samples.jsonl")]
    assert len(samples) == len(set(samples))
    assert [row["step"] for row in read_lines(tmp_path / "arms.jsonl")] == list(range(1, STEPS + 1))


def test_sigterm_saves_exits_zero_and_a_finished_run_says_so(program, unbroken, tmp_path):
    process = program(tmp_path, "--config.checkpoint.every=1000")
    wait_for(process, lambda: lines(tmp_path) >= WARM + 4, "a few steps")
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert "stopped on request at step" in output
    assert Checkpointer(tmp_path / "checkpoints").latest() > WARM
    assert "going on from step" in finish(program(tmp_path, "--config.checkpoint.every=1000"))
    assert_same_bits(final_state(tmp_path), final_state(unbroken))
    assert history(tmp_path) == history(unbroken)
    assert f"finished at step {STEPS}" in finish(program(tmp_path))


def test_the_recorded_arms_of_a_bandit_replayed_give_the_same_bits(program, tmp_path):
    recorded, replayed = tmp_path / "a", tmp_path / "b"
    finish(program(recorded, "--config.bandit.name=beg"))
    trace = recorded / "arms.jsonl"
    assert len({arm for row in read_lines(trace) for arm in row["arms"]}) == 2
    flags = ("--config.bandit.name=beg", f"--config.rollout.replay_arms={trace}")
    process = program(replayed, *flags)
    wait_for(process, lambda: lines(replayed) >= WARM + 5, "a few steps")
    kill(process)
    finish(program(replayed, *flags))
    assert_same_bits(final_state(replayed), final_state(recorded))
    assert [r["arms"] for r in read_lines(replayed / "arms.jsonl")] == [r["arms"] for r in read_lines(trace)]
    summary = json.loads((replayed / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["rollout_speedup"] is None


def drawn(workdir: Path) -> list[tuple]:
    """Which responses were learnt from, in order."""
    samples = read_lines(workdir / "samples.jsonl")
    return [(s["step"], s["prompt_id"], s["visit"], s["sample"]) for s in samples if s["phase"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overlap", "in_flight"])
def test_overlapped_runs_killed_and_terminated_learn_from_every_prompt_once(program, unbroken, tmp_path, mode):
    steps = 2 * STEPS  # long enough that it is still going on when it is terminated
    flags = (f"--config.runtime.mode={mode}", "--config.runtime.max_staleness=2", f"--config.train.steps={steps}")
    rng = random.Random(mode)
    for at in (WARM + 2, WARM + 6):
        process = program(tmp_path, *flags, devices=2)
        wait_for(process, lambda at=at: lines(tmp_path) >= at, f"row {at}")
        time.sleep(rng.random() * 0.1)
        kill(process)
    process = program(tmp_path, *flags, devices=2)
    wait_for(process, lambda: lines(tmp_path) >= WARM + 10, "more rows")
    process.send_signal(signal.SIGTERM)
    assert "stopped on request at step" in finish(process)
    assert "going on from step" in finish(program(tmp_path, *flags, devices=2))
    found = drawn(tmp_path)
    assert found[: len(drawn(unbroken))] == drawn(unbroken)
    # Ten prompts, two a step, two samples each: every epoch of five steps has each of them once.
    assert len(found) == len(set(found)) == steps * 4
    for epoch in range(steps // 5):
        part = {(prompt, visit) for step, prompt, visit, _ in found if (step - 1) // 5 == epoch}
        assert len(part) == 10 and {visit for _, visit in part} == {epoch}
    rows = [r for r in read_lines(tmp_path / "metrics.jsonl") if r["phase"] == "train"]
    assert [r["step"] for r in rows] == list(range(1, steps + 1)) and max(r["staleness/max"] for r in rows) <= 2


@pytest.mark.slow
def test_a_lagged_run_killed_anywhere_ends_in_the_same_bits(program, tmp_path):
    flags = ("--config.runtime.mode=lagged", "--config.runtime.lag=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(program(whole, *flags))
    for at in (WARM + 3, WARM + 9):
        process = program(broken, *flags)
        wait_for(process, lambda at=at: lines(broken) >= at, f"row {at}")
        kill(process)
    finish(program(broken, *flags))
    assert_same_bits(final_state(broken), final_state(whole))
    assert history(broken) == history(whole)
