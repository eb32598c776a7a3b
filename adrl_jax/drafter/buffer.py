"""What the drafter learns from during RL: responses with the hidden states of passes that happened anyway, bounded in bytes.

While a rollout is under way only short responses of it have ended: who trained on those alone would forget the long ones, for
which speculation matters most. So the buffer offers them beside the *long* responses of the step before (one-step-offset
sampling; "Taming the Long-Tail", arXiv 2511.16665, §4.3), in the shares that a whole step has:

    c        the longest response of this step so far
    early    responses of this step                          stand for lengths <= c
    late     responses of the step before, longer than c     stand for lengths > c

With the lengths of the step before as the measure of how common either is, batches have the length law of a whole step, however
few of this step's responses have ended. Shares are counted in tokens, since a lesson's loss is a mean over its tokens.

Hidden states belong to one version of the policy, and the teacher's laws are that version's head on them. Under any other head
they mean nothing: who draws says which heads there are, and what is older is refused, unless a pass that happens anyway has
refreshed it (`DataBuffer.refresh`). Host code on numpy; safe to use from several threads.

Shapes: `R` response tokens, `n` tokens of prompt and response, `C` channels of the hidden states that a drafter reads.
"""

import dataclasses
import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from adrl_jax.learner.packing import first_fit_decreasing
from adrl_jax.types import Rollout

Key = tuple[int, int, int, int]
"""Step, prompt id, visit and sample: what a response is known by."""


class EmptyBuffer(ValueError):
    """There is nothing to draw."""


class StaleFeatures(ValueError):
    """Hidden states of one version of the policy met the head of another."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One response and what a version of the policy made of it.

    Attributes:
        rollout: with the log-probs of the law that drew it.
        hidden: float `[n - 1, C]` (a further row is cut off), the states that predict tokens 1 … n - 1.
        version: of the policy that made `hidden`.
        step: the rollout batch it was drawn in.
        log_probs: float32 `[R]`, of the response under `version`'s law; None where that is the law that drew it.
    """

    rollout: Rollout
    hidden: np.ndarray
    version: int
    step: int
    log_probs: np.ndarray | None = None

    def __post_init__(self):
        r, hidden = self.rollout, np.asarray(self.hidden)
        n = len(r.token_ids)
        if hidden.ndim != 2 or len(hidden) not in (n - 1, n):
            raise ValueError(f"Sample.hidden has shape {hidden.shape}, expected ({n - 1}, channels) for {n} tokens")
        if r.sampling.filtered or r.sampling.temperature <= 0:
            raise ValueError(f"prompt {r.prompt_id} was answered with {r.sampling}: no law to learn from")
        if self.log_probs is None:
            drawn = sorted({int(v) for v in r.policy_versions})
            if drawn != [self.version]:
                raise ValueError(
                    f"Sample.version={self.version} made the hidden states, but versions {drawn} drew prompt {r.prompt_id}'s "
                    f"response: give log_probs, what version {self.version} thinks of it"
                )
            object.__setattr__(self, "log_probs", r.log_probs)
        elif np.shape(self.log_probs) != (r.response_length,):
            raise ValueError(f"Sample.log_probs has shape {np.shape(self.log_probs)}, expected ({r.response_length},)")
        # Owned: a view of an engine's state would keep all of it alive, and be overwritten where its buffers are given away.
        object.__setattr__(self, "hidden", np.array(hidden[: n - 1], copy=True))

    @property
    def key(self) -> Key:
        return self.step, self.rollout.prompt_id, self.rollout.visit, self.rollout.sample

    @property
    def length(self) -> int:
        """Response tokens."""
        return self.rollout.response_length

    @property
    def tokens(self) -> int:
        """Prompt and response."""
        return len(self.rollout.token_ids)

    @property
    def nbytes(self) -> int:
        """Of the hidden states; the rest is small."""
        return self.hidden.nbytes


