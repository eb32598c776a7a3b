"""log_probs: values and gradients of every implementation against autodiff of the reference in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adrl_kernels.choice import UnsupportedError
from adrl_kernels.log_probs import api, pallas_tpu, reference
from adrl_kernels.log_probs.xla import Static
from kernel_world import TPU_INTERPRET


def tpu(interpret, matrix, hidden, ids, *, by_row, scale, valid_vocab, entropy_gradient):
    static = Static(True, valid_vocab, valid_vocab, scale, entropy_gradient)
    return pallas_tpu.token_log_probs(static, interpret, matrix if by_row else matrix.T, hidden, ids)


RUNS = {
    "xla": functools.partial(api.token_log_probs, implementation="xla", vocab_block=128),
    "interpret": functools.partial(tpu, True),
    "tpu_interpret": functools.partial(tpu, TPU_INTERPRET),
}
CASES = {"rows": dict(count=21, size=48, vocab=300, valid=290)}
WIDE = {
    "columns": dict(count=300, size=40, vocab=600, valid=600, by_row=False),
    "bfloat16 hidden": dict(count=40, size=128, vocab=1100, valid=1025, dtype=jnp.bfloat16),
    "one target": dict(count=1, size=16, vocab=130, valid=129),
}


def case_of(count, size, vocab, valid, by_row=True, dtype=jnp.float32, seed=0):
    """(matrix, hidden, ids, weights of log-probs, weights of entropies) and options; what is not valid is huge."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(vocab, size)) * 0.4
    matrix[valid:] = 1e4
    hidden = np.asarray(jnp.asarray(rng.normal(size=(count, size)), dtype), np.float64)
    ids = rng.integers(0, valid, count).astype(np.int32)
    ids[0] = valid - 1
    arrays = (matrix if by_row else matrix.T, hidden, ids, rng.normal(size=count), rng.normal(size=count))
    return arrays, dict(by_row=by_row, scale=1 / 1.3, valid_vocab=valid), dtype


def values_and_gradients(run, arrays, dtype, wide):
    matrix, hidden, ids, g, g_entropy = arrays

    def loss(matrix, hidden):
        log_probs, entropy = run(matrix, hidden, jnp.asarray(ids))
        total = jnp.sum(log_probs * jnp.asarray(g, wide)) + jnp.sum(entropy * jnp.asarray(g_entropy, wide))
        return total, (log_probs, entropy)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, out), grads = step(jnp.asarray(matrix, wide), jnp.asarray(hidden, dtype))
    return [np.asarray(x, np.float64) for x in (*out, *grads)]


def compare(run, case):
    arrays, options, dtype = case
    with jax.enable_x64(True):
        exact = values_and_gradients(functools.partial(reference.token_log_probs, **options), arrays, jnp.float64, jnp.float64)
    found = values_and_gradients(functools.partial(run, **options, entropy_gradient=True), arrays, dtype, jnp.float32)
    bound = 2e-6 if dtype == jnp.float32 else 3e-2
    for ours, right in zip(found, exact, strict=True):
        np.testing.assert_allclose(ours, right, atol=bound * max(1.0, np.abs(right).max()), rtol=0)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, name):
    compare(RUNS[name], case_of(**CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("case", WIDE)
def test_all_shapes(case, name):
    compare(RUNS[name], case_of(**WIDE[case], seed=1))


def test_entropy_has_no_gradient_unless_asked():
    arrays, options, _ = case_of(**CASES["rows"])
    matrix, hidden = (jnp.asarray(x, jnp.float32) for x in arrays[:2])
    ids = jnp.asarray(arrays[2])
    entropy = lambda h: jnp.sum(api.token_log_probs(matrix, h, ids, implementation="interpret", **options)[1])  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.grad(entropy))(hidden), 0)


def test_the_projection_is_read_once_and_its_gradient_written_once():
    matrix, hidden = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((49_152, 576), (256, 576)))
    size = 49_152 * 576 * 4
    forward = pallas_tpu.plan(matrix, hidden, 49_152, "forward").traffic()
    assert forward["matrix"] == size
    assert sum(forward.values()) <= 1.05 * api.minimum_bytes(matrix, hidden, 49_152)
    backward = pallas_tpu.plan(matrix, hidden, 49_152, "by_matrix").traffic()
    assert backward["matrix"] == backward["d_matrix"] == size


def test_bad_arguments_are_refused():
    arrays, _, _ = case_of(**CASES["rows"])
    matrix, hidden = (jnp.asarray(x, jnp.float32) for x in arrays[:2])
    ids = jnp.asarray(arrays[2])
    with pytest.raises(ValueError, match=r"matrix has shape \(48, 300\), expected \[V, 48\]"):
        api.token_log_probs(matrix.T, hidden, ids, implementation="xla")
    with pytest.raises(ValueError, match="valid_vocab=301 must be between 1 and the projection's 300"):
        api.token_log_probs(matrix, hidden, ids, valid_vocab=301, implementation="xla")
    with pytest.raises(UnsupportedError, match="hidden is float16"):
        api.token_log_probs(matrix, hidden.astype(jnp.float16), ids, implementation="interpret")
