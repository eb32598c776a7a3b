"""The record of every launch of every training rollout, and its replay.

`arms.jsonl` has one line a step. The bandit looks at the clock, so two runs differ in their arms and with them in the last
bits of the behaviour log-probs; a run that repeats a recorded trace is equal to the recorded one bit for bit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adrl_jax.metrics import read_lines
from adrl_jax.speculation.strategy import Strategy


def record(step: int, launches: Sequence[Any], strategies: Sequence[Strategy], lengths: Sequence[int] = ()) -> dict[str, Any]:
    """One line: per launch the arm, running requests, tokens, passes, start and length in s; response lengths in tokens."""
    return {
        "step": step,
        "arms": [strategies[x.arm].name for x in launches],
        "running": [x.running for x in launches],
        "rounds": [x.rounds for x in launches],
        "tokens": [x.tokens for x in launches],
        "start": [round(x.start, 6) for x in launches],
        "seconds": [round(x.seconds, 6) for x in launches],
        "compiled": [x.compiled for x in launches],
        "accept_passes": [x.accept_passes for x in launches],
        "accept_tokens": [x.accept_tokens for x in launches],
        "lengths": [int(n) for n in lengths],
    }


def load(path: Path, strategies: Sequence[Strategy], steps: Sequence[int]) -> dict[int, list[int]]:
    """The arms of each of `steps`, as indices into `strategies`.

    Raises:
        ValueError: a step is missing in the trace, or an arm in it is not among `strategies`.
    """
    index = {s.name: i for i, s in enumerate(strategies)}
    trace = {line["step"]: line["arms"] for line in read_lines(path)}
    missing = [s for s in steps if s not in trace]
    if missing:
        raise ValueError(f"rollout.replay_arms={str(path)!r} has no step {missing[0]}; it covers {_span(trace)}")
    unknown = sorted({arm for s in steps for arm in trace[s]} - index.keys())
    if unknown:
        raise ValueError(f"rollout.replay_arms={str(path)!r} uses the arm {unknown[0]!r}; this run has {', '.join(index)}")
    return {s: [index[arm] for arm in trace[s]] for s in steps}


def _span(trace: dict[int, Any]) -> str:
    return f"steps {min(trace)} to {max(trace)}" if trace else "no step at all"
