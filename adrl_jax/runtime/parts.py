"""What a run is put together from: the rooms' finished pieces, handed to the loop by the experiment."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from adrl_jax.bandit.base import Bandit
from adrl_jax.learner.disagreement import Measure
from adrl_jax.learner.update import LearnerState, Update
from adrl_jax.models.families import ModelConfig
from adrl_jax.runtime.adapting import Adapting
from adrl_jax.runtime.choice import RefreshConfig
from adrl_jax.runtime.collect import Scorer
from adrl_jax.runtime.cursor import CursorState
from adrl_jax.speculation.history_store import HistoryStore
from adrl_jax.speculation.strategy import Strategy
from adrl_jax.types import PackedBatch, Prompt, SamplingParams

MODES = ("sync", "lagged", "overlap", "in_flight")

EVALUATION_VISIT = 2**31 - 1
"""Visit number of evaluation requests: no training draw has it, and all evaluations of a run share their noise."""


class RunState(NamedTuple):
    """Everything that changes and is saved.

    Attributes:
        learner: policy, optimizer, drafter and its optimizer, versions.
        bandit: the bandit's state.
        cursor: which prompts come next.
        warm_step: int32 `[]`, supervised updates done.
        step: int32 `[]`, rollout batches learnt from.
        history: the history store's state, None where there is none. Current in saved states only.
    """

    learner: LearnerState
    bandit: Any
    cursor: CursorState
    warm_step: np.ndarray
    step: np.ndarray
    history: Any = None

    @property
    def clock(self) -> int:
        """Steps of all phases, the number of a checkpoint."""
        return int(self.warm_step) + int(self.step)


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Sizes of the loop; see the fields of the same names in `experiments.config`.

    Attributes:
        seed: names all randomness.
        steps: rollout batches.
        prompts_per_step, group_size, max_new_tokens: of a rollout batch.
        sampling: law of training rollouts.
        reuse_noise: a prompt's samples get the noise of its first visit at every visit.
        reset_bandit: a saved controller of other arms is replaced by a fresh one instead of refused.
        max_nonfinite: updates in a row that may be skipped because they were not finite.
        max_refills: rounds of prompts drawn after the first until enough groups have unequal rewards; 0 takes the first as it is.
        warm_steps: supervised updates before.
        evaluate_every: steps between evaluations, 0 for before and after only.
        eval_samples: responses to each held-out prompt.
        eval_sampling: law of evaluation.
        checkpoint_every: clock steps between saves.
        checkpoints_kept: latest checkpoints that stay.
        samples_per_step: lines a step in `samples.jsonl`.
        compare_repeats: timed repeats of the closing comparison, 0 for none.
        tensorboard: whether to write event files.
        report: whether to write `report.html`.
        updates_per_batch: most optimizer updates that a batch is good for: by so much its version of the policy is newer.
        mode: one of `MODES`.
        limit: staleness limit in versions (batches); of `lagged` the very lag, of `sync` 0.
        queue: finished batches that may wait.
        cache: `in_flight`: what becomes of running requests' caches when weights are swapped.
        pinned: `overlap`: see `overlap.OverlapConfig`.
        silence_s: seconds without a sign of life after which the generator counts as dead.
        refresh: when stale batches are made current.
        trace: whether to write `trace.json`.
    """

    seed: int
    steps: int
    prompts_per_step: int
    group_size: int
    max_new_tokens: int
    sampling: SamplingParams
    reuse_noise: bool
    reset_bandit: bool
    max_nonfinite: int
    max_refills: int
    warm_steps: int
    evaluate_every: int
    eval_samples: int
    eval_sampling: SamplingParams
    checkpoint_every: int
    checkpoints_kept: int
    samples_per_step: int
    compare_repeats: int
    tensorboard: bool
    report: bool
    updates_per_batch: int = 1
    mode: str = "sync"
    limit: int = 0
    queue: int = 2
    cache: str = "keep"
    pinned: bool = False
    silence_s: float = 600.0
    refresh: RefreshConfig = dataclasses.field(default_factory=RefreshConfig)
    trace: bool = False


@dataclasses.dataclass(frozen=True)
class Parts:
    """The pieces.

    Attributes:
        model_config: the policy's.
        tokenizer: decodes responses.
        train_prompts, eval_prompts: indexable.
        scorer: scores a batch of training responses.
        eval_scorer: scores those to held-out prompts (the gold reward, where `scorer` is a proxy); None: `scorer`.
        engine: generates; knows `strategies` in this order.
        strategies: the arms.
        bandit: picks among them.
        controller: what the bandit's state belongs to, see `bandit.base.signature`.
        history: earlier responses for drafters that look things up, or None.
        init_learner: fresh weights and optimizer state, the same at every call.
        prepare: `(learner, scored, step) -> Prepared`, see `runtime.experience`.
        update: `(learner, batch) -> (learner, metrics)`, one optimizer step of RL.
        begin_rl: the learner at the start of RL: version 0, a fresh optimizer, these weights as the reference model.
        warm_batch: `step -> PackedBatch` of worked examples; None without a warm start.
        warm_update: one supervised step.
        fixed_drafters: served weights of drafters that are not trained here, by name.
        replay: arms of each step to repeat, or None.
        identity: what a checkpoint must agree with to be resumed, as flat JSON.
        disagreement: the share of stored tokens that given weights would not choose, or None.
        generator_device: what the engine runs on where it has a device of its own, else None.
        drafter_name: under which the engine knows the trained drafter.
        adapting: when the drafter is trained, and what its acceptance says.
        frozen_update: an `update` that leaves the drafter alone, for steps in which `adapting` does not ask for more; None where
            there is but one way.
    """

    model_config: ModelConfig
    tokenizer: Any
    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    scorer: Scorer
    engine: Any
    strategies: tuple[Strategy, ...]
    bandit: Bandit
    controller: str
    history: HistoryStore | None
    init_learner: Callable[[], LearnerState]
    prepare: Callable[[LearnerState, Any, int], Any]
    update: Callable[[LearnerState, PackedBatch], tuple[LearnerState, dict[str, Any]]]
    begin_rl: Callable[[LearnerState], LearnerState]
    warm_batch: Callable[[int], PackedBatch] | None
    warm_update: Update | None
    fixed_drafters: Mapping[str, Any]
    replay: Mapping[int, list[int]] | None
    identity: Mapping[str, Any]
    eval_scorer: Scorer | None = None
    disagreement: Measure | None = None
    generator_device: jax.Device | None = None
    drafter_name: str = "eagle"
    adapting: Adapting = dataclasses.field(default_factory=Adapting)
    frozen_update: Callable[[LearnerState, PackedBatch], tuple[LearnerState, dict[str, Any]]] | None = None

    @property
    def off(self) -> int:
        """The arm that does not speculate."""
        return next(i for i, s in enumerate(self.strategies) if not s.speculates)

    def describe(self) -> str:
        """The model in a few words, for the log."""
        m = self.model_config
        return f"{m.family} of {m.num_layers} layers and width {m.hidden_size}, vocabulary {m.vocab_size}"
