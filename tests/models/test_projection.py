"""Weights stored `[out, in]`: the same product, and the same model, in either layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.models import projection, transformer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.projection import project
from adrl_jax.speculation.eagle import Eagle


@pytest.mark.parametrize("dtype,tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(1, 1), (5,), (7,), (8,), (4, 3), (2, 70)])
def test_product_against_float64(shape, dtype, tolerance):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(*shape, 48)), rng.normal(size=(40, 48)) / 7
    got = jax.jit(project)(jnp.asarray(x, dtype), jnp.asarray(weight))
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), x @ weight.T, rtol=tolerance, atol=10 * tolerance)


def test_only_few_rows_go_weight_first_and_only_on_cpu():
    weight = jax.ShapeDtypeStruct((40, 48), jnp.float32)

    def barriers(rows, platform):
        x = jax.ShapeDtypeStruct((rows, 48), jnp.float32)
        text = jax.jit(project).trace(x, weight).lower(lowering_platforms=(platform,)).as_text()
        return text.count("optimization_barrier")

    assert barriers(4, "cpu") == 2
    assert barriers(1000, "cpu") == barriers(4, "tpu") == barriers(4, "cuda") == 0


@pytest.mark.parametrize("tied", [True, False])
def test_engine_layout_is_the_same_model(tied, monkeypatch):
    monkeypatch.setattr(projection, "_LARGE", 1)
    config = ModelConfig("llama", 13, 16, 32, 2, 2, 1, 8, tie_embeddings=tied)
    params = transformer.init_params(config, jax.random.key(0))
    served = transformer.engine_layout(params, config)
    assert "kernel_t" in served["layer_0"]["mlp"]["down"] and ("head_t" in served) != tied
    tokens = jnp.array([[3, 1, 4, 1, 5]])
    positions = jnp.arange(5)[None]

    def run(params):
        causal = lambda q, k, v, *, layer, window, cache: (jnp.cumsum(q * v, axis=1), cache)  # noqa: E731
        hidden, _ = transformer.Transformer(config).apply({"params": params}, tokens, positions, attend=causal)
        return transformer.logits(params, hidden)

    np.testing.assert_allclose(run(served), run(params), rtol=1e-5, atol=1e-6)


def test_engine_layout_of_a_drafter(monkeypatch):
    monkeypatch.setattr(projection, "_LARGE", 1)
    config = ModelConfig("llama", 13, 16, 32, 2, 2, 1, 8)
    params = Eagle(config).init_params(jax.random.key(0))
    served = transformer.engine_layout(params, config)
    np.testing.assert_array_equal(served["fc"]["kernel_t"], params["fc"]["kernel"].T)
    assert jax.tree.structure(jax.tree.map(jnp.ndim, params)) != jax.tree.structure(jax.tree.map(jnp.ndim, served))


def test_engine_layout_leaves_ids_alone():
    config = ModelConfig("llama", 70_000, 8, 8, 1, 1, 1, 8, dtype="bfloat16")
    ids = jnp.array([0, 257, 69_999], jnp.int32)
    served = transformer.engine_layout({"draft_ids": ids, "fc": {"kernel": jnp.ones((2, 2))}}, config)
    np.testing.assert_array_equal(served["draft_ids"], ids)
    assert served["draft_ids"].dtype == jnp.int32 and served["fc"]["kernel"].dtype == jnp.bfloat16
