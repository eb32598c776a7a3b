"""The synchronous loop: draw prompts, generate, score, learn, publish, and again; and how it ends, and goes on.

A run is a folder. Started on an empty one it begins, on one with a checkpoint it goes on from there, on a finished one
it says so. Everything that changes is in one `RunState`, replaced at the end of each step only, so whatever ends
the process leaves either the step before or the step after.
"""

import dataclasses
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from adrl_jax import checkpoint, report
from adrl_jax.metrics import CompileClock, JsonLines, MetricLog, Stopwatch
from adrl_jax.runtime import arms, collect, compare, cursor, evaluation, numbers, publish
from adrl_jax.runtime.lengths import LengthHistory
from adrl_jax.runtime.parts import LoopConfig, Parts, RunState
from adrl_jax.runtime.progress import Progress
from adrl_jax.runtime.stop import Stop, StopRequested, on_signals

log = logging.getLogger("adrl_jax")

FILES = ("metrics", "samples", "arms")


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
        RewardError: a reward is not finite, or the scorer failed.
    """
    stop = Stop() if stop is None else stop
    with on_signals(stop):
        return _Run(parts, config, workdir, stop).run()


class _Run:
    def __init__(self, parts: Parts, config: LoopConfig, workdir: Path, stop: Stop):
        self.parts, self.config, self.workdir, self.stop = parts, config, workdir, stop
        self.clock = CompileClock()
        self.checkpointer = checkpoint.Checkpointer(workdir / "checkpoints", keep=config.checkpoints_kept)
        self.facts: dict[str, Any] = {"seconds": 0.0, "evaluations": {}, "accept_passes": 0, "accept_tokens": 0}
        self.progress: Progress | None = None
        self.snapshot: publish.Snapshot | None = None
        self.lengths = LengthHistory()

    def run(self) -> Outcome:
        saved = self.checkpointer.latest()
        host = None
        if saved is not None:
            host = self.checkpointer.host(saved)
            checkpoint.check_identity(host["identity"], self.parts.identity, f"checkpoint {saved} in {self.workdir}")
            finished = self._finished()
            if finished is not None:
                self.checkpointer.close()
                return finished
        self.state = self._begin(saved, host)
        self.parts.adapting.begin(self.facts.get("drafter"), self.workdir)
        self._open_logs(host)
        self.started = time.monotonic() - self.facts["seconds"]
        try:
            self._warm_start()
            self._train()
            summary = self._close()
            return Outcome("done", summary)
        except StopRequested:
            self._save()
            log.info("stopped on request at %s; the same command goes on from here", self._where())
            return Outcome("stopped", None)
        finally:
            self._end()

    # Beginning and ending.

    def _finished(self) -> Outcome | None:
        path = self.workdir / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else None
        if summary is None or summary["steps"] < self.config.steps:
            return None
        log.info("%s finished at step %d; raise train.steps or choose another workdir", self.workdir, summary["steps"])
        return Outcome("already_done", summary)

    def _begin(self, saved: int | None, host: dict[str, Any] | None) -> RunState:
        c, parts = self.config, self.parts
        state = RunState(
            parts.init_learner(), parts.bandit.init(), cursor.init(c.seed, len(parts.train_prompts)), np.int32(0), np.int32(0)
        )
        if parts.history is not None:
            state = state._replace(history=parts.history.state_dict())
        if saved is None or host is None:
            return state
        state = self.checkpointer.restore(saved, state, renew=self._renewed(saved, host))
        if parts.history is not None:
            parts.history.load_state_dict(state.history)
        found = publish.fingerprint(state.learner.params)
        if found != host["fingerprint"]:
            raise checkpoint.CheckpointMismatch(
                f"checkpoint {saved} in {self.workdir} is damaged: fingerprint {found}, saved as {host['fingerprint']}"
            )
        self.facts = host["facts"]
        self.state = state
        log.info("going on from %s", self._where())
        return state

    def _renewed(self, saved: int, host: dict[str, Any]) -> tuple[str, ...]:
        """What of the checkpoint is left behind: a controller of other arms, where that was asked for."""
        now, before = self.parts.controller, host["controller"]
        if now == before:
            return ()
        facts = f"checkpoint {saved} in {self.workdir} has the controller {before!r}; this run's is {now!r}"
        if not self.config.reset_bandit:
            raise checkpoint.CheckpointMismatch(
                f"{facts}. Set bandit.reset=True to start the controller afresh, or keep the arms it was made with"
            )
        log.warning("%s, which starts afresh", facts)
        return ("bandit",)

    def _open_logs(self, host: dict[str, Any] | None) -> None:
        lengths = dict.fromkeys(FILES, 0) if host is None else host["log_lengths"]
        if host is None:
            # A fresh run keeps nothing of what an earlier one left before its first checkpoint.
            (self.workdir / "summary.json").unlink(missing_ok=True)
        board = self.workdir / "tensorboard" if self.config.tensorboard else None
        path = {name: self.workdir / f"{name}.jsonl" for name in FILES}
        step = int(self.state.step)
        evaluated = str(step) in self.facts["evaluations"]
        next_steps = {"warm_start": int(self.state.warm_step) + 1, "train": step + 1, "evaluate": step + evaluated}
        self.metrics = MetricLog(path["metrics"], board, length=lengths["metrics"], next_steps=next_steps)
        self.samples = JsonLines(path["samples"], lengths["samples"])
        self.arms = JsonLines(path["arms"], lengths["arms"])

    def _save(self) -> None:
        self.facts["seconds"] = time.monotonic() - self.started
        self.facts["drafter"] = self.parts.adapting.record()
        history = self.parts.history
        self.checkpointer.save(
            self.state.clock,
            self.state._replace(history=None if history is None else history.state_dict()),
            {
                "identity": dict(self.parts.identity),
                "controller": self.parts.controller,
                "fingerprint": publish.fingerprint(self.state.learner.params),
                "facts": self.facts,
                "log_lengths": {
                    "metrics": self.metrics.lines.length(),
                    "samples": self.samples.length(),
                    "arms": self.arms.length(),
                },
            },
        )

    def _end(self) -> None:
        self._close_progress()
        self.parts.adapting.close()
        self.checkpointer.close()
        for file in (self.metrics, self.samples, self.arms):
            file.close()

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
                zero = jnp.zeros_like(learner.version)
                optimizer = parts.init_rl_optimizer(learner.params)
                learner = learner._replace(opt_state=optimizer, version=zero, step=jnp.copy(zero))
            self.state = self.state._replace(learner=learner, warm_step=np.int32(step))
            self.metrics.write("warm_start", step, values | watch.metrics())
            progress.step(loss=values["loss"], drafter=values.get("drafter/agreement"))
            if step % c.checkpoint_every == 0 or step == c.warm_steps:
                self._save()

    def _train(self) -> None:
        c = self.config
        self._publish()
        progress = self._begin_progress("train", c.steps, int(self.state.step))
        while True:
            self.stop.check()
            step = int(self.state.step)
            due = step == 0 or step == c.steps or (c.evaluate_every and step % c.evaluate_every == 0)
            if due and str(step) not in self.facts["evaluations"]:
                self._evaluate(step)
            if step == c.steps or self.state.clock % c.checkpoint_every == 0:
                self._save()
            if step == c.steps:
                return
            progress.step(**self._train_step(step + 1))

    def _train_step(self, step: int) -> dict[str, Any]:
        c, parts, state = self.config, self.parts, self.state
        watch = Stopwatch(self.clock)
        indices, visits, after = cursor.draw(state.cursor, c.prompts_per_step)
        prompts = [parts.train_prompts[int(i)] for i in indices]
        with watch.phase("rollout"):
            noise_visits = np.zeros_like(visits) if c.reuse_noise else None
            requests = collect.requests_for(prompts, visits, c.group_size, c.max_new_tokens, noise_visits=noise_visits)
            parts.adapting.before_rollout(step, state.learner, parts.engine)
            result = parts.engine.generate(
                requests,
                c.sampling,
                parts.bandit,
                state.bandit,
                replay_arms=None if parts.replay is None else parts.replay[step],
                on_launch=self._on_launch,
                expected_tokens=self.lengths.expected(requests),
                history=parts.history,
            )
            self.lengths.learn(result.rollouts)
        with watch.phase("drafter"):
            parts.adapting.after_rollout(parts.engine, result.stats.launches)
        update = parts.update if parts.frozen_update is None or parts.adapting.wanted else parts.frozen_update
        with watch.phase("reward"):
            scored = collect.score(result.rollouts, [r.prompt for r in requests], parts.tokenizer, parts.scorer)
            scored = collect.with_advantages(scored, parts.advantage)
        with watch.phase("pack"):
            version = int(state.learner.version)
            batches = [parts.pack(rollouts, values, version) for rollouts, values in numbers.minibatches(scored, c.minibatches)]
        self.stop.check()  # the last point at which this step can still be left undone
        learner, updates = state.learner, []
        with watch.phase("update"):
            for batch in batches:
                learner, values = update(learner, batch)
                updates.append(values)
            updates = [numbers.on_host(values) for values in updates]
            learner = parts.adapting.hand_back(learner)
        self.state = state._replace(learner=learner, bandit=result.bandit_state, cursor=after, step=np.int32(step))
        with watch.phase("sync"):
            self._publish()
        row = collect.metrics(scored) | numbers.of_updates(updates) | parts.adapting.row()
        row |= numbers.of_rollouts(result.stats, result.rollouts, parts.strategies)
        row["frac_zero_adv_groups"] = scored.frac_zero_std
        row |= numbers.of_staleness(result.rollouts, version) | watch.metrics() | self._versions()
        self.metrics.write("train", step, row)
        self.facts["accept_passes"] += sum(r.accept_passes for r in result.rollouts)
        self.facts["accept_tokens"] += sum(r.accept_tokens for r in result.rollouts)
        lengths = [r.response_length for r in result.rollouts]
        self.arms.append(arms.record(step, result.stats.launches, parts.strategies, lengths))
        for record in collect.sample_records(scored, "train", step, c.samples_per_step):
            self.samples.append(record)
        return {
            "reward": row["reward/mean"],
            "tokens/s": row["rollout/tokens_per_s"],
            "accept": row["spec/accept_len"],
            "arm": numbers.most_used(result.stats, parts.strategies),
        }

    def _evaluate(self, step: int) -> None:
        c, parts = self.config, self.parts
        row, scored, bandit = evaluation.evaluate(
            parts, c.eval_sampling, c.eval_samples, c.max_new_tokens, self.state.bandit, self.clock, self._on_launch
        )
        self.state = self.state._replace(bandit=bandit)
        self.facts["evaluations"][str(step)] = row["reward/mean"]
        self.metrics.write("evaluate", step, row | self._versions())
        for record in collect.sample_records(scored, "evaluate", step, c.samples_per_step):
            self.samples.append(record)
        n = len(parts.eval_prompts)
        self.progress.note(f"reward on {n} held-out prompts after {step} steps: {row['reward/mean']:.3f}")

    def _publish(self) -> None:
        learner = self.state.learner
        self.snapshot = publish.snapshot(
            learner.params,
            int(learner.version),
            self.parts.model_config,
            drafter=learner.drafter_params,
            drafter_version=int(learner.drafter_version),
            drafter_name=self.parts.drafter_name,
            others=self.parts.fixed_drafters,
        )
        self.parts.engine.publish(
            self.snapshot.params, self.snapshot.version, self.snapshot.drafter_params, self.snapshot.drafter_version
        )
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

    def _accept_length(self) -> float | None:
        """Over all training rollouts; None where nothing ever speculated."""
        passes = self.facts["accept_passes"]
        return self.facts["accept_tokens"] / passes if passes else None

    def _close(self) -> dict[str, Any]:
        """The closing comparison, summary.json and the report."""
        c, parts = self.config, self.parts
        found = None
        if c.compare_repeats:
            progress = self._begin_progress("with and without speculation", 2 * (c.compare_repeats + 1))
            indices, visits, _ = cursor.draw(self.state.cursor, c.prompts_per_step)
            prompts = [parts.train_prompts[int(i)] for i in indices]
            requests = collect.requests_for(prompts, visits, c.group_size, c.max_new_tokens)
            found = compare.speculation(
                parts,
                self.snapshot.params,
                requests,
                c.sampling,
                self.state.bandit,
                self.clock,
                repeats=c.compare_repeats,
                on_run=progress.step,
                on_launch=lambda launch: self.stop.check(),
            )
        self._close_progress()
        evaluations = self.facts["evaluations"]
        summary = {
            "reward_start": evaluations.get("0"),
            "reward_end": evaluations[str(c.steps)],
            "rollout_speedup": found and found.speedup,
            "accept_length": found.accept_length if found and found.accept_length else self._accept_length(),
            "identical_tokens": found and found.identical,
            "seconds": time.monotonic() - self.started,
            "steps": c.steps,
        }
        if found is not None:
            summary |= found.details()
        write_json(self.workdir / "summary.json", summary)
        if c.report:
            report.write(self.workdir)
        return summary


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is either whole or not there."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)
