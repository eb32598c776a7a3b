"""A run's folder: its checkpoints, its logs, and the facts that outlive a process."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from adrl_jax import checkpoint
from adrl_jax.metrics import JsonLines, MetricLog
from adrl_jax.runtime import cursor, publish, remembered, work
from adrl_jax.runtime.batches import Saved
from adrl_jax.runtime.parts import LoopConfig, Parts, RunState

log = logging.getLogger("adrl_jax")

FILES = ("metrics", "samples", "arms")


class Folder:
    """Saves and finds again what a run is.

    Attributes:
        facts: numbers that are summed up over processes, as JSON.
        drafter: what the drafter's trainer remembered when the checkpoint was made, see `remembered`; empty on a fresh run.
        metrics, samples, arms: the logs, after `open_logs`.
    """

    def __init__(self, parts: Parts, config: LoopConfig, path: Path):
        self.parts, self.config, self.path = parts, config, path
        self.checkpointer = checkpoint.Checkpointer(path / "checkpoints", keep=config.checkpoints_kept)
        self.facts: dict[str, Any] = {"seconds": 0.0, "evaluations": {}, "accept_passes": 0, "accept_tokens": 0}
        self.drafter: dict[str, np.ndarray] = {}
        self.metrics: MetricLog | None = None
        self.samples: JsonLines | None = None
        self.arms: JsonLines | None = None
        self._host: dict[str, Any] | None = None

    def finished(self) -> dict[str, Any] | None:
        """The summary of a run that has nothing left to do.

        Raises:
            CheckpointMismatch: the folder belongs to another run.
        """
        saved = self.checkpointer.latest()
        if saved is None:
            return None
        self._host = self.checkpointer.host(saved)
        checkpoint.check_identity(self._host["identity"], self.parts.identity, f"checkpoint {saved} in {self.path}")
        file = self.path / "summary.json"
        summary = json.loads(file.read_text()) if file.exists() else None
        return summary if summary is not None and summary["steps"] >= self.config.steps else None

    def begin(self) -> tuple[RunState, Saved]:
        """The state to go on from, and the work that was under way; `finished` was called before.

        Raises:
            CheckpointMismatch: the checkpoint is damaged, or of another model, task, seed or controller.
        """
        c, parts, host = self.config, self.parts, self._host
        state = RunState(
            parts.init_learner(), parts.bandit.init(), cursor.init(c.seed, len(parts.train_prompts)), np.int32(0), np.int32(0)
        )
        if parts.history is not None:
            state = state._replace(history=parts.history.state_dict())
        if host is None:
            return state, Saved(state.bandit)
        saved = self.checkpointer.latest()
        state = self.checkpointer.restore(saved, state, renew=self._renewed(saved, host))
        if parts.history is not None:
            parts.history.load_state_dict(state.history)
        found = publish.fingerprint(state.learner.params)
        if found != host["fingerprint"]:
            raise checkpoint.CheckpointMismatch(
                f"checkpoint {saved} in {self.path} is damaged: fingerprint {found}, saved as {host['fingerprint']}"
            )
        self.facts = host["facts"]
        under_way = host.get("work", {})
        arrays = self.checkpointer.work(saved)
        finished = work.from_arrays(arrays) if under_way.get("groups") else {}
        self.drafter = {name: x for name, x in arrays.items() if name.startswith(remembered.PREFIX)}
        begun = {int(step): int(version) for step, version in under_way.get("begun", {}).items()}
        return state, Saved(state.bandit, finished, work.launches_from_json(under_way.get("launches", {})), begun)

    def _renewed(self, saved: int, host: dict[str, Any]) -> tuple[str, ...]:
        """What of the checkpoint is left behind: a controller of other arms, where that was asked for."""
        now, before = self.parts.controller, host["controller"]
        if now == before:
            return ()
        facts = f"checkpoint {saved} in {self.path} has the controller {before!r}; this run's is {now!r}"
        if not self.config.reset_bandit:
            raise checkpoint.CheckpointMismatch(
                f"{facts}. Set bandit.reset=True to start the controller afresh, or keep the arms it was made with"
            )
        log.warning("%s, which starts afresh", facts)
        return ("bandit",)

    def open_logs(self, state: RunState) -> None:
        """Opens the logs as long as they were when `state` was saved."""
        host = self._host
        lengths = dict.fromkeys(FILES, 0) if host is None else host["log_lengths"]
        if host is None:
            # A fresh run keeps nothing of what an earlier one left before its first checkpoint.
            (self.path / "summary.json").unlink(missing_ok=True)
        board = self.path / "tensorboard" if self.config.tensorboard else None
        file = {name: self.path / f"{name}.jsonl" for name in FILES}
        step = int(state.step)
        evaluated = str(step) in self.facts["evaluations"]
        next_steps = {"warm_start": int(state.warm_step) + 1, "train": step + 1, "evaluate": step + evaluated}
        self.metrics = MetricLog(file["metrics"], board, length=lengths["metrics"], next_steps=next_steps)
        self.samples = JsonLines(file["samples"], lengths["samples"])
        self.arms = JsonLines(file["arms"], lengths["arms"])

    def save(self, state: RunState, under_way: Saved, started: float) -> None:
        """Starts saving; `started` is when the run began, in seconds of the monotonic clock."""
        self.facts["seconds"] = time.monotonic() - started
        history = self.parts.history
        self.checkpointer.save(
            state.clock,
            state._replace(bandit=under_way.bandit, history=None if history is None else history.state_dict()),
            {
                "identity": dict(self.parts.identity),
                "controller": self.parts.controller,
                "fingerprint": publish.fingerprint(state.learner.params),
                "facts": self.facts,
                "log_lengths": {
                    "metrics": self.metrics.lines.length(),
                    "samples": self.samples.length(),
                    "arms": self.arms.length(),
                },
                "work": {
                    "groups": len(under_way.finished),
                    "launches": work.launches_to_json(under_way.launches),
                    "begun": {str(step): version for step, version in under_way.begun.items()},
                },
            },
            work.to_arrays(under_way.finished) | self.parts.adapting.arrays(),
        )

    def close(self) -> None:
        try:
            self.checkpointer.close()
        finally:
            for file in (self.metrics, self.samples, self.arms):
                if file is not None:
                    file.close()


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is either whole or not there."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)
