"""Traces hold what the stats hold."""

import itertools
import json

import pytest

from adrl_jax import trace
from adrl_jax.rollout.stats import Event, LaunchRecord, RolloutStats


def stats():
    launches = (
        LaunchRecord(0, 4, 4, 64, 2, 8, 0.5, 0.2, False, 0, 0),
        LaunchRecord(1, 1, 1, 64, 2, 5, 0.2, 0.8, False, 2, 5),
    )
    events = (
        Event("prefill", 0.0, 0.15, {"prompts": 2, "tokens": 32}),
        Event("plain", 0.2, 0.5, {"arm": "off", "running": 4, "rows": 4}),
        Event("catch_up", 0.8, 0.05, {"drafter": "eagle", "tokens": 9}),
        Event("speculate", 0.85, 0.15, {"arm": "eagle-d2", "running": 1, "rows": 1}),
    )
    return RolloutStats(launches, 1.0, 0.0, 0.15, 0.85, 4, events)


def test_every_event_lies_in_its_lane_and_nothing_overlaps(tmp_path):
    trace.write(tmp_path / "trace.json", [stats(), stats()])
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = sorted((e for e in found if e["ph"] == "X"), key=lambda e: e["ts"])
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    work = [e for e in spans if names[e["tid"]] != "host gap"]
    assert [names[e["tid"]] for e in work[:4]] == ["prefill", "plain", "draft catch-up", "draft + verify"]
    assert [e["name"] for e in work[:4]] == ["prefill", "off", "draft catch-up", "eagle-d2"]
    assert work[4]["ts"] == pytest.approx(1e6) and len(work) == 8
    for a, b in itertools.pairwise(spans):
        assert b["ts"] >= a["ts"] + a["dur"] - 1
    gaps = [e for e in spans if names[e["tid"]] == "host gap"]
    assert sum(e["dur"] for e in gaps) == pytest.approx(2 * 0.15e6)


def test_running_requests_are_a_counter_that_ends_at_zero():
    counters = [e for e in trace.events(stats()) if e["ph"] == "C"]
    assert [e["args"]["requests"] for e in counters] == [4, 1, 0]
    assert [e["ts"] for e in counters] == pytest.approx([0.2e6, 0.8e6, 1e6])


def test_a_rollout_without_launches_is_an_empty_trace():
    empty = RolloutStats((), 0.0, 0.0, 0.0, 0.0, 0)
    assert all(e["ph"] == "M" for e in trace.events(empty))
