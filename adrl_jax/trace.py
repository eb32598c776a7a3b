"""Rollouts as traces for Perfetto (https://ui.perfetto.dev) and chrome://tracing: what the device did when, and for how many.

The format is the Trace Event JSON: one process a device, one lane a kind of work, durations in microseconds. A speculative
launch drafts and verifies inside one program, so that is one lane; its facts tell the strategy.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from adrl_jax.rollout.stats import Event, RolloutStats

LANES = ("prefill", "admit", "plain", "speculate", "catch_up", "references", "reshape", "host_gap")
_NAMES = {
    "admit": "admit (cache to rows)",
    "speculate": "draft + verify",
    "catch_up": "draft catch-up",
    "references": "history to rows",
    "reshape": "compaction and growth",
    "host_gap": "host gap",
}
_LEAST_GAP = 20e-6  # seconds; shorter ones are the clock's


def events(stats: RolloutStats, device: str = "device 0", process: int = 0, offset: float = 0.0) -> list[dict]:
    """Trace events of one rollout.

    Args:
        device: name of the process shown.
        process: its number; give each device its own.
        offset: seconds added to all times, to put rollouts one after the other.
    """
    out: list[dict] = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": device}}]
    for lane, kind in enumerate(LANES):
        name = {"name": _NAMES.get(kind, kind)}
        out.append({"ph": "M", "pid": process, "tid": lane, "name": "thread_name", "args": name})
        out.append({"ph": "M", "pid": process, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}})
    for e in (*stats.events, *_gaps(stats.events)):
        out.append(
            {
                "ph": "X",
                "pid": process,
                "tid": LANES.index(e.kind),
                "name": str(e.facts.get("arm", _NAMES.get(e.kind, e.kind))),
                "ts": 1e6 * (e.start + offset),
                "dur": 1e6 * e.seconds,
                "args": e.facts,
            }
        )
    counts = [*stats.running_over_time, (stats.launches[-1].start + stats.launches[-1].seconds, 0)] if stats.launches else []
    for start, running in counts:
        args = {"requests": running}
        out.append({"ph": "C", "pid": process, "name": "running requests", "ts": 1e6 * (start + offset), "args": args})
    return out


def write(path: str | Path, rollouts: Sequence[RolloutStats], device: str = "device 0") -> None:
    """Writes rollouts, one after the other, as one `trace.json`."""
    found: list[dict] = []
    offset = 0.0
    for stats in rollouts:
        found += events(stats, device, 0, offset)
        offset += stats.seconds
    Path(path).write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}))


def _gaps(found: Sequence[Event]) -> list[Event]:
    """The stretches between events; a compilation counts as one."""
    return [
        Event("host_gap", a.start + a.seconds, gap, {})
        for a, b in itertools.pairwise(found)
        if (gap := b.start - a.start - a.seconds) > _LEAST_GAP
    ]
