"""The loop in one process: what it writes, how rewards may go wrong, how it ends."""

import contextlib
import dataclasses
import json
import signal

import numpy as np
import pytest
from loop_world import by_length, settings

from adrl_jax import report
from adrl_jax.checkpoint import Checkpointer, CheckpointMismatch
from adrl_jax.metrics import read_lines
from adrl_jax.runtime import collect, loop, stop
from adrl_jax.types import Score
from experiments import build, evaluate, resolve


@pytest.fixture(scope="module")
def world():
    """Settings and parts, built once: what compiles in one test serves the others."""
    c = settings()
    with contextlib.ExitStack() as stack:
        yield c, stack.enter_context(build.opened(c))


def run(world, workdir, *, stopper=None, loop_changes=(), **changes):
    c, parts = world
    limits = dataclasses.replace(resolve.loop_config(c), **dict(loop_changes))
    return loop.run(dataclasses.replace(parts, **changes), limits, workdir, stopper)


def test_a_whole_run_writes_what_it_promises(world, tmp_path):
    outcome = run(world, tmp_path, scorer=by_length)
    assert outcome.status == "done"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {"reward_start", "reward_end", "rollout_speedup", "accept_length", "identical_tokens", "seconds"} <= summary.keys()
    assert summary["identical_tokens"] is True and summary["rollout_speedup"] > 0 and summary["steps"] == 3
    rows = read_lines(tmp_path / "metrics.jsonl")
    order = [(r["phase"], r["step"]) for r in rows]
    assert order == [("warm_start", 1), ("warm_start", 2), ("evaluate", 0), *(("train", k) for k in (1, 2, 3)), ("evaluate", 3)]
    train = [r for r in rows if r["phase"] == "train"]
    names = "reward/mean loss/pg entropy ratio/mean clip_frac mismatch/k1 mismatch/k3 mismatch/max_abs_delta mismatch/ess"
    names += " staleness/mean staleness/max len/mean frac_truncated frac_zero_adv_groups spec/accept_len bandit/arm/off"
    names += " drafter/loss rollout/tokens_per_s grad_norm update/skipped fingerprint drafter/fingerprint version"
    names += " time/rollout time/reward time/pack time/update time/sync time/compile time/step"
    for row in train:
        assert not set(names.split()) - row.keys()
        assert row["mismatch/max_abs_delta"] < 1e-4 and row["staleness/max"] == 0
    assert [r["version"] for r in train] == [2, 4, 6]  # two optimizer steps a batch
    assert len({r["fingerprint"] for r in train}) == len({r["drafter/fingerprint"] for r in train}) == 3
    samples = read_lines(tmp_path / "samples.jsonl")
    fields = "prompt response reference extracted reward reason reward_parts advantage version accept_length"
    assert all(not set(fields.split()) - s.keys() for s in samples)
    assert {s["version"] for s in samples if s["phase"] == "train"} == {0, 2, 4}
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 4 and "http" not in page.replace("http://www.w3.org/", "")
    assert "reward after" in report.closing_text(summary)


def test_evaluating_the_checkpoint_repeats_the_last_evaluation(world, tmp_path):
    few = {"compare_repeats": 0, "report": False}
    run(world, tmp_path, scorer=by_length, loop_changes=few)
    last = read_lines(tmp_path / "metrics.jsonl")[-1]
    parts = dataclasses.replace(world[1], scorer=by_length)
    row, scored = evaluate.of_checkpoint(parts, resolve.loop_config(world[0]), tmp_path)
    assert (last["phase"], last["step"]) == ("evaluate", 3) and len(scored.rollouts) == 4
    for name in ("reward/mean", "len/mean", "fingerprint", "version"):
        assert row[name] == last[name]
    with pytest.raises(ValueError, match="no complete checkpoint"):
        evaluate.of_checkpoint(parts, resolve.loop_config(world[0]), tmp_path / "elsewhere")


def test_a_finished_run_says_so_and_goes_on_when_asked_for_more(world, tmp_path):
    few = {"compare_repeats": 0, "report": False}
    assert run(world, tmp_path, loop_changes=few).status == "done"
    assert run(world, tmp_path, loop_changes=few).status == "already_done"
    more = run(world, tmp_path, loop_changes=few | {"steps": 4})
    assert more.status == "done" and more.summary["steps"] == 4
    steps = [r["step"] for r in read_lines(tmp_path / "metrics.jsonl") if r["phase"] == "train"]
    assert steps == [1, 2, 3, 4]


