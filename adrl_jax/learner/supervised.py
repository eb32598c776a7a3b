"""Supervised updates on given responses: warm start of a policy, jointly with its drafter."""

from collections.abc import Sequence

import jax
import numpy as np
import optax

from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.learner import losses
from adrl_jax.learner.forward import Forward, ForwardConfig
from adrl_jax.learner.losses import Loss
from adrl_jax.learner.update import Update, make_objective_update
from adrl_jax.models.families import ModelConfig
from adrl_jax.types import FinishReason, PackedBatch, Rollout, SamplingParams


def examples(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Rollout]:
    """Records for `packing.pack` from (prompt ids, response ids); each pair is a group of its own.

    The response should hold its end token. Log-probs are 0: nobody sampled these tokens, and no supervised loss reads them.
    """
    return [
        Rollout(
            prompt_id=i,
            visit=0,
            sample=0,
            group_id=i,
            token_ids=np.concatenate([np.asarray(prompt, np.int32), np.asarray(response, np.int32)]),
            prompt_length=len(prompt),
            response_length=len(response),
            log_probs=np.zeros(len(response), np.float32),
            policy_versions=np.zeros(len(response), np.int32),
            finish_reason=FinishReason.STOP,
            sampling=SamplingParams(),
        )
        for i, (prompt, response) in enumerate(pairs)
    ]


def cross_entropy_objective(out: Forward, batch: PackedBatch) -> Loss:
    """Mean over all response tokens of the batch of -log p."""
    return losses.over_rows(jax.vmap(losses.cross_entropy)(out.log_probs, out.entropy, batch.target_mask))


def make_supervised_update(
    model_config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    microbatch_rows: int,
    valid_vocab: int | None = None,
    remat: bool = False,
    vocab_block: int | None = None,
    kernels: str = "xla",
    drafter: DrafterLossConfig | None = None,
    drafter_optimizer: optax.GradientTransformation | None = None,
) -> Update:
    """Cross-entropy on response tokens, at temperature 1, with the state, metrics and drafter of `update.make_update`."""
    return make_objective_update(
        model_config,
        ForwardConfig(1.0, valid_vocab, remat, vocab_block, kernels),
        cross_entropy_objective,
        optimizer,
        mesh,
        microbatch_rows=microbatch_rows,
        drafter=drafter,
        drafter_optimizer=drafter_optimizer,
    )
