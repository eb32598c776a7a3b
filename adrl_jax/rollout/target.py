"""The target's side of a round: how its attention and its draws are computed, by XLA or by the accelerator kernels.

What is computed does not depend on it: the same random bits, the same law, sums in another order.

Shapes as in `round`.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from adrl_kernels import choice
from adrl_kernels.sample_head import api as head
from adrl_kernels.sample_head import pallas_tpu as head_on_tpu

from adrl_jax.models import kernel_attention, transformer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import cached_attention
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import choose
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.strategy import Strategy

if TYPE_CHECKING:
    from adrl_jax.rollout.round import RoundConfig


def resolve(kernels: str, model: ModelConfig, strategies: tuple[Strategy, ...], max_batch: int) -> str:
    """What `EngineConfig.kernels` stands for on this machine; `auto` is told once with the reason.

    Raises:
        ValueError: the name is unknown, or its kernels do not run here.
        choice.UnsupportedError: they cannot serve the model or one of the strategies.
    """
    choice.check_platform(kernels, "EngineConfig.kernels")
    widest = max(max(s.verify_tokens, s.depth + 1) for s in strategies)

    def problem(name: str) -> str | None:
        if name == "xla":
            return None
        hidden = jax.ShapeDtypeStruct((max_batch * widest, model.hidden_size), model.compute_dtype)
        weight = jax.ShapeDtypeStruct((model.vocab_size, model.hidden_size), model.compute_dtype)
        drawing = choice.gpu_module("sample_head") if name == "pallas_gpu" else head_on_tpu
        attending = kernel_attention.problem(name, model, widest, max_batch, capacity=1024)
        return attending or drawing.problem(hidden, weight, 1)

    return choice.resolve("engine", kernels, problem)


def with_kernels(drafter: Drafter, kernels: str) -> Drafter:
    """The drafter with `kernels` for its attention, where it has a say in that.

    Its draws stay with XLA. Those of a chain need logits of one position a row, few bytes beside the weights that are read;
    trees also weigh their nodes by sums over the vocabulary that `sample_head` does not make.
    """
    if hasattr(drafter, "learned"):
        return dataclasses.replace(drafter, learned=with_kernels(drafter.learned, kernels))
    return dataclasses.replace(drafter, kernels=kernels) if hasattr(drafter, "kernels") else drafter


def attention_of(config: "RoundConfig", positions: jax.Array):
    """An `attend` for a plain step or a drafted chain; see `kv_cache.cached_attention`."""
    if config.kernels == "xla":
        return cached_attention(positions)
    return kernel_attention.chain_attention(positions, config.kernels)


def draws_from_hidden(config: "RoundConfig") -> bool:
    """Whether `own_tokens` does without logits in memory. Filters and rejection sampling need them whole."""
    return config.kernels != "xla" and config.verification == "coupled" and not config.law.filtered


def own_tokens(
    config: "RoundConfig", params: Any, hidden: jax.Array, temperature: jax.Array, request_keys: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The target's own token at each position, and its log-prob.

    Args:
        hidden: `[B, N, H]`.
        temperature: float32 `[B]`.
        request_keys: uint32 `[B, 2]`.
        positions: int32 `[B, N]`, absolute positions of the tokens being chosen.

    Returns:
        int32 and float32 `[B, N]`.
    """
    keys = noise.position_keys(request_keys, positions, noise.Role.TARGET)
    hidden = transformer.final_hidden(hidden, config.model)
    if not draws_from_hidden(config):
        if config.kernels != "xla":
            choice.told("sample_head", "xla", "the sampling law has filters, which need all logits at once")
        return choose(transformer.logits(params, hidden), temperature, keys, config.law)
    shape = hidden.shape[:2]
    weight = params["head"] if "head" in params else params.get("head_t", params["embedding"])
    draws = head.sample_head(
        hidden.reshape(-1, hidden.shape[-1]),
        weight.astype(hidden.dtype),
        keys.reshape(-1, 2),
        jnp.broadcast_to(temperature[:, None], shape).reshape(-1),
        by_row="head" not in params,
        valid_vocab=config.law.valid_vocab,
        implementation=config.kernels,
    )
    return draws.ids.reshape(shape), draws.log_probs.reshape(shape)
