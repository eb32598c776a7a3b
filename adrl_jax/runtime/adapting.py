"""The drafter's life beside RL: when it is trained, on what, and what its measured acceptance says.

    off        never: it stays as the warm start or the warm-up left it
    joint      by every policy update, on that update's own forward pass (`learner.update`)
    on_demand  likewise, but only while measured acceptance is down by more than a share of its best (`drafter.monitor`)
    spot       beside the policy, on hidden states that the rollout's verify passes left behind (`drafter.trainer`): on devices
               whose share of the rollout has ended, until the others' has; on a single device after the rollout

In whatever mode, no token of any rollout depends on the drafter: coupled verification keeps what the target draws itself.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.drafter import monitor
from adrl_jax.drafter.buffer import Sample
from adrl_jax.drafter.monitor import MonitorConfig, MonitorState
from adrl_jax.drafter.saving import DrafterSaver
from adrl_jax.drafter.trainer import DrafterTrainer
from adrl_jax.learner.update import policy_params
from adrl_jax.rollout.stats import LaunchRecord
from adrl_jax.runtime import remembered
from adrl_jax.runtime.publish import Snapshot, fingerprint_later
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.strategy import Strategy
from adrl_jax.types import Rollout

MODES = ("off", "joint", "spot", "on_demand")

log = logging.getLogger("adrl_jax")


@dataclasses.dataclass(frozen=True)
class AdaptingConfig:
    """What is asked of it.

    Attributes:
        mode: one of `MODES`.
        drafters: names of the strategies' drafters that draft with the trained one.
        spot_steps: `spot` on a single device: training steps after each rollout.
        save_every: steps between saves of the drafter alone; 0: none.
    """

    mode: str = "off"
    drafters: tuple[str, ...] = ()
    spot_steps: int = 0
    save_every: int = 0

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is unknown; choose one of {', '.join(MODES)}")


class Adapting:
    """What the loop asks. Made without arguments it has no drafter and does nothing.

    Attributes:
        state: what the monitor remembers.
        trainer: of mode `spot`, else None.
    """

    def __init__(
        self,
        config: AdaptingConfig | None = None,
        watch: MonitorConfig | None = None,
        strategies: Sequence[Strategy] = (),
        drafter: Eagle | None = None,
        trainer: DrafterTrainer | None = None,
    ):
        """
        Raises:
            ValueError: there is a trainer exactly in mode `spot`.
        """
        config = AdaptingConfig() if config is None else config
        if (config.mode == "spot") != (trainer is not None):
            raise ValueError(f"mode={config.mode!r}: a trainer is needed in mode 'spot', and only there")
        self.config, self.watch = config, MonitorConfig() if watch is None else watch
        self.strategies = tuple(strategies)
        self.drafter, self.trainer = drafter, trainer
        self.saver: DrafterSaver | None = None
        self.state = MonitorState()
        self._step, self._before, self._row = 0, (0, 0), {}
        self._engine: Any = None
        # As of the last step that was done. A run may be asked to stop in the middle of the next, which then is left undone.
        self._done: tuple[MonitorState, remembered.Memory | None] = self.state, None

    @property
    def wanted(self) -> bool:
        """Whether the next policy update is to train the drafter too."""
        return self.config.mode == "joint" or (self.config.mode == "on_demand" and self.state.training)

    def begin(self, record: Any, workdir: Path, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """At the start of a run, or where one goes on: `record` and `arrays` are what `record()` and `arrays()` gave, or None.
        Saves go to `workdir/drafter`."""
        self.state = MonitorState() if record is None else MonitorState(*record)
        if self.config.save_every:
            self.saver = DrafterSaver(workdir / "drafter", self.drafter)
        if self.trainer is not None:
            remembered.recall(self.trainer, arrays or {})
        self._commit()

    def record(self) -> list[Any]:
        """The monitor's state after the last step that was done, as JSON."""
        return list(self._done[0])

    def arrays(self) -> dict[str, np.ndarray]:
        """What the trainer remembered after the last step that was done, for the run's checkpoint; see `remembered`."""
        return remembered.to_arrays(self._done[1])

    def _commit(self) -> None:
        self._done = self.state, None if self.trainer is None else remembered.of(self.trainer)

    def published(self, snapshot: Snapshot) -> None:
        """A new pair of policy and drafter is served: its head is the teacher of what it draws."""
        if self.trainer is not None:
            self.trainer.heads.add(snapshot.version, snapshot.params)

    def before_rollout(self, step: int, learner: Any, engine: Any) -> None:
        """From here on what ends is collected, and the trainer has the drafter."""
        self._step = step
        if self.trainer is None:
            return
        version = int(learner.version)
        self.trainer.buffer.begin_step(step)
        self.trainer.heads.keep({*self.trainer.buffer.versions, version})
        self.trainer.load(learner.drafter_params, learner.drafter_opt_state, int(learner.drafter_version))
        self._before = self.trainer.steps, self.trainer.skipped
        # Several groups train while others roll out: what that needs is compiled now, not then.
        self.trainer.prepare(getattr(engine, "devices", ()))

        def collect(rollout: Rollout, hidden: np.ndarray) -> None:
            self.trainer.buffer.add(Sample(rollout, hidden, version, step))

        self._engine, engine.collect = engine, collect

    def after_rollout(self, engine: Any, launches: Sequence[LaunchRecord]) -> None:
        """Looks at acceptance; on a single device the trainer's steps come now."""
        if not self.config.drafters:
            return
        found = monitor.measure(launches, self.strategies, self.config.drafters)
        self.state, notes = monitor.observe(self.watch, self.state, found)
        for note in notes:
            (log.warning if "no draft is accepted" in note else log.info)("step %d: %s", self._step, note)
        self._row = row = {
            "drafter/acceptance": found.accepted / found.examined if found.examined else float("nan"),
            "drafter/alarm": float(self.state.stuck >= self.watch.alarm_steps),
        }
        if self.config.mode == "on_demand":
            row["drafter/training"] = float(self.state.training)
        if self.trainer is None:
            return
        engine.collect = None
        for _ in range(self.config.spot_steps):
            if not self.trainer.try_step():
                break

    def row(self) -> dict[str, float]:
        """Metrics of the step: `drafter/acceptance` (share of first drafts that stood), `drafter/alarm`; `drafter/training`
        (on_demand); `drafter/spot_steps`, `drafter/spot_skipped`, `drafter/buffer_mb`, `drafter/stale` (spot)."""
        return dict(self._row)

    def hand_back(self, learner: Any) -> Any:
        """The learner's state with what the trainer made of the drafter, where it made anything: the step's last word."""
        learner = self._taken_over(learner)
        self._commit()
        if self.saver is not None and self._step % self.config.save_every == 0:
            self.saver.save(
                int(learner.drafter_version),
                learner.drafter_params,
                learner.drafter_opt_state,
                target_fingerprint=fingerprint_later(policy_params(learner)),
                record={"step": self._step},
            )
        return learner

    def close(self) -> None:
        """Waits for what is being written. A rollout that broke off leaves nothing behind that collects."""
        if self._engine is not None:
            self._engine.collect = None
        if self.saver is not None:
            self.saver.wait()

    def _taken_over(self, learner: Any) -> Any:
        if self.trainer is None or not self.trainer.loaded:
            return learner
        trained = self.trainer.unload()
        steps, skipped = self._before
        self._row |= {
            "drafter/spot_steps": float(self.trainer.steps - steps),
            "drafter/spot_skipped": float(self.trainer.skipped - skipped),
            "drafter/buffer_mb": self.trainer.buffer.nbytes / 2**20,
            "drafter/stale": float(self.trainer.buffer.stale),
        }

        def place(tree, like):
            return jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), tree, like)

        return learner._replace(
            drafter_params=place(trained.params, learner.drafter_params),
            drafter_opt_state=place(trained.opt_state, learner.drafter_opt_state),
            drafter_version=place(jnp.int32(trained.version), learner.drafter_version),
        )
