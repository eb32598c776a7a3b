"""The drafter's training beside RL, in steps so small that whoever needs the device waits for one of them at most.

A step draws one lesson from the buffer, takes the head of the policy version that made the lesson's hidden states, and updates the
drafter. Nothing of the policy is computed: hidden states come from passes that happened anyway. The trainer owns its state; it
takes copies of what it is given, since steps donate their buffers, and it lives on a device of its own where it is told so.
"""

import dataclasses
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adrl_jax.drafter import warmup
from adrl_jax.drafter.buffer import DataBuffer, EmptyBuffer, Sample, StaleFeatures
from adrl_jax.drafter.lessons import pack_samples
from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.models.families import ModelConfig
from adrl_jax.speculation import eagle

_HEAD = ("embedding", "head", "head_t")


class Heads:
    """What the teacher's laws need of each policy version: embedding and vocabulary projection of published snapshots.

    Arrays are shared with the snapshots, which are immutable; the layers of old ones are not kept alive.
    """

    def __init__(self):
        self._held: dict[int, dict[jax.Device | None, Mapping[str, Any]]] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._held

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self._held))

    def add(self, version: int, params: Mapping[str, Any]) -> None:
        """Keeps the head of a published snapshot; a version that is there already stays as it is."""
        if version not in self._held:
            self._held[version] = {None: {name: params[name] for name in _HEAD if name in params}}

    def keep(self, versions: Collection[int]) -> None:
        """Forgets all but these versions."""
        self._held = {v: head for v, head in self._held.items() if v in versions}

    def of(self, version: int, device: jax.Device | None = None) -> Mapping[str, Any]:
        """The head of a version, on `device`; None: where its snapshot is.

        Raises:
            StaleFeatures: it is gone.
        """
        if version not in self._held:
            raise StaleFeatures(
                f"hidden states of policy version {version} need that version's head; there are those of {list(self._held)}: "
                "refresh them by a pass of a current version"
            )
        by_device = self._held[version]
        if device not in by_device:
            by_device[device] = jax.device_put(by_device[None], device)
        return by_device[device]


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """Sizes of a step.

    Attributes:
        seed: with the step's number it names what is drawn.
        rows: packed rows of a lesson, each of the buffer's `row_length` tokens.
    """

    seed: int = 0
    rows: int = 2

    def __post_init__(self):
        if not isinstance(self.rows, int) or self.rows < 1:
            raise ValueError(f"TrainerConfig.rows={self.rows!r} must be a positive integer")


class Trained(NamedTuple):
    """What the trainer hands back.

    Attributes:
        params: the drafter's, its map of draft ids included.
        opt_state: of `eagle.split(params)[0]`.
        version: updates applied so far, those before this trainer too.
    """

    params: Any
    opt_state: Any
    version: int


