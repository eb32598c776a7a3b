"""Reward models: a scalar at the end of a response, trained on preferences (Bradley and Terry 1952; arXiv 2203.02155, §3.5).

A reward model reads prompt, response and, where the response ended by itself, its end token, and its reward is the scalar at the
last of these. Shapes: `M` rows, `U` targets a row, `N` responses.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy

from adrl_jax.learner import losses, packing, scalar, sequences, supervised
from adrl_jax.learner.aggregation import aggregation_weights
from adrl_jax.learner.forward import ForwardConfig
from adrl_jax.learner.losses import Loss
from adrl_jax.learner.update import Update, make_objective_update
from adrl_jax.models import weights
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.safetensors_file import read_json
from adrl_jax.models.tokenizer import Tokenizer
from adrl_jax.types import PackedBatch, Prompt, Score

HEAD, RECORD = "scalar_head.safetensors", "reward_model.json"


@dataclasses.dataclass(frozen=True)
class RewardModel:
    """Attributes: config and tokenizer of its body; params, see `scalar`; record, facts about its training."""

    config: ModelConfig
    tokenizer: Tokenizer
    params: Any
    record: dict[str, Any] = dataclasses.field(default_factory=dict)


def bradley_terry(after, signs, mask, owner, group) -> Loss:
    """-log sigmoid(s(chosen) - s(rejected)) of the pairs of one row, `[U]` each, mean over pairs.

    Args:
        after: float32, the scalar at each token.
        signs: +1 for tokens of the chosen response, -1 for the rejected one's.
        group: int32, which pair a token belongs to; a pair lies in one row.
    """
    numbers = sequences.sequence_numbers(owner, mask)
    last = mask & jnp.concatenate([(numbers[1:] != numbers[:-1]) | ~mask[1:], jnp.ones(1, bool)])
    margin = sequences.sums(jnp.where(last, signs * after, 0.0), group, mask)
    share, pairs = aggregation_weights(owner, mask, "group", group_index=group)

    def mean(values):
        return jnp.sum(jnp.where(mask, share * values, 0.0))

    sums = {
        "tokens": jnp.sum(mask, dtype=jnp.float32),
        "entropy": jnp.float32(0.0),
        "mean/accuracy": mean((margin > 0).astype(jnp.float32)),
        "mean/margin": mean(margin),
    }
    return Loss(mean(-jax.nn.log_sigmoid(margin)), pairs, jax.lax.stop_gradient(sums), {})


def make_reward_update(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    microbatch_rows: int,
    remat: bool = False,
) -> Update:
    """`update(state, batch) -> (state, metrics)` on batches of `pairs_batch`; `state.params` is a scalar model's."""

    def objective(out, batch: PackedBatch) -> Loss:
        rows = (out[1], batch.advantages, batch.target_mask, batch.rollout_index, batch.group_index)
        return losses.over_rows(jax.vmap(bradley_terry)(*rows))

    def network(params, batch, *, reach):
        return scalar.scalars(params, batch, config=config, reach=reach, remat=remat)

    return make_objective_update(
        config, ForwardConfig(), objective, optimizer, mesh, microbatch_rows=microbatch_rows, network=network
    )


