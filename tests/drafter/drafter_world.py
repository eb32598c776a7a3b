"""A tiny policy, random texts with the log-probs it gives them, and its hidden states: what the trainers' tests learn from."""

import dataclasses
import functools

import jax
import numpy as np

from adrl_jax.drafter.buffer import DataBuffer, Sample
from adrl_jax.drafter.lessons import unpack_hidden
from adrl_jax.learner import packing
from adrl_jax.learner.forward import ForwardConfig, forward
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import init_params
from adrl_jax.types import FinishReason, Rollout, SamplingParams

TINY = ModelConfig("llama", 41, 32, 48, 2, 4, 2, 8)
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2))
TEMPERATURE = 0.7


@functools.cache
def policy(seed=0):
    """Peaked laws, so that differences show."""
    return jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, init_params(TINY, jax.random.key(seed)))


def texts(count=8, version=0, seed=0):
    rng, out = np.random.default_rng(seed), []
    for i in range(count):
        p, r = int(rng.integers(2, 6)), int(rng.integers(1, 9))
        ids = rng.integers(0, 41, p + r).astype(np.int32)
        versions = np.full(r, version, np.int32)
        facts = (np.zeros(r, np.float32), versions, FinishReason.STOP, SamplingParams(TEMPERATURE))
        out.append(Rollout(i, 0, 0, i, ids, p, r, *facts))
    return out


@functools.partial(jax.jit, static_argnames="taps")
def read(params, batch, taps=()):
    """Hidden states and log-probs of packed rows."""
    out = forward(params, dataclasses.replace(TINY, taps=taps), ForwardConfig(TEMPERATURE), batch)
    return out.hidden, out.log_probs


def seen_by(params, rollouts, taps=()):
    """Per rollout: hidden states `[n - 1, C]` and log-probs `[R]` under a policy."""
    batch = packing.pack(rollouts, [0.0] * len(rollouts), row_length=32)
    hidden, log_probs = read(params, batch, taps)
    return list(
        zip(
            unpack_hidden(batch, hidden, len(rollouts)),
            packing.unpack_targets(batch, log_probs, len(rollouts)),
            strict=True,
        )
    )


def samples(params, version=0, step=0, count=8, taps=()):
    """What the engine hands over: texts, with the log-probs and hidden states of the policy that wrote them."""
    rollouts = texts(count, version)
    found = seen_by(params, rollouts, taps)
    return [
        Sample(dataclasses.replace(r, log_probs=log_probs), hidden, version, step)
        for r, (hidden, log_probs) in zip(rollouts, found, strict=True)
    ]


def buffer_of(params, version=0, row_length=32, taps=()):
    buffer = DataBuffer(1 << 24, row_length)
    buffer.begin_step(0)
    for s in samples(params, version, taps=taps):
        buffer.add(s)
    return buffer
