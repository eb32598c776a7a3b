"""What a run writes down: JSON lines, TensorBoard scalars, and seconds with compilation taken out.

Steps are optimizer-independent: one step is one rollout batch learnt from. A line of `metrics.jsonl` has `phase`
(`warm_start`, `train`, `evaluate`), `step`, and numbers; no pair (phase, step) occurs twice, also after a resume,
because each checkpoint remembers how long the files were and a resumed run cuts them back.
"""

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

log = logging.getLogger("adrl_jax")


class JsonLines:
    """An append-only file of one JSON object a line.

    Args:
        path: made with its folder when it does not exist.
        length: bytes to keep of what stands there; None keeps all. The rest is from steps that will be run again.
    """

    def __init__(self, path: Path, length: int | None = None):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        if length is not None:
            have = self._file.seek(0, os.SEEK_END)
            if have < length:
                log.warning("%s is shorter than when the checkpoint was written (%d < %d bytes)", path, have, length)
            else:
                self._file.truncate(length)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line; numbers that JSON does not know (NaN, infinities) become null."""
        text = json.dumps(plain(record), allow_nan=False, ensure_ascii=False)
        self._file.write(text.encode() + b"\n")
        self._file.flush()

    def length(self) -> int:
        """Bytes written so far."""
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a JSON-lines file; empty where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def plain(value: Any) -> Any:
    """`value` in JSON's types; array scalars become numbers, non-finite floats None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (np.ndarray, jax.Array)):
        return plain(np.asarray(value).tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class MetricLog:
    """`metrics.jsonl` and, where asked for, TensorBoard (each phase a run of its own, since each counts its own steps).

    Args:
        path: of `metrics.jsonl`.
        tensorboard: folder of the event files, or None.
        length: as in `JsonLines`.
        next_steps: by phase the first step that this process will write; events that a killed process wrote at or past it
            are hidden.
    """

    def __init__(
        self,
        path: Path,
        tensorboard: Path | None = None,
        *,
        length: int | None = None,
        next_steps: Mapping[str, int] | None = None,
    ):
        self.lines = JsonLines(path, length)
        self._tensorboard, self._next_steps = tensorboard, dict(next_steps or {})
        self._writers: dict[str, SummaryWriter] = {}

    def write(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        """One line; finite numbers also go to TensorBoard."""
        values = plain(values)
        self.lines.append({"phase": phase, "step": step, **values})
        if self._tensorboard is None:
            return
        if phase not in self._writers:
            folder = str(self._tensorboard / phase)
            self._writers[phase] = SummaryWriter(folder, purge_step=self._next_steps.get(phase, 0))
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writers[phase].add_scalar(name, value, step)
        self._writers[phase].flush()

    def close(self) -> None:
        self.lines.close()
        for writer in self._writers.values():
            writer.close()


class CompileClock:
    """Seconds that JAX has spent tracing, lowering and compiling in the thread that made the clock, since it was made."""

    _EVENTS = (
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        "/jax/core/compile/backend_compile_duration",
    )

    def __init__(self):
        self.programs = 0
        self.seconds = 0.0
        self._open: list[tuple[float, float]] = []
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event not in self._EVENTS or threading.get_ident() != self._thread:
            return
        self.programs += event == self._EVENTS[-1]
        now = time.perf_counter()
        begin = now - duration
        # A function traced inside another reports first; its seconds are part of the outer report.
        while self._open and self._open[-1][0] >= begin:
            inner = self._open.pop()
            self.seconds -= inner[1] - inner[0]
        self._open.append((begin, now))
        self.seconds += duration


class Stopwatch:
    """Splits the time of a step into named phases.

    A phase is wall seconds less what was compiled within it; compilation is a phase of its own, `compile`. The caller
    waits for the results of a phase before it ends.
    """

    def __init__(self, clock: CompileClock):
        self._clock = clock
        self._began = time.perf_counter(), clock.seconds, clock.programs
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, compiled = time.perf_counter(), self._clock.seconds
        yield
        spent = time.perf_counter() - start - (self._clock.seconds - compiled)
        self.seconds[name] = self.seconds.get(name, 0.0) + max(spent, 0.0)

    def metrics(self) -> dict[str, float]:
        """`time/<phase>` for each phase, `time/compile`, `time/step` (wall, all of it) and `compile/programs`."""
        start, compiled, programs = self._began
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        times["time/compile"] = self._clock.seconds - compiled
        times["time/step"] = time.perf_counter() - start
        times["compile/programs"] = self._clock.programs - programs
        return times