class DataBuffer:
    """Samples of this step and of the one before.

    Attributes:
        max_bytes: of all hidden states together.
        row_length: T, tokens of a packed row: no sample is longer.
        evicted: samples that made room for others so far: first those of the step before that are not drawn any more, then the
            shortest, which are the ones that there are most of. Their lengths still count.
        stale: samples refused so far because the head of their version is gone.
    """

    def __init__(self, max_bytes: int, row_length: int):
        """
        Raises:
            ValueError: a size is not positive.
        """
        for name, value in (("max_bytes", max_bytes), ("row_length", row_length)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"DataBuffer.{name}={value!r} must be a positive integer")
        self.max_bytes, self.row_length = max_bytes, row_length
        self.evicted = self.stale = 0
        self._step: int | None = None
        self._samples: dict[Key, Sample] = {}
        self._lengths: dict[int, dict[Key, int]] = {}
        self._unseen: dict[str, list[Key]] = {"early": [], "late": []}
        self._bytes = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def nbytes(self) -> int:
        return self._bytes

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the policies that made the hidden states, ascending."""
        with self._lock:
            return tuple(sorted({s.version for s in self._samples.values()}))

    def kinds(self) -> dict[tuple[float, int, np.dtype], Sample]:
        """One sample for each temperature, number of channels and dtype that there is: so many programs a trainer needs."""
        with self._lock:
            return {(s.rollout.sampling.temperature, s.hidden.shape[1], s.hidden.dtype): s for s in self._samples.values()}

    def clear(self) -> None:
        """Forgets everything but its sizes."""
        with self._lock:
            self._samples, self._lengths, self._bytes, self._step = {}, {}, 0, None
            self._unseen = {"early": [], "late": []}

    def remembered(self) -> tuple[int | None, list[Sample], dict[Key, int]]:
        """What the next step may still draw: this step (None before the first), its samples in the order in which they came, and
        the lengths of all its responses, evicted ones too."""
        with self._lock:
            samples = [s for s in self._samples.values() if s.step == self._step]
            return self._step, samples, dict(self._lengths.get(self._step, {}))

    def recall(self, step: int, samples: Sequence[Sample], lengths: Mapping[Key, int]) -> None:
        """Takes back what `remembered` gave, in place of everything that is there. What does not fit any more, since the sizes
        are others now, counts as evicted."""
        with self._lock:
            self.clear()
            self.begin_step(step)
            for sample in samples:
                if sample.tokens > self.row_length or sample.nbytes > self.max_bytes:
                    self.evicted += 1
                else:
                    self.add(sample)
            self._lengths[step] = dict(lengths)

    def begin_step(self, step: int) -> None:
        """From here on `step` is this step; what is older than the one before is forgotten.

        Raises:
            ValueError: steps do not go back.
        """
        with self._lock:
            if self._step is not None and step < self._step:
                raise ValueError(f"step={step} comes after step {self._step}")
            self._step = step
            for key in [k for k in self._samples if k[0] < step - 1]:
                self._drop(key)
            self._lengths = {s: lengths for s, lengths in self._lengths.items() if s >= step - 1}
            self._unseen = {"early": [], "late": []}

    def add(self, sample: Sample) -> None:
        """Takes a sample in; others make room for it where the bytes run out.

        Raises:
            ValueError: no step was begun, the sample is of another step than this or the one before, it is longer than a row,
                has other channels than those before, or exceeds `max_bytes` alone.
        """
        with self._lock:
            if self._step is None or not self._step - 1 <= sample.step <= self._step:
                raise ValueError(f"sample of step {sample.step}: the buffer holds step {self._step} and the one before")
            if sample.tokens > self.row_length:
                raise ValueError(
                    f"prompt {sample.rollout.prompt_id} and its response have {sample.tokens} tokens and do not fit into "
                    f"row_length={self.row_length}"
                )
            if sample.nbytes > self.max_bytes:
                raise ValueError(f"a sample of {sample.nbytes} bytes exceeds max_bytes={self.max_bytes} alone")
            other = next(iter(self._samples.values()), None)
            if other is not None and other.hidden.shape[1] != sample.hidden.shape[1]:
                raise ValueError(
                    f"Sample.hidden has {sample.hidden.shape[1]} channels, the buffer's have {other.hidden.shape[1]}"
                )
            if sample.key in self._samples:
                self._drop(sample.key)
            self._samples[sample.key] = sample
            self._bytes += sample.nbytes
            self._lengths.setdefault(sample.step, {})[sample.key] = sample.length
            self._unseen["early" if sample.step == self._step else "late"].append(sample.key)
            while self._bytes > self.max_bytes:
                cut = self._cut()
                self._drop(
                    min(self._samples.values(), key=lambda s: (s.step == self._step or s.length > cut, s.length, s.key)).key
                )
                self.evicted += 1

    def refresh(self, key: Key, hidden: np.ndarray, version: int, log_probs: np.ndarray) -> None:
        """Replaces a sample's hidden states by those of another version, from a pass that happened anyway.

        Args:
            hidden, version, log_probs: as in `Sample`.

        Raises:
            KeyError: there is no such sample (any more).
        """
        with self._lock:
            if key not in self._samples:
                raise KeyError(f"no sample of step {key[0]}, prompt {key[1]}, visit {key[2]}, sample {key[3]} in the buffer")
            self.add(Sample(self._samples[key].rollout, hidden, version, key[0], log_probs))

    def late_share(self) -> float:
        """Share of a lesson's tokens that the late stratum stands for, by the lengths of the step before; 1 where this step
        has no response yet and 0 where the step before had none."""
        with self._lock:
            before = list(self._lengths.get((self._step or 0) - 1, {}).values())
            cut = self._cut()
            return sum(n for n in before if n > cut) / sum(before) if before else 0.0

    def draw(self, rng: np.random.Generator, rows: int, versions: Collection[int] | None = None) -> list[Sample]:
        """Samples of one version and one temperature that fit into `rows` rows, for one lesson.

        A stratum's samples come in random order, each once before any comes again; the one that did not fit any more comes
        first next time, so that long ones are not left out.

        Args:
            rng: its state goes on.
            rows: of `row_length` tokens, >= 1.
            versions: whose heads there are; samples of others are dropped and counted in `stale`. None: all.

        Raises:
            EmptyBuffer: nothing to draw.
        """
        if rows < 1:
            raise ValueError(f"rows={rows!r} must be a positive integer")
        with self._lock:
            if versions is not None:
                for key in [k for k, s in self._samples.items() if s.version not in versions]:
                    self._drop(key)
                    self.stale += 1
            if not self._samples:
                raise EmptyBuffer("the buffer is empty: nothing was added, or all of it was made by heads that are gone")
            name = "late" if rng.random() < self.late_share() else "early"
            pool = {s.key: s for s in self._stratum(name)}
            if not pool:  # evicted, or stale
                name = "early" if name == "late" else "late"
                pool = {s.key: s for s in self._stratum(name) or self._samples.values()}
            unseen = [k for k in self._unseen[name] if k in pool]
            if not unseen:
                unseen = [list(pool)[i] for i in rng.permutation(len(pool))]
            elif len(unseen) > 1:  # newcomers wait behind the one that did not fit
                unseen = unseen[:1] + [unseen[1 + i] for i in rng.permutation(len(unseen) - 1)]
            taken, self._unseen[name] = _fill([pool[k] for k in unseen], rows, self.row_length)
            return taken

    def _cut(self) -> int:
        """The longest response of this step so far, evicted ones too."""
        return max(self._lengths.get(self._step, {}).values(), default=0)

    def _stratum(self, name: str) -> list[Sample]:
        if name == "early":
            return [s for s in self._samples.values() if s.step == self._step]
        cut = self._cut()
        return [s for s in self._samples.values() if s.step < self._step and s.length > cut]

    def _drop(self, key: Key) -> None:
        self._bytes -= self._samples.pop(key).nbytes
        for unseen in self._unseen.values():
            if key in unseen:
                unseen.remove(key)


def _fill(samples: list[Sample], rows: int, row_length: int) -> tuple[list[Sample], list[Key]]:
    """Leading samples of one kind that the packer gets into `rows` rows, and the keys of those left over, in order."""
    kind = samples[0].version, samples[0].rollout.sampling.temperature
    taken: list[Sample] = []
    others: list[Key] = []
    for i, s in enumerate(samples):
        if (s.version, s.rollout.sampling.temperature) != kind:
            others.append(s.key)
            continue
        # The packer is asked: what fits in the order drawn may need a row more in its own order, by size.
        if len(first_fit_decreasing([x.tokens for x in (*taken, s)], row_length)) > rows:
            return taken, [s.key, *others, *(x.key for x in samples[i + 1 :])]
        taken.append(s)
    return taken, others