Pair = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(prompt ids, chosen response ids, rejected response ids), end tokens included."""


def pairs_batch(pairs: Sequence[Pair], **sizes: Any) -> PackedBatch:
    """Packs preference pairs, both sides in one row; `sizes` as in `packing.pack`."""
    rollouts = supervised.examples([(prompt, side) for prompt, *sides in pairs for side in sides])
    rollouts = [dataclasses.replace(r, group_id=i // 2) for i, r in enumerate(rollouts)]
    return packing.pack(rollouts, [1.0, -1.0] * len(pairs), together=True, **sizes)


class Rewarder:
    """Scores responses with a reward model; it can stand in for a task's scorer.

    Args:
        row_length: tokens of a packed row; longer responses are an error.
        rows: rows of a pass.
    """

    def __init__(self, model: RewardModel, row_length: int, rows: int = 16):
        self.model, self._row_length, self._rows = model, row_length, rows
        self._scalars = scalar.make_scalars(model.config)

    def values(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Rewards float32 `[N]` of (prompt ids, response ids).

        Raises:
            ValueError: a response does not fit into a row.
        """
        rollouts = supervised.examples(pairs)
        if not rollouts:
            return np.zeros(0, np.float32)
        batch = packing.pack(
            rollouts,
            np.zeros(len(rollouts), np.float32),
            row_length=self._row_length,
            row_multiple=self._rows,
            target_multiple=self._row_length,
            layout="plain",
        )
        out = []
        for start in range(0, len(batch.token_ids), self._rows):
            part = jax.tree.map(lambda x, start=start: x[start : start + self._rows], batch)
            out.append(np.asarray(self._scalars(self.model.params, part)[1]))
        return np.array([v[-1] for v in packing.unpack_targets(batch, np.concatenate(out), len(rollouts))], np.float32)

    def __call__(self, items: Sequence[tuple[Prompt, str, bool]]) -> list[Score]:
        """As `runtime.collect.Scorer`: each text is encoded with the model's own tokenizer, and ends where it ended."""
        found = self.values([(self._ids(p.text), self._ids(text, ended=not cut)) for p, text, cut in items])
        return [Score(float(v), None, "match", {"reward_model": float(v)}) for v in found]

    def _ids(self, text: str, ended: bool = False) -> np.ndarray:
        ids = np.asarray(self.model.tokenizer.encode(text), np.int32)
        # A response that was cut off before its first token still needs a place to be read at.
        if ended or not ids.size:
            ids = np.append(ids, self.model.tokenizer.eos_ids[0]).astype(np.int32)
        return ids


def calibration(margins: np.ndarray, bins: int = 10) -> dict[str, float]:
    """How honest sigmoid(margin) is as a probability that the chosen response is better.

    Each pair counts once, from the side the model prefers. Returns `accuracy`, `log_loss` (nats), `brier` and `ece` (expected
    calibration error over `bins` equal bins of confidence).
    """
    margins = np.asarray(margins, np.float64)
    if margins.size == 0:
        raise ValueError("calibration of no pairs")
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    right = (margins > 0).astype(np.float64)
    place = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    gap = 0.0
    for b in np.unique(place):
        own = place == b
        gap += own.mean() * abs(confidence[own].mean() - right[own].mean())
    return {
        "accuracy": float(right.mean()),
        "log_loss": float(np.logaddexp(0, -margins).mean()),
        "brier": float(np.mean((confidence - right) ** 2)),
        "ece": float(gap),
    }


def save(folder: str | pathlib.Path, model: RewardModel) -> None:
    """Writes the body as a Hugging Face folder, the scalar head and the record beside it."""
    folder = pathlib.Path(folder)
    weights.save_hf(folder, model.config, model.params["body"], model.tokenizer)
    head = {name: np.asarray(x).reshape(-1) for name, x in model.params["head"].items()}
    safetensors.numpy.save_file(head, str(folder / HEAD), metadata={"format": "np"})
    (folder / RECORD).write_text(json.dumps(model.record, indent=2) + "\n")


def load(folder: str | pathlib.Path, like: ModelConfig | None = None) -> RewardModel:
    """What `save` wrote.

    Args:
        like: sizes that its body must have, where a value model is to start from it.

    Raises:
        FileNotFoundError: the folder or one of its files is absent.
        ValueError: its sizes differ from `like`.
    """
    folder = pathlib.Path(folder)
    for name in (HEAD, RECORD):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: absent; experiments.reward_model writes it")
    body = weights.load(folder)
    for name in ("family", "vocab_size", "hidden_size", "num_layers"):
        if like is not None and getattr(body.config, name) != getattr(like, name):
            raise ValueError(
                f"{folder}: a reward model of another size: {name}={getattr(body.config, name)!r}, here {getattr(like, name)!r}"
            )
    head = safetensors.numpy.load_file(str(folder / HEAD))
    params = {"body": body.params, "head": {"kernel": jnp.array(head["kernel"]), "bias": jnp.array(head["bias"][0])}}
    return RewardModel(body.config, body.tokenizer, params, read_json(folder / RECORD))


def from_policy(config: ModelConfig, tokenizer: Tokenizer, params: Any, key: jax.Array) -> RewardModel:
    """A fresh reward model on a policy's weights."""
    body = dataclasses.replace(config, tie_embeddings=True)  # it has no output projection to untie
    return RewardModel(body, tokenizer, scalar.from_policy(params, key))