def test_asked_to_stop_within_a_rollout_it_saves_the_step_before(world, tmp_path):
    stopper = stop.Stop()
    scorer = world[1].scorer
    calls = []

    def counting(items):
        calls.append(len(items))
        if len(calls) == 3:  # the first evaluation, then the second training step
            stopper.request()
        return scorer(items)

    few = {"compare_repeats": 0, "report": False}
    assert run(world, tmp_path, stopper=stopper, scorer=counting, loop_changes=few).status == "stopped"
    assert Checkpointer(tmp_path / "checkpoints").latest() == 2 + 1
    outcome = run(world, tmp_path, loop_changes=few)
    assert outcome.status == "done"
    steps = [r["step"] for r in read_lines(tmp_path / "metrics.jsonl") if r["phase"] == "train"]
    assert steps == [1, 2, 3]


def test_all_rewards_equal_is_logged_and_harmless(world, tmp_path):
    def constant(items):
        return [Score(0.1, "x", "match", {"format": 0.1}) for _ in items]

    run(world, tmp_path, scorer=constant, loop_changes={"compare_repeats": 0, "report": False})
    for row in read_lines(tmp_path / "metrics.jsonl"):
        if row["phase"] == "train":
            assert row["frac_zero_adv_groups"] == 1.0 and row["loss/pg"] == 0 and row["grad_norm"] == 0
            assert row["reward/std"] == pytest.approx(0, abs=1e-12) and row["reward/format"] == pytest.approx(0.1)
            assert row["update/skipped"] == 0


def test_a_reward_that_is_no_number_costs_one_response_and_not_the_run(world, tmp_path):
    def one_in_four(items):
        return [Score(float("nan") if i % 4 == 1 else i % 3, None, "mismatch") for i in range(len(items))]

    assert run(world, tmp_path / "goes_on", scorer=one_in_four).status == "done"
    rows = [r for r in read_lines(tmp_path / "goes_on" / "metrics.jsonl") if r["phase"] == "train"]
    assert all(r["reward/nonfinite"] == r["reward/dropped"] == 0.25 for r in rows)
    assert all(np.isfinite(r["loss/pg"]) and np.isfinite(r["reward/mean"]) for r in rows)

    def none(items):
        return [Score(float("inf"), None, "mismatch") for _ in items]

    with pytest.raises(collect.RewardError, match=r"no reward of \d+ is a finite number; the first, of prompt \d+, is inf"):
        run(world, tmp_path / "ends", scorer=none)


def test_a_scorer_that_raises_ends_the_run_with_its_own_error(world, tmp_path):
    def broken(items):
        raise ZeroDivisionError("in the user's reward function")

    with pytest.raises(ZeroDivisionError, match="in the user's reward function"):
        run(world, tmp_path, scorer=broken)

    def reported(items):
        return [Score(0.0, None, "error", detail="KeyError: 'answer'") for _ in items]

    with pytest.raises(collect.RewardError, match="failed: KeyError: 'answer'"):
        run(world, tmp_path, scorer=reported)


def test_time_outs_and_unreadable_references_are_counted(world, tmp_path):
    def odd(items):
        reasons = ("timeout", "unparsed_reference", "match", "unparsed_response")
        return [Score(float(i % 4 == 2), None, reasons[i % 4]) for i in range(len(items))]

    run(world, tmp_path, scorer=odd, loop_changes={"compare_repeats": 0, "report": False, "samples_per_step": 99})
    row = next(r for r in read_lines(tmp_path / "metrics.jsonl") if r["phase"] == "train")
    assert row["score/timeout"] == row["score/unparsed_reference"] == row["score/match"] == 0.25
    for s in read_lines(tmp_path / "samples.jsonl"):
        if s["reason"] == "unparsed_reference":
            assert s["advantage"] == 0


def test_a_checkpoint_of_another_model_or_seed_is_refused(world, tmp_path):
    few = {"compare_repeats": 0, "report": False, "steps": 0}
    run(world, tmp_path, loop_changes=few)
    other = dict(world[1].identity) | {"model.hidden_size": 999}
    with pytest.raises(CheckpointMismatch, match=r"model.hidden_size: checkpoint 16, this run 999"):
        run(world, tmp_path, identity=other, loop_changes=few)


def test_signals_become_requests_and_handlers_come_back():
    stopper, before = stop.Stop(), signal.getsignal(signal.SIGTERM)
    with stop.on_signals(stopper):
        stopper.check()
        signal.raise_signal(signal.SIGTERM)
        assert stopper.requested and signal.getsignal(signal.SIGTERM) == before
        with pytest.raises(stop.StopRequested):
            stopper.check()
    assert signal.getsignal(signal.SIGTERM) == before
