"""sample_head: one definition of the bits, exact draws, and the same ids from every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from adrl_kernels.choice import UnsupportedError
from adrl_kernels.noise import gumbel_in_kernel, hash_ids
from adrl_kernels.sample_head import api, pallas_tpu, reference
from adrl_kernels.sample_head.arguments import Norm, minimum_bytes
from jax.experimental import pallas as pl
from kernel_world import TPU_INTERPRET

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, choose
from adrl_jax.speculation.tree import make_branch

RUNS = {
    "xla": functools.partial(reference.sample_head, precision=None),
    "interpret": functools.partial(pallas_tpu.sample_head, interpret=True),
    "tpu_interpret": functools.partial(pallas_tpu.sample_head, interpret=TPU_INTERPRET),
}
CASES = {
    "ragged tiles": dict(count=9, size=24, vocab=300, valid=290, draws=3),
    "columns, norm": dict(count=5, size=40, vocab=130, valid=130, draws=1, by_row=False, norm=True),
}
WIDE = {
    "one position": dict(count=1, size=128, vocab=1025, valid=1025, draws=1),
    "many positions": dict(count=300, size=64, vocab=700, valid=699, draws=2),
    "bfloat16": dict(count=17, size=256, vocab=2000, valid=1990, draws=4, dtype=jnp.bfloat16),
    "sixteen": dict(count=8, size=64, vocab=257, valid=130, draws=16),
}


def head_case(count, size, vocab, valid, draws, by_row=True, norm=False, dtype=jnp.float32, seed=0):
    """Arrays and options; weights of ids that are not valid are NaN."""
    rng = np.random.default_rng(seed)
    weight = np.where(np.arange(vocab)[:, None] < valid, rng.normal(size=(vocab, size)), np.nan)
    keys = noise.position_keys(noise.request_keys(seed, np.arange(count), 0, 0), np.full((count, 1), 7), noise.Role.TARGET)[
        :, 0
    ]
    temperature = np.resize([1.0, 0.0, 0.7, 1.9], count).astype(np.float32)
    arrays = (
        jnp.asarray(rng.normal(size=(count, size)), dtype),
        jnp.asarray(weight if by_row else weight.T, dtype),
        jnp.asarray(keys),
        jnp.asarray(temperature),
    )
    scale = Norm(jnp.asarray(rng.uniform(0.5, 2, size), jnp.float32), 1e-5) if norm else None
    return arrays, dict(by_row=by_row, valid_vocab=valid, draws=draws, norm=scale)


def oracle(arrays, options):
    """ids, scores and log-probs in float64; the noise is that of `adrl_jax.sampling.noise`."""
    hidden, weight, keys, temperature = (np.asarray(x) for x in arrays)
    x = hidden.astype(np.float64)
    if options["norm"] is not None:
        x = (
            x
            / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + options["norm"].eps)
            * np.asarray(options["norm"].weight, np.float64)
        )
    w = weight.astype(np.float64)
    logits = (x @ (w.T if options["by_row"] else w))[:, : options["valid_vocab"]]
    u = (noise.bits(keys, options["valid_vocab"]).astype(np.float64) + 0.5) / 2.0**32
    gumbel = -np.log(-np.log1p(-u))
    greedy = temperature[:, None] == 0
    scaled = logits / np.where(greedy, 1, temperature[:, None])
    scores = scaled + np.where(greedy, 0, gumbel)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, : options["draws"]]
    log_p = scaled - np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1, keepdims=True)) - scaled.max(1, keepdims=True)
    limit = np.where(np.arange(options["draws"]) == 0, 0, -np.inf)
    log_probs = np.where(greedy, limit, np.take_along_axis(log_p, ids, 1))
    return ids, np.take_along_axis(scores, ids, 1), log_probs


def compare(run, arrays, options):
    found = jax.jit(functools.partial(run, **options))(*arrays)
    ids, scores, log_probs = oracle(arrays, options)
    np.testing.assert_array_equal(found.ids, ids)
    # Scores are sums of products: what they can be exact to grows with the largest.
    largest = max(1.0, np.abs(scores[:, 0]).max())
    tolerance = dict(rtol=0, atol=2e-6 * largest) if arrays[0].dtype == jnp.float32 else dict(rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found.scores, scores, **tolerance)
    np.testing.assert_allclose(found.log_probs, log_probs, **tolerance)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_best_ids_and_their_log_probs(case, name):
    if name == "tpu_interpret" and case != "columns, norm":
        pytest.skip("in test_all_shapes, which is slow")
    compare(RUNS[name], *head_case(**CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("case", WIDE)
def test_all_shapes(case, name):
    compare(RUNS[name], *head_case(**WIDE[case], seed=3))


def test_bits_are_those_of_the_sampler_on_every_backend():
    keys = jnp.asarray(noise.request_keys(5, np.arange(8), 1, 2))

    def kernel(keys, bits, gumbel):
        as_bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32)  # noqa: E731
        ids = as_bits(jax.lax.broadcasted_iota(jnp.int32, bits.shape, 1))
        found = hash_ids(as_bits(keys[:, 0:1]), as_bits(keys[:, 1:2]), ids)
        bits[...] = jax.lax.bitcast_convert_type(found, jnp.int32)
        gumbel[...] = gumbel_in_kernel(found)

    out = [jax.ShapeDtypeStruct((8, 512), d) for d in (jnp.int32, jnp.float32)]
    signed = jax.lax.bitcast_convert_type(keys, jnp.int32)
    expected = noise.bits(np.asarray(keys), 512)
    np.testing.assert_array_equal(noise.bits(keys, 512), expected)
    np.testing.assert_array_equal(reference.bits(keys, 512), expected)
    for interpret in (True, TPU_INTERPRET):
        bits, gumbel = pl.pallas_call(kernel, out_shape=out, interpret=interpret)(signed)
        np.testing.assert_array_equal(np.asarray(bits).view(np.uint32), expected)
        ulps = np.abs(np.asarray(gumbel).view(np.int32) - np.asarray(noise.gumbel(keys, 512)).view(np.int32))
        assert ulps.max() <= 2


@pytest.mark.parametrize("implementation", ("xla", "interpret"))
def test_the_noise_of_the_op_itself_is_the_samplers(implementation):
    """With hidden states of 0 the scores are the noise: the best 16 of 300 ids, over three tiles, to 2 ulp."""
    keys = jnp.asarray(noise.request_keys(9, np.arange(16), 0, 0))
    run = functools.partial(api.sample_head, draws=16, implementation=implementation)
    found = jax.jit(run)(jnp.zeros((16, 8)), jnp.ones((300, 8)), keys, jnp.ones(16))
    expected = np.asarray(noise.gumbel(keys, 300))
    ids = np.argsort(-expected, axis=1)[:, :16]
    np.testing.assert_array_equal(found.ids, ids)
    ulps = np.abs(np.asarray(found.scores).view(np.int32) - np.take_along_axis(expected, ids, 1).view(np.int32))
    assert ulps.max() <= 2


def test_its_draws_are_the_children_of_a_draft_tree():
    """The op's second use: `draws` best ids are what a drafter takes as a node's children under coupled verification."""
    arrays, _ = head_case(count=8, size=16, vocab=300, valid=290, draws=4)
    hidden, weight, keys, _ = arrays
    weight, temperature = jnp.nan_to_num(weight), jnp.full(8, 0.7)
    requests = jnp.asarray(noise.request_keys(0, np.arange(8), 0, 0))
    branch = make_branch("coupled", 4, temperature, requests, Law(valid_vocab=290))
    children = branch((hidden @ weight.T)[:, None], jnp.full(8, 7))
    found = api.sample_head(hidden, weight, keys, temperature, valid_vocab=290, draws=4, implementation="interpret")
    np.testing.assert_array_equal(found.ids, children.tokens[:, 0])


def test_the_upper_tail_of_the_noise_is_exact():
    words = np.array([0, 1, 2, 1000, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    exact = -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) / 2.0**32))
    found = np.asarray(gumbel_in_kernel(jnp.asarray(words)), np.float64)
    np.testing.assert_allclose(found[:-2], exact[:-2], rtol=3e-7, atol=1e-7)
    assert found[0] > 22.8
    assert np.isfinite(found).all() and found[-1] < -2.8


@pytest.mark.parametrize("vocab", (5, 50_000))
def test_the_law_of_the_draws(vocab):
    """Chi-square of draws from one law, ids pooled in order of probability to an expected count of 5 or more."""
    rng = np.random.default_rng(vocab)
    count, size, temperature = (4096 if vocab == 5 else 1024), 4, 0.8
    hidden = rng.normal(size=size).astype(np.float32)
    weight = (rng.normal(size=(vocab, size)) * (1.0 if vocab > 5 else 0.5)).astype(np.float32)
    keys = jnp.asarray(noise.request_keys(1, np.arange(count), 0, 0))
    run = functools.partial(pallas_tpu.sample_head, by_row=True, valid_vocab=vocab, draws=1, norm=None, interpret=True)
    rows = 256  # together
    one = jax.jit(lambda keys: run(jnp.tile(hidden, (rows, 1)), weight, keys, jnp.full(rows, temperature)).ids[:, 0])
    ids = np.concatenate([one(part) for part in jnp.split(keys, count // rows)])
    logits = weight.astype(np.float64) @ hidden / temperature
    law = np.exp(logits - logits.max())
    law /= law.sum()
    order = np.argsort(-law)
    expected, seen = law[order] * len(ids), np.bincount(ids, minlength=vocab)[order]
    cells, mass = [], 0.0
    for i, e in enumerate(expected):
        mass += e
        if (mass >= 5 and expected[i + 1 :].sum() >= 5) or i == 0:
            cells.append(i)
            mass = 0.0
    starts = np.array([0, *(np.array(cells[:-1]) + 1)])
    pooled = [np.add.reduceat(x, starts) for x in (seen, expected)]
    assert pooled[1].min() >= 5 and len(starts) >= 4
    assert scipy.stats.chisquare(*pooled, sum_check=False).pvalue > 1e-3


def test_the_same_token_as_the_engines_own_sampler():
    arrays, _ = head_case(count=64, size=16, vocab=97, valid=90, draws=1)
    hidden, weight, keys, temperature = arrays
    weight = jnp.nan_to_num(weight)
    logits = (hidden @ weight.T)[:, None]
    tokens, log_probs = jax.jit(choose, static_argnums=3)(logits, temperature, keys[:, None], Law(valid_vocab=90))
    run = functools.partial(api.sample_head, valid_vocab=90, implementation="xla")
    found = jax.jit(run)(hidden, weight, keys, temperature)
    np.testing.assert_array_equal(found.ids[:, 0], tokens[:, 0])
    np.testing.assert_allclose(found.log_probs[:, 0], log_probs[:, 0], atol=1e-5)


def test_weights_are_read_once_and_logits_are_never_written():
    for count, size, vocab, dtype in ((8, 576, 49_152, jnp.float32), (128, 3584, 152_064, jnp.bfloat16)):
        hidden, weight = (jax.ShapeDtypeStruct(s, dtype) for s in ((count, size), (vocab, size)))
        layout = pallas_tpu.plan(hidden, weight, by_row=True, valid_vocab=vocab)
        moved = layout.traffic()
        assert moved["weight"] == vocab * size * jnp.dtype(dtype).itemsize
        assert sum(moved.values()) <= 1.05 * minimum_bytes(hidden, weight, True, vocab)


def test_bad_arguments_are_refused():
    arrays, _ = head_case(**CASES["ragged tiles"])
    hidden, weight, keys, temperature = arrays
    for expected, changed in {
        "mixed dtypes: hidden float32, weight bfloat16": (hidden, weight.astype(jnp.bfloat16), keys, temperature),
        r"weight has shape \(24, 300\), expected \[V, 24\]": (hidden, weight.T, keys, temperature),
        r"keys is int32\[9, 2\], expected uint32\[9, 2\]": (hidden, weight, keys.astype(jnp.int32), temperature),
        "temperature contains -1.0, must be finite and >= 0": (hidden, weight, keys, temperature.at[0].set(-1)),
    }.items():
        with pytest.raises(ValueError, match=expected):
            api.sample_head(*changed, implementation="xla")
    with pytest.raises(ValueError, match=r"norm.weight has shape \(8,\), expected \(24,\)"):
        api.sample_head(*arrays, norm=Norm(jnp.ones(8), 1e-5), implementation="xla")
    with pytest.raises(ValueError, match="draws=291 must be between 1 and valid_vocab=290"):
        api.sample_head(*arrays, valid_vocab=290, draws=291, implementation="xla")
    with pytest.raises(ValueError, match="valid_vocab=301 must be between 1 and the weight's 300 ids"):
        api.sample_head(*arrays, valid_vocab=301, implementation="xla")
    with pytest.raises(UnsupportedError, match="17 draws; 1 to 16"):
        api.sample_head(*arrays, draws=17, implementation="interpret")
    with pytest.raises(UnsupportedError, match="float16; float32 and bfloat16"):
        api.sample_head(*(x.astype(jnp.float16) for x in arrays[:2]), *arrays[2:], implementation="interpret")