class DrafterTrainer:
    """See the module's docstring.

    Attributes:
        buffer, heads: what it draws from.
        steps, skipped: asked for since it was made, and those of them that changed nothing since the loss was not finite.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        loss: DrafterLossConfig,
        optimizer: optax.GradientTransformation,
        buffer: DataBuffer,
        heads: Heads,
        config: TrainerConfig | None = None,
        *,
        valid_vocab: int | None = None,
        device: jax.Device | None = None,
    ):
        self.buffer, self.heads = buffer, heads
        self._lock = threading.RLock()
        self.config = TrainerConfig() if config is None else config
        self.steps = self.skipped = 0
        self._device = device
        self._step = warmup.make_step(model_config, loss, optimizer, valid_vocab=valid_vocab)
        self._state: warmup.WarmupState | None = None
        self._fixed: Any = None
        self._version = 0
        self._ready: set[tuple[jax.Device, Any]] = set()

    @property
    def loaded(self) -> bool:
        return self._state is not None

    def load(self, params: Any, opt_state: Any, version: int) -> None:
        """Takes copies of a drafter to train on; what it trained before is dropped."""
        with self._lock:
            trained, self._fixed = self._own(eagle.split(params))
            self._state = warmup.WarmupState(trained, self._own(opt_state), *self._own((jnp.int32(0), jnp.int32(0))))
            self._version = int(version)

    def _own(self, tree: Any) -> Any:
        copies = jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
        return copies if self._device is None else jax.device_put(copies, self._device)

    def unload(self) -> Trained:
        """Gives the drafter away, after the step that may be under way: arrays on the trainer's device, nobody else's.

        Raises:
            ValueError: nothing is loaded.
        """
        with self._lock:
            if self._state is None:
                raise ValueError("the trainer has no drafter: call load first")
            state, self._state = self._state, None
            applied = int(state.step) - int(state.skipped)
            return Trained({**state.trained, **self._fixed}, state.opt_state, self._version + applied)

    def prepare(self, devices: Collection[jax.Device]) -> None:
        """Compiles the step for the devices and for every kind of sample that the buffer holds now; nothing is learnt.

        A compilation cannot be put aside when the rollout ends, and tracing it holds the interpreter that the rollout needs: so
        it is not for a rollout's tail. Where there are no samples yet, as before the first rollout, nothing happens.

        Raises:
            ValueError: nothing is loaded.
        """
        with self._lock:
            if self._state is None:
                raise ValueError("the trainer has no drafter: call load first")
            for kind, sample in self.buffer.kinds().items():
                if sample.version not in self.heads:
                    continue
                # A lesson without targets changes nothing.
                lesson = self._lesson([sample])
                empty = lesson._replace(batch=lesson.batch._replace(target_mask=np.zeros_like(lesson.batch.target_mask)))
                for device in devices:
                    if (device, kind) in self._ready:
                        continue
                    copies = jax.device_put(jax.tree.map(lambda x: jnp.array(x, copy=True), self._state), device)
                    fixed, head = jax.device_put(self._fixed, device), self.heads.of(sample.version, device)
                    jax.block_until_ready(self._step(copies, fixed, head, _placed(empty, device)))
                    self._ready.add((device, kind))

    def try_step(self, device: jax.Device | None = None) -> bool:
        """`step`, for a thread of its own: False where nothing is loaded (any more), or there is nothing to learn from.

        Args:
            device: where the step is to run; the trainer's state moves there, and what would have to be compiled first is not
                done (see `prepare`). None: where it is.
        """
        with self._lock:
            if not self.loaded:
                return False
            if device is not None:
                if any((device, kind) not in self._ready for kind in self.buffer.kinds()):
                    return False
                if device != self._device:
                    self._device = device
                    self._state, self._fixed = jax.device_put((self._state, self._fixed), device)
            return self.step() is not None

    def step(self) -> dict[str, float] | None:
        """One update, waited for; its metrics (see `warmup.make_step`, and `skipped`, `tokens`, `version` of the features), or
        None where there is nothing to learn from.

        Raises:
            ValueError: nothing is loaded.
        """
        if self._state is None:
            raise ValueError("the trainer has no drafter: call load first")
        rng = np.random.default_rng([self.config.seed, self.steps])
        try:
            samples = self.buffer.draw(rng, self.config.rows, self.heads.versions)
        except EmptyBuffer:
            return None
        lesson = self._lesson(samples)
        before = self.skipped
        head = self.heads.of(lesson.version, self._device)
        state, metrics = self._step(self._state, self._fixed, head, _placed(lesson, self._device))
        values = {name: float(x) for name, x in jax.device_get(metrics).items()}
        self._state, self.steps = state, self.steps + 1
        # NaN or infinite: the step kept the weights as they were.
        self.skipped += not np.isfinite([values["loss"], values["grad_norm"]]).all()
        return values | {"skipped": self.skipped - before, "tokens": lesson.tokens, "version": lesson.version}

    def _lesson(self, samples: Sequence[Sample]) -> warmup.Lesson:
        return pack_samples(samples, rows=self.config.rows, row_length=self.buffer.row_length)


def _placed(lesson: warmup.Lesson, device: jax.Device | None) -> warmup.Lesson:
    if device is None:
        return lesson
    batch, hidden, log_probs = jax.device_put(warmup.arrays_of(lesson), device)
    return lesson._replace(batch=batch, hidden=hidden, log_probs=log_probs)
