"""What the drafter's trainer remembers from one step to the next, as arrays in the run's checkpoint.

A lesson of step `s + 1` may hold responses of step `s`, whose hidden states only the head of the policy that made them can read. So a
checkpoint between the two keeps those responses, their hidden states and that head, and how far the trainer has counted, which names
what it draws next: a run that goes on makes the very steps that an unbroken one makes. It is no more than the buffer's bytes and
one embedding and vocabulary projection a version of the policy, in the precision they are served in.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from adrl_jax.drafter.buffer import Key, Sample
from adrl_jax.drafter.trainer import DrafterTrainer
from adrl_jax.runtime import work

PREFIX = "drafter_"
"""Of all names here: they stand beside those of `work`."""


class Memory(NamedTuple):
    """Nothing is copied: samples and heads are never written to.

    Attributes:
        step: the step that the others are of.
        samples, lengths: see `DataBuffer.remembered`.
        heads: by version, of all those that made the samples and are still there.
        counters: `steps`, `skipped` of the trainer, `evicted`, `stale` of its buffer.
    """

    step: int
    samples: Sequence[Sample]
    lengths: Mapping[Key, int]
    heads: Mapping[int, Mapping[str, Any]]
    counters: tuple[int, int, int, int]


def of(trainer: DrafterTrainer) -> Memory | None:
    """What is there now; None before the first rollout."""
    buffer = trainer.buffer
    step, samples, lengths = buffer.remembered()
    if step is None:
        return None
    heads = {v: trainer.heads.of(v) for v in sorted({s.version for s in samples} & set(trainer.heads.versions))}
    return Memory(step, samples, lengths, heads, (trainer.steps, trainer.skipped, buffer.evicted, buffer.stale))


def to_arrays(memory: Memory | None) -> dict[str, np.ndarray]:
    """Flat arrays, none of them empty; no array at all where there is nothing to remember."""
    if memory is None:
        return {}
    out: dict[str, np.ndarray] = {"counters": np.array([memory.step, *memory.counters], np.int64)}
    if memory.lengths:
        out["lengths"] = np.array([[*key, n] for key, n in memory.lengths.items()], np.int64)
    if samples := memory.samples:
        # One rollout a number, so that their order stays.
        out |= {f"rollout_{k}": x for k, x in work.to_arrays({i: [s.rollout] for i, s in enumerate(samples)}).items()}
        out["versions"] = np.array([s.version for s in samples], np.int64)
        out["own_log_probs"] = np.concatenate([np.asarray(s.log_probs, np.float32) for s in samples])
        out["hidden"] = np.concatenate([s.hidden for s in samples])
    for version, head in memory.heads.items():
        out |= {f"head_{version}_{name}": np.asarray(x) for name, x in head.items()}
    return {PREFIX + name: x for name, x in out.items()}


def recall(trainer: DrafterTrainer, arrays: Mapping[str, np.ndarray]) -> None:
    """Puts a trainer back to where `of` saw it; other names, and an empty mapping, leave it empty."""
    found = {name.removeprefix(PREFIX): x for name, x in arrays.items() if name.startswith(PREFIX)}
    trainer.buffer.clear()
    trainer.heads.keep(())
    trainer.steps = trainer.skipped = trainer.buffer.evicted = trainer.buffer.stale = 0
    if not found:
        return
    step, trainer.steps, trainer.skipped, evicted, stale = (int(x) for x in found["counters"])
    heads: dict[int, dict[str, Any]] = {}
    for name, value in found.items():
        if name.startswith("head_"):
            _, version, part = name.split("_", 2)
            heads.setdefault(int(version), {})[part] = jnp.asarray(value)
    for version, head in heads.items():
        trainer.heads.add(version, head)
    lengths = {tuple(int(x) for x in row[:-1]): int(row[-1]) for row in found.get("lengths", ())}
    trainer.buffer.evicted, trainer.buffer.stale = evicted, stale
    trainer.buffer.recall(step, _samples(step, found), lengths)


def _samples(step: int, found: Mapping[str, np.ndarray]) -> list[Sample]:
    rollouts = work.from_arrays({n.removeprefix("rollout_"): x for n, x in found.items() if n.startswith("rollout_")})
    samples, states, spoken = [], 0, 0
    for i, version in enumerate(found.get("versions", ())):
        (rollout,) = rollouts[i]
        rows, tokens = len(rollout.token_ids) - 1, rollout.response_length
        log_probs = found["own_log_probs"][spoken : spoken + tokens].copy()
        samples.append(Sample(rollout, found["hidden"][states : states + rows], int(version), step, log_probs))
        states, spoken = states + rows, spoken + tokens
    return samples
