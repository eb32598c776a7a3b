"""A tiny model, rollouts with known log-probs, and gradients of packed batches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.learner import packing, update
from adrl_jax.learner.forward import ForwardConfig
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import Transformer, init_params, logits
from adrl_jax.types import FinishReason, Rollout, SamplingParams

TINY = ModelConfig("llama", 97, 32, 48, 2, 4, 2, 8)
ONE_LAYER = dataclasses.replace(TINY, num_layers=1)  # compiles faster; enough where layers do not matter
LONGEST = 24
WINDOWED = ModelConfig(
    "gemma3", 97, 32, 48, 3, 4, 2, 8, qk_norm=True, norm_offset=1.0, post_norms=True, sliding_window=5, sliding_pattern=3
)


def params_of(config=TINY, seed=0, scale=6.0):
    # Larger than the usual initialisation: laws far from uniform make mistakes visible.
    return jax.tree.map(
        lambda x: x * scale if x.ndim == 2 else x + 0.1 * np.sin(np.arange(x.size)).astype(np.float32),
        init_params(config, jax.random.key(seed)),
    )


def make_rollouts(groups=((5, (1, 7, 4)), (3, (6,)), (9, (2, 1, 3, 8, 4))), seed=0, vocab=97):
    """Groups of (prompt length, response lengths) with random tokens, log-probs and versions."""
    rng = np.random.default_rng(seed)
    out = []
    for g, (p, lengths) in enumerate(groups):
        prompt = rng.integers(0, vocab, p)
        for s, r in enumerate(lengths):
            out.append(
                Rollout(
                    prompt_id=g,
                    visit=0,
                    sample=s,
                    group_id=g,
                    token_ids=np.concatenate([prompt, rng.integers(0, vocab, r)]).astype(np.int32),
                    prompt_length=p,
                    response_length=r,
                    log_probs=rng.normal(-4, 1, r).astype(np.float32),
                    policy_versions=np.zeros(r, np.int32),
                    finish_reason=FinishReason.STOP,
                    sampling=SamplingParams(),
                )
            )
    return out


def advantages_for(rollouts, seed=1):
    return list(np.random.default_rng(seed).normal(size=len(rollouts)).astype(np.float32))


def with_behaviour(config, params, rollouts, temperature=1.0, noise=0.0):
    """The same rollouts with log-probs of a plain forward pass a sequence, the engine's stand-in."""
    out = []
    for r in rollouts:
        law = jax.nn.log_softmax(plain_logits(config, params, r.token_ids) / temperature, axis=-1)
        lp = np.asarray(law)[np.arange(r.prompt_length - 1, len(r.token_ids) - 1), r.response_ids]
        lp = lp + noise * np.random.default_rng(len(lp)).normal(size=len(lp))
        out.append(dataclasses.replace(r, log_probs=lp.astype(np.float32)))
    return out


@functools.lru_cache
def plain_forward(config):
    """Logits of sequences of `LONGEST` tokens, nothing packed; what follows a sequence's end does not reach it."""

    def attend(q, k, v, *, layer, window, cache):
        groups = q.shape[2] // k.shape[2]
        scores = jnp.einsum("btnd,bsnd->bnts", q, jnp.repeat(k, groups, axis=2))
        back = jnp.arange(LONGEST)[:, None] - jnp.arange(LONGEST)[None]
        seen = (back >= 0) if window is None else (back >= 0) & (back < window)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bsnd->btnd", weights, jnp.repeat(v, groups, axis=2)), cache

    @jax.jit
    def run(params, tokens):
        positions = jnp.arange(LONGEST)[None]
        return logits(params, Transformer(config).apply({"params": params}, tokens[None], positions, attend=attend)[0][0])

    return run


def plain_logits(config, params, token_ids):
    padded = np.pad(token_ids, (0, LONGEST - len(token_ids)))
    return plain_forward(config)(params, padded)[: len(token_ids)]


ENTROPY = LossConfig(entropy_coef=0.01)


@functools.lru_cache
def compiled_gradients(config, devices, microbatch_rows, loss, temperature):
    return jax.jit(
        update.make_gradients(
            config,
            ForwardConfig(temperature, vocab_block=40),
            update.policy_objective(loss),
            update.data_mesh(devices),
            microbatch_rows,
            entropy_gradient=loss.entropy_coef != 0,
        ),
        static_argnums=3,
    )


def gradients_of(config, params, batch, *, devices=1, microbatch_rows=None, loss=ENTROPY, temperature=1.0):
    rows = batch.token_ids.shape[0] // devices if microbatch_rows is None else microbatch_rows
    sums = compiled_gradients(config, devices, rows, loss, temperature)(params, None, batch)
    denominator = np.asarray(sums.loss.denominator)
    return float(sums.loss.numerator / denominator), jax.tree.map(lambda g: np.asarray(g) / denominator, sums.grads)


def assert_same(a, b, tolerance=1e-5):
    """Losses equal, and per leaf ||difference|| <= tolerance ||gradient||."""
    np.testing.assert_allclose(a[0], b[0], rtol=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(a[1]), jax.tree.leaves(b[1]), strict=True):
        norm = np.linalg.norm(x)
        assert norm > 0, path
        assert np.linalg.norm(x - y) <= tolerance * norm, (jax.tree_util.keystr(path), np.linalg.norm(x - y) / norm)


def padded(rollouts, advantages, rows=8, row_length=LONGEST):
    """One rollout a row, in order; the rest is padding."""
    batch = packing.empty_batch(rows, row_length, row_length)
    for i, (r, a) in enumerate(zip(rollouts, advantages, strict=True)):
        one = packing.pack([r], [a], row_length=row_length, layout="plain")
        for whole, part in zip(batch, one, strict=True):
            if whole is not None:
                whole[i] = part[0]
        batch.rollout_index[i] = i
    return batch
