"""Runs that look things up and choose: what is saved of both, and what is refused on the way back."""

import contextlib
import dataclasses
import logging

import numpy as np
import pytest
from loop_world import by_length, settings

from adrl_jax.checkpoint import Checkpointer, CheckpointMismatch, named_arrays
from adrl_jax.metrics import read_lines
from adrl_jax.runtime import loop
from adrl_jax.runtime.lengths import LengthHistory
from adrl_jax.types import FinishReason, Prompt, Request, Rollout, SamplingParams
from experiments import build, resolve

ARMS = ("off", "history-d3", "merged-d2")


def lookup_settings(**changes):
    names = {
        "rollout.strategies": ARMS,
        "bandit.thresholds": (),
        "task.train_prompts": 4,
        "train.steps": 4,
        "warm_start.steps": 0,
        "checkpoint.every": 1,
        "drafter.history_reference": 64,
        "drafter.history_tokens": 4096,
        "sampling.reuse_noise_across_epochs": True,
        "rollout.admission": "longest_first",
        "log.compare_repeats": 0,
        "log.report": False,
    }
    return settings(**(names | changes))


def run(c, workdir, **changes):
    with contextlib.ExitStack() as stack:
        parts = stack.enter_context(build.opened(c))
        limits = dataclasses.replace(resolve.loop_config(c), **changes)
        outcome = loop.run(dataclasses.replace(parts, scorer=by_length), limits, workdir)
        return outcome, parts


def arrays(workdir, step):
    import orbax.checkpoint as ocp

    saver = Checkpointer(workdir / "checkpoints")
    state = saver._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    saver.close()
    return {name: np.asarray(x) for name, x in named_arrays(state).items()}


def test_a_run_with_history_resumes_to_the_same_weights_and_the_same_memory(tmp_path):
    c = lookup_settings(**{"bandit.name": "fixed", "bandit.arm": "history-d3"})
    run(c, tmp_path / "whole")
    run(c, tmp_path / "parts", steps=2)
    outcome, parts = run(c, tmp_path / "parts")
    assert outcome.status == "done"
    whole, resumed = arrays(tmp_path / "whole", 4), arrays(tmp_path / "parts", 4)
    assert whole.keys() == resumed.keys() and int(whole["history/count"]) == len(parts.history) == 16
    for name, x in whole.items():
        np.testing.assert_array_equal(x, resumed[name], err_msg=name)
    # The second visit of a prompt has the noise of the first, says so, and finds its earlier response.
    rows = [r for r in read_lines(tmp_path / "whole" / "samples.jsonl") if r["phase"] == "train"]
    assert {(r["visit"] > 0, r["noise_reused"]) for r in rows} == {(False, False), (True, True)}
    evaluated = [r for r in read_lines(tmp_path / "whole" / "samples.jsonl") if r["phase"] == "evaluate"]
    assert evaluated and not any(r["noise_reused"] for r in evaluated)
    steps = {r["step"]: r for r in read_lines(tmp_path / "whole" / "metrics.jsonl") if r["phase"] == "train"}
    assert steps[3]["spec/accept_len"] > steps[1]["spec/accept_len"] + 0.5


def test_a_controller_of_other_arms_is_refused_or_on_request_replaced(tmp_path, caplog):
    run(lookup_settings(**{"train.steps": 1, "bandit.name": "goodput"}), tmp_path)
    other = {"train.steps": 2, "bandit.name": "goodput", "rollout.strategies": ("off", "history-d2", "merged-d2")}
    with pytest.raises(CheckpointMismatch, match=r"history-d3.*history-d2.*bandit.reset=True"):
        run(lookup_settings(**other), tmp_path)
    with caplog.at_level(logging.WARNING, "adrl_jax"):
        outcome, _ = run(lookup_settings(**other, **{"bandit.reset": True}), tmp_path)
    assert outcome.status == "done" and "starts afresh" in caplog.text


def test_every_controller_finishes_a_run(tmp_path):
    for name in ("beg", "beg_static", "ucb", "thompson", "exp3"):
        c = lookup_settings(**{"train.steps": 1, "bandit.name": name, "rollout.strategies": ("off", "history-d3")})
        assert run(c, tmp_path / name)[0].status == "done"


def test_lengths_are_learnt_by_prompt():
    def rollout(prompt, n):
        tokens = np.arange(n + 1)
        versions = np.zeros(n, int)
        return Rollout(prompt, 0, 0, 0, tokens, 1, n, np.zeros(n), versions, FinishReason.STOP, SamplingParams())

    history = LengthHistory()
    requests = [Request(Prompt(p, [1]), 0, 0, 0, 50) for p in (1, 2)]
    assert history.expected(requests) == [50, 50]
    history.learn([rollout(1, 10), rollout(1, 20)])
    assert history.expected(requests) == [15, 50]
