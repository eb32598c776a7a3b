"""The loop: get a batch, learn from it, publish, and again; and how it ends, and goes on.

Where batches come from is the mode's business (`batches.Source`): generated at once (`sync`), some policies ahead (`lagged`), or
while the learner works (`overlap`, `in_flight`). A run is a folder. Started on an empty one it begins, on one with a
checkpoint it goes on from there, on a finished one it says so. Everything that changes is in one `RunState`, replaced at the
end of each step only, so whatever ends the process leaves either the step before or the step after.
"""

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adrl_jax.learner.update import policy_params
from adrl_jax.metrics import CompileClock, Stopwatch
from adrl_jax.runtime import (
    arms,
    choice,
    closing,
    collect,
    cursor,
    evaluation,
    numbers,
    publish,
    refill,
    refreshing,
    sources,
    staleness,
)
from adrl_jax.runtime.batches import Batch, Saved, Source
from adrl_jax.runtime.folder import Folder, write_json
from adrl_jax.runtime.health import Health
from adrl_jax.runtime.parts import LoopConfig, Parts
from adrl_jax.runtime.progress import Progress
from adrl_jax.runtime.stop import Stop, StopRequested, on_signals
from adrl_jax.runtime.timeline import Timeline
from adrl_jax.types import PackedBatch, Rollout

__all__ = ["Outcome", "run", "write_json"]

