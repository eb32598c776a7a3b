"""The source of batches that a mode asks for, with a checkpoint's work under way put back where it belongs."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from adrl_jax.rollout.stats import LaunchRecord
from adrl_jax.runtime.batches import Maker, Saved, Source
from adrl_jax.runtime.lagged import Lagged
from adrl_jax.runtime.overlap import Overlap, OverlapConfig
from adrl_jax.runtime.parts import MODES, LoopConfig, Parts, RunState
from adrl_jax.runtime.staleness import ledger, over_age
from adrl_jax.runtime.timeline import Timeline

log = logging.getLogger("adrl_jax")


def make(
    parts: Parts,
    config: LoopConfig,
    state: RunState,
    under_way: Saved,
    *,
    on_launch: Callable[[LaunchRecord], None],
    check: Callable[[], None],
    timeline: Timeline,
) -> Source:
    """The source for `config.mode`, right after step `state.step`.

    Args:
        under_way: from the checkpoint. Groups that this run does not ask for are dropped, those that would be over age are
            generated once more under the same keys; both are told in the log.
        on_launch: told of every launch, in the thread that generates; may raise to leave a step undone.
        check: called while waiting; may raise.
        timeline: where work is drawn.

    Raises:
        ValueError: the mode is unknown, or needs a device of its own that the parts do not have.
    """
    step = int(state.step)
    maker = Maker(parts, config, state.cursor, step)
    if config.mode in ("sync", "lagged"):
        limit = config.limit if config.mode == "lagged" else 0
        kept = _restored(maker, under_way, step, limit, int(state.learner.version))[0]
        batches = {s: maker.restored(s, kept) for s in range(step + 1, step + 1 + limit)}
        ready = {s: b for s, b in batches.items() if b is not None}
        # A batch behind a gap would be generated out of turn.
        first_gap = next((s for s in range(step + 1, step + 1 + limit) if s not in ready), step + 1 + limit)
        ready = {s: b for s, b in ready.items() if s < first_gap}
        return Lagged(
            maker, lag=limit, step=step, steps=config.steps, bandit=under_way.bandit, ready=ready, on_launch=on_launch
        )
    if config.mode not in MODES:
        raise ValueError(f"mode={config.mode!r} is unknown; choose one of {', '.join(MODES)}")
    if parts.generator_device is None:
        raise ValueError(f"mode={config.mode!r} generates on a device of its own; Parts.generator_device is None")
    kept, redone = _restored(maker, under_way, step, config.limit, int(state.learner.version))
    coupling = OverlapConfig(
        limit=config.limit,
        queue=config.queue,
        cache=config.cache if config.mode == "in_flight" else None,
        pinned=config.pinned,
        silence_s=config.silence_s,
    )
    return Overlap(
        maker,
        coupling,
        device=parts.generator_device,
        step=step,
        steps=config.steps,
        bandit=under_way.bandit,
        finished=kept.finished,
        begun=kept.begun,
        redone=redone,
        on_launch=on_launch,
        check=check,
        timeline=timeline,
    )


def _restored(maker: Maker, under_way: Saved, step: int, limit: int, version: int) -> tuple[Saved, int]:
    """What of a checkpoint's groups is learnt from, and how many are generated once more because they would be too old."""
    config = maker.config
    waiting = {n: r for n, r in under_way.finished.items() if n >= step * config.prompts_per_step}
    fitting = maker.matching(waiting)
    if len(fitting) < len(waiting):
        log.warning("%d finished groups are not what this run asks for; left out", len(waiting) - len(fitting))
    book = ledger(limit, config.prompts_per_step, consumed=step)
    old = over_age(fitting.items(), book, version, config.updates_per_batch)
    if old:
        log.warning("%d finished groups would be over the staleness limit of %d; generated once more", len(old), limit)
    finished: dict[int, Any] = {n: r for n, r in fitting.items() if n not in set(old)}
    return dataclasses.replace(under_way, finished=finished), len(old)
