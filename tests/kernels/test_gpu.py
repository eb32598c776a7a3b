"""The kernels for GPUs: lowered for CUDA on a CPU, refused where they cannot, and (where JAX has the interpreter) run by it.

No GPU is needed, and none has run them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adrl_kernels.choice import UnsupportedError
from adrl_kernels.commit import api as commit_api
from adrl_kernels.log_probs import api as log_probs_api
from adrl_kernels.mosaic_gpu import gumbel
from adrl_kernels.noise import gumbel_in_kernel
from adrl_kernels.sample_head import api as head_api
from adrl_kernels.sample_head import pallas_gpu as head_gpu
from adrl_kernels.verify_attention import pallas_gpu as attention_gpu
from adrl_kernels.verify_attention import reference, verify_attention
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_world import attention_case
from test_sample_head import head_case, oracle

ATTENTION = {
    "contiguous": dict(dim=64, capacity=192, count=3, group=2, batch=2),
    "pages": dict(dim=128, capacity=256, page=128, count=8, group=7, batch=2),
}
interpreter = pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX has no public interpreter for GPUs")


def lowered(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def finite(case):
    """The same without NaN in dead entries, which this kernel does not promise to survive, and with legal dead pages."""
    nodes, cache, lengths = case
    table = None if cache.table is None else jnp.maximum(cache.table, 0)
    return nodes, cache._replace(keys=jnp.nan_to_num(cache.keys), values=jnp.nan_to_num(cache.values), table=table), lengths


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_lowers(case):
    case = attention_case(dtype=jnp.bfloat16, **ATTENTION[case])
    run = functools.partial(verify_attention, implementation="pallas_gpu")
    assert "mosaic_gpu" in lowered(run, *case)


@pytest.mark.parametrize("by_row", (True, False))
def test_sample_head_lowers(by_row):
    arrays, _ = head_case(count=70, size=576, vocab=320, valid=290, draws=1, dtype=jnp.bfloat16, by_row=by_row)
    run = functools.partial(head_api.sample_head, by_row=by_row, valid_vocab=290, implementation="pallas_gpu")
    assert "mosaic_gpu" in lowered(run, *arrays)


@pytest.mark.slow
@interpreter
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_interpreted(case):
    case = attention_case(dtype=jnp.bfloat16, **ATTENTION[case])
    found = attention_gpu.verify_attention(*finite(case), interpret=plgpu.InterpretGPUParams())
    np.testing.assert_allclose(found.astype(jnp.float32), reference.verify_attention(*case), atol=2e-2)


@pytest.mark.slow
@interpreter
def test_sample_head_interpreted():
    # Whole tiles, and no transposition: the interpreter knows neither copies that are filled up nor transposed operands.
    arrays, options = head_case(count=5, size=320, vocab=384, valid=370, draws=1, dtype=jnp.bfloat16, by_row=False)
    arrays = (arrays[0], jnp.nan_to_num(arrays[1]), *arrays[2:])
    found = head_gpu.sample_head(*arrays, **options, interpret=plgpu.InterpretGPUParams())
    ids, scores, log_probs = oracle(arrays, options)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.scores, scores, atol=1e-4)
    np.testing.assert_allclose(found.log_probs, log_probs, atol=1e-4)


def test_its_noise_is_the_samplers():
    words = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    words[:6] = [0, 1, 255, 256, 2**32 - 1, 2**31]
    found, expected = (np.asarray(f(jnp.asarray(words))) for f in (gumbel, gumbel_in_kernel))
    # 2 ulp of the value, or of the logarithm's argument where the value is near 0.
    np.testing.assert_array_less(np.abs(found - expected), 2 * np.spacing(np.maximum(np.abs(expected), 1)) + 1e-12)


def test_what_it_cannot_do_is_refused():
    for expected, options in {
        "queries are float32; bfloat16": dict(dim=64),
        "the cache is int8": dict(dim=64, int8=True, dtype=jnp.bfloat16),
        "head size 16; 64 and 128": dict(dtype=jnp.bfloat16),
        "sliding windows are not supported": dict(dim=64, dtype=jnp.bfloat16, window=9),
        "pages of 96 tokens; multiples of 64": dict(dim=64, dtype=jnp.bfloat16, page=96),
        "a capacity of 300 tokens; multiples of 64": dict(dim=64, dtype=jnp.bfloat16),
    }.items():
        with pytest.raises(UnsupportedError, match=expected):
            verify_attention(*attention_case(**options), implementation="pallas_gpu")
    arrays, _ = head_case(count=3, size=72, vocab=304, valid=304, draws=1, dtype=jnp.bfloat16)
    with pytest.raises(UnsupportedError, match="hidden size 72; multiples of 64"):
        head_api.sample_head(*arrays, implementation="pallas_gpu")


def test_ops_without_a_gpu_kernel_say_that_xla_runs_them(caplog):
    from adrl_kernels import choice

    choice.told.cache_clear()
    nodes, cache, _ = attention_case(batch=1, count=2, capacity=24, lengths=(3,))
    one = jnp.ones(1, jnp.int32)
    with caplog.at_level("INFO", logger="adrl_kernels"):
        commit = functools.partial(commit_api.commit, implementation="pallas_gpu")
        jax.eval_shape(commit, cache, nodes.keys, nodes.values, one[:, None], one, one)
        log_probs = functools.partial(log_probs_api.token_log_probs, implementation="pallas_gpu")
        jax.eval_shape(log_probs, jnp.ones((5, 2)), jnp.ones((3, 2)), jnp.zeros(3, jnp.int32))
    assert [r.message.split(":")[0] for r in caplog.records] == ["commit runs on xla", "log_probs runs on xla"]