log = logging.getLogger("adrl_jax")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call of `run` ended.

    Attributes:
        status: `done`, `stopped` (asked to, state saved) or `already_done`.
        summary: the contents of summary.json, None where the run is not finished.
    """

    status: str
    summary: dict[str, Any] | None


def run(parts: Parts, config: LoopConfig, workdir: Path, stop: Stop | None = None) -> Outcome:
    """Runs, or goes on with, the run in `workdir` until its last step or until asked to stop.

    Args:
        parts: the pieces.
        config: sizes.
        workdir: exists and is writable; no other process uses it.
        stop: asks the run to end; SIGTERM and ctrl-C do so where this runs in the main thread.

    Raises:
        CheckpointMismatch: the folder's checkpoint is of another model, task or seed.
        RewardError: no reward of a batch is finite, or the scorer failed.
        UpdateError: loss or gradient were not finite in too many updates in a row.
        Stalled: the generator's thread gives no sign of life.
        Exception: whatever failed first, in any thread.
    """
    stop = Stop() if stop is None else stop
    with on_signals(stop):
        return _Run(parts, config, workdir, stop).run()


class _Run:
    def __init__(self, parts: Parts, config: LoopConfig, workdir: Path, stop: Stop):
        if parts.generator_device is not None and parts.fixed_drafters:
            # Once, not at every publish.
            parts = dataclasses.replace(
                parts, fixed_drafters=jax.device_put(dict(parts.fixed_drafters), parts.generator_device)
            )
        self.parts, self.config, self.workdir, self.stop = parts, config, workdir, stop
        self.clock = CompileClock()
        self.timeline = Timeline()
        self.folder = Folder(parts, config, workdir)
        self.progress: Progress | None = None
        self.snapshot: publish.Snapshot | None = None
        self.source: Source | None = None
        self.known = choice.Known()
        self.health = Health(config.max_nonfinite)

    def run(self) -> Outcome:
        finished = self.folder.finished()
        if finished is not None:
            log.info("%s finished at step %d; raise train.steps or choose another workdir", self.workdir, finished["steps"])
            self.folder.close()
            return Outcome("already_done", finished)
        self.state, self.under_way = self.folder.begin()
        self.parts.adapting.begin(self.folder.facts.get("drafter"), self.workdir, self.folder.drafter)
        if self.state.clock:
            log.info("going on from %s", self._where())
        self.known = choice.Known(**self.folder.facts.get("refresh", {}))
        self.folder.open_logs(self.state)
        self.started = time.monotonic() - self.folder.facts["seconds"]
        try:
            self._warm_start()
            self._train()
            summary = self._close()
            return Outcome("done", summary)
        except StopRequested:
            if self.source is not None:
                self.source.close()
            self._save()
            log.info("stopped on request at %s; the same command goes on from here", self._where())
            return Outcome("stopped", None)
        finally:
            self._end()

    # Beginning and ending.

    def _save(self) -> None:
        self.folder.facts["refresh"] = self.known._asdict()
        self.folder.facts["drafter"] = self.parts.adapting.record()
        under_way = Saved(self.state.bandit) if self.source is None else self.source.saved()
        self.folder.save(self.state, under_way, self.started)

    def _end(self) -> None:
        if self.source is not None:
            self.source.close()
        self._close_progress()
        self.parts.adapting.close()
        self.folder.close()
        if self.config.trace:
            self.timeline.write(self.workdir / "trace.json")

    def _where(self) -> str:
        warm, total = int(self.state.warm_step), self.config.warm_steps
        if warm < total:
            return f"warm-start step {warm} of {total}"
        return f"step {int(self.state.step)} of {self.config.steps}"

    def _begin_progress(self, name: str, total: int, done: int = 0) -> Progress:
        self._close_progress()
        self.progress = Progress(name, total, done)
        return self.progress

    def _close_progress(self) -> None:
        if self.progress is not None:
            self.progress.close()
            self.progress = None

    # Phases.

    def _warm_start(self) -> None:
        c, parts = self.config, self.parts
        done = int(self.state.warm_step)
        if done >= c.warm_steps:
            return
        progress = self._begin_progress("warm start", c.warm_steps, done)
        while int(self.state.warm_step) < c.warm_steps:
            self.stop.check()
            step = int(self.state.warm_step)
            watch = Stopwatch(self.clock)
            with watch.phase("pack"):
                batch = parts.warm_batch(step)
            with watch.phase("update"):
                learner, values = parts.warm_update(self.state.learner, batch)
                values = numbers.on_host(values)
            step += 1
            if step == c.warm_steps:
                # The policy that RL starts from is version 0, with an optimizer that has seen none of its gradients.
                learner = parts.begin_rl(learner)
            self.state = self.state._replace(learner=learner, warm_step=np.int32(step))
            self.folder.metrics.write("warm_start", step, values | watch.metrics())
            progress.step(loss=values["loss"], drafter=values.get("drafter/agreement"))
            if step % c.checkpoint_every == 0 or step == c.warm_steps:
                self._save()

    def _train(self) -> None:
        c = self.config
        self.source = sources.make(
            self.parts, c, self.state, self.under_way, on_launch=self._on_launch, check=self.stop.check, timeline=self.timeline
        )
        progress = self._begin_progress("train", c.steps, int(self.state.step))
        self._publish()
        while True:
            self.stop.check()
            step = int(self.state.step)
            due = step == 0 or step == c.steps or (c.evaluate_every and step % c.evaluate_every == 0)
            if due and str(step) not in self.folder.facts["evaluations"]:
                self._evaluate(step)
            if step == c.steps or self.state.clock % c.checkpoint_every == 0:
                with self.source.idle(self.snapshot):
                    self._save()
            if step == c.steps:
                self.source.close()
                return
            progress.step(**self._train_step(step + 1))

    def _train_step(self, step: int) -> dict[str, Any]:
        c, parts, state = self.config, self.parts, self.state
        watch = Stopwatch(self.clock)
        version = int(state.learner.version)
        parts.adapting.before_rollout(step, state.learner, parts.engine)
        batch, scored, after, row = self._round(step, state.cursor, watch, first=True)
        refills = 0
        while c.max_refills and (chosen := refill.enough(scored, c.prompts_per_step, refills, c.max_refills)) is None:
            more, further, after, _ = self._round(step, after, watch, first=False)
            scored, refills = refill.joined(scored, further), refills + 1
            rollouts = [*batch.rollouts, *more.rollouts]
            batch = dataclasses.replace(batch, rollouts=rollouts, stats=batch.stats.then(more.stats))
        drawn, scored = scored, chosen if c.max_refills else scored
        with watch.phase("drafter"):
            parts.adapting.after_rollout(parts.engine, batch.stats.launches)
        update = parts.update if parts.frozen_update is None or parts.adapting.wanted else parts.frozen_update
        with watch.phase("pack"):
            prepared = parts.prepare(state.learner, scored, step)
        learner, scored, batches, facts = prepared.learner, prepared.scored, prepared.batches, prepared.facts
        with watch.phase("measure"):
            self._measure(batch, batches, prepared.first, row)
        self.source.verify()
        self.stop.check()  # the last point at which this step can still be left undone
        with watch.phase("update"), self.timeline.span("learner", f"update {step}"):
            learner, updates = self.health.apply(update, learner, batches)
            learner = parts.adapting.hand_back(learner)
        self.state = state._replace(learner=learner, bandit=self.source.bandit, cursor=after, step=np.int32(step))
        self.source.commit()
        with watch.phase("sync"):
            self._publish()
        row |= collect.metrics(drawn) | numbers.of_updates(updates) | facts | parts.adapting.row()
        row |= numbers.of_rollouts(batch.stats, batch.rollouts, parts.strategies) | {"rollout/refills": float(refills)}
        row["frac_zero_adv_groups"] = scored.frac_zero_std
        self.health.watch(row)
        row |= staleness.numbers(batch.rollouts, version) | self.source.numbers() | watch.metrics() | self._versions()
        self._log(step, batch, scored, row)
        return {
            "reward": row["reward/mean"],
            "tokens/s": row["rollout/tokens_per_s"],
            "accept": row["spec/accept_len"],
            "arm": numbers.most_used(batch.stats, parts.strategies),
        }

    def _round(
        self, step: int, start: cursor.CursorState, watch: Stopwatch, *, first: bool
    ) -> tuple[Batch, collect.Scored, cursor.CursorState, dict[str, Any]]:
        """A batch of the step, or one more of it (dynamic sampling), made current where that is due, and scored; the cursor
        after it, and metrics."""
        c, parts = self.config, self.parts
        _, _, after = cursor.draw(start, c.prompts_per_step)
        with watch.phase("rollout" if parts.generator_device is None else "learner_wait"):
            batch = self.source.next(step) if first else self.source.more(step)
        batch, row = self._refresh(batch, watch)
        staleness.check_bound(batch.rollouts, int(self.state.learner.version), c.limit * c.updates_per_batch)
        with watch.phase("reward"):
            scored = collect.score(batch.rollouts, [r.prompt for r in batch.requests], parts.tokenizer, parts.scorer)
        return batch, scored, after, row

    def _log(self, step: int, batch: Batch, scored: collect.Scored, row: dict[str, Any]) -> None:
        self.folder.metrics.write("train", step, row)
        self.folder.facts["accept_passes"] += sum(r.accept_passes for r in batch.rollouts)
        self.folder.facts["accept_tokens"] += sum(r.accept_tokens for r in batch.rollouts)
        lengths = [r.response_length for r in batch.rollouts]
        self.folder.arms.append(arms.record(step, batch.stats.launches, self.parts.strategies, lengths))
        for record in collect.sample_records(scored, "train", step, self.config.samples_per_step):
            self.folder.samples.append(record)

    def _refresh(self, batch: Batch, watch: Stopwatch) -> tuple[Batch, dict[str, Any]]:
        """The batch made current, where that is the choice; and metrics."""
        lag = self._lag(batch)
        if not choice.decide(self.config.refresh, self.known, lag):
            return batch, {} if self.config.refresh.choice == "off" else {"refresh/share": 0.0}
        with watch.phase("refresh"), self.source.idle(self.snapshot), self.timeline.span("refresh", f"refresh {batch.step}"):
            fresh, self.source.bandit = refreshing.made_current(
                self.parts, self.config.sampling, batch, self.source.bandit, self._on_launch
            )
        found = refreshing.numbers(fresh.rollouts, fresh.stats, batch.rollouts)
        spent = max(fresh.stats.seconds - fresh.stats.compile_seconds, 0.0)
        self.known = self.known.learn(refresh_s=spent, disagreement=found["refresh/disagreement"] / lag)
        return dataclasses.replace(fresh, stats=batch.stats), found | {"refresh/share": 1.0, "refresh/seconds": spent}

    def _measure(self, batch: Batch, packed: list[PackedBatch], first: list[Rollout], row: dict[str, Any]) -> None:
        """How stale the batch is by the learner's own logits, before any update of it; and what that tells about later ones."""
        if batch.stats.seconds:
            self.known = self.known.learn(generate_s=batch.stats.seconds - batch.stats.compile_seconds)
        if self.parts.disagreement is None or not packed:
            return
        share = self.parts.disagreement(policy_params(self.state.learner), packed[0], first, batch.step)
        if share is None:
            return
        row["staleness/disagreement"] = share
        lag = self._lag(batch)
        if lag and not batch.refreshed:
            self.known = self.known.learn(disagreement=share / lag)

    def _lag(self, batch: Batch) -> int:
        """How many policies the batch's weights are old."""
        return 0 if batch.begun is None else batch.step - 1 - batch.begun

    def _evaluate(self, step: int) -> None:
        c, parts = self.config, self.parts
        with self.source.idle(self.snapshot), self.timeline.span("evaluate", f"evaluation {step}"):
            row, scored, self.source.bandit = evaluation.evaluate(
                parts, c.eval_sampling, c.eval_samples, c.max_new_tokens, self.source.bandit, self.clock, self._on_launch
            )
        self.state = self.state._replace(bandit=self.source.bandit)
        self.source.commit()
        self.folder.facts["evaluations"][str(step)] = row["reward/mean"]
        self.folder.metrics.write("evaluate", step, row | self._versions())
        for record in collect.sample_records(scored, "evaluate", step, c.samples_per_step):
            self.folder.samples.append(record)
        n = len(parts.eval_prompts)
        self.progress.note(f"reward on {n} held-out prompts after {step} steps: {row['reward/mean']:.3f}")

    def _publish(self) -> None:
        learner = self.state.learner
        with self.timeline.span("publish", f"version {int(learner.version)}"):
            self.snapshot = publish.snapshot(
                policy_params(learner),
                int(learner.version),
                self.parts.model_config,
                drafter=learner.drafter_params,
                drafter_version=int(learner.drafter_version),
                drafter_name=self.parts.drafter_name,
                others=self.parts.fixed_drafters,
                device=self.parts.generator_device,
            )
            self.source.publish(self.snapshot, int(self.state.step))
            self.parts.adapting.published(self.snapshot)

    def _versions(self) -> dict[str, Any]:
        s = self.snapshot
        return {
            "version": s.version,
            "fingerprint": s.fingerprint,
            "drafter/version": s.drafter_version,
            "drafter/fingerprint": s.drafter_fingerprint,
        }

    def _on_launch(self, launch: Any) -> None:
        self.stop.check()
        if self.progress is not None:
            self.progress.show(arm=self.parts.strategies[launch.arm].name, running=launch.running)

    def _close(self) -> dict[str, Any]:
        """The closing comparison, summary.json and the report."""
        c = self.config
        found = None
        if c.compare_repeats:
            progress = self._begin_progress("with and without speculation", 2 * (c.compare_repeats + 1))
            with self.source.idle(self.snapshot):
                found = closing.comparison(
                    self.parts, c, self.snapshot.params, self.state, self.clock, on_run=progress.step, check=self.stop.check
                )
        self._close_progress()
        seconds = time.monotonic() - self.started
        return closing.write(self.workdir, c, self.folder.facts, found, seconds)
