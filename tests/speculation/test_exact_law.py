"""Whole decoding loops on a language that can be enumerated: five tokens whose law depends on the last two.

200,000 requests decode with the real draft and verify functions; the joint law of the first three tokens is compared with
the product of conditionals by chi-square, and so is each token's law given its past and the fact that the round before it
ended in a rejection.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, log_law
from adrl_jax.speculation import verify
from adrl_jax.speculation.drafter import draft_chain

V, DRAWS, LENGTH, CONTEXT = 5, 200_000, 5, (0, 1)
TABLE = np.random.default_rng(0).normal(size=(V, V, V)).astype(np.float32) * 1.5
DRAFTERS = {
    "near": TABLE + np.random.default_rng(1).normal(size=TABLE.shape).astype(np.float32) * 0.5,
    "adversarial": -2.0 * TABLE,
}


@functools.partial(jax.jit, static_argnames=("method", "depth", "law", "deterministic"))
def decode(table, drafter_table, request_keys, temperature, *, method, depth, law, deterministic=False):
    """Rounds of draft, verify, commit until every row has `LENGTH` tokens.

    Returns tokens `[B, 2 + LENGTH + depth]` (the context first) and, for each place, whether it is the first of a round that
    follows a rejection.
    """
    rows = request_keys.shape[0]
    every = jnp.arange(rows)
    tokens = jnp.zeros((rows, 2 + LENGTH + depth + 1), jnp.int32).at[:, :2].set(jnp.array(CONTEXT))
    draw = verify.make_draw(method, temperature, request_keys, law)

    def step(before, ids, index):
        return drafter_table[before, ids[:, 0]][:, None], ids[:, 0]

    def round_(state):
        tokens, length, fell, after = state
        first = drafter_table[tokens[every, length - 2], tokens[every, length - 1]][:, None]
        # `step` needs the last two tokens: it carries the one before the draft it is fed.
        drafts, log_q, _ = draft_chain(first, step, tokens[every, length - 1], length, draw, depth)
        if deterministic:
            drafts, log_q = jnp.zeros_like(drafts).at[:, 1:].set(3), None
        text = jnp.concatenate([tokens[every, length - 2][:, None], tokens[every, length - 1][:, None], drafts], axis=1)
        logits = table[text[:, :-1], text[:, 1:]]
        positions = length[:, None] + jnp.arange(depth + 1)
        arguments = (logits, drafts, jnp.full(rows, depth), temperature, request_keys, positions, law)
        verdict = verify.coupled(*arguments) if method == "coupled" else verify.rejection(*arguments, log_q)
        running = length < 2 + LENGTH
        count = jnp.where(running, jnp.minimum(verdict.count, 2 + LENGTH - length), 0)
        places = jnp.arange(tokens.shape[1])
        taken = (places >= length[:, None]) & (places < (length + count)[:, None])
        source = jnp.clip(places - length[:, None], 0, depth)
        tokens = jnp.where(taken, jnp.take_along_axis(verdict.tokens, source, axis=1), tokens)
        after = after | (taken & (places == length[:, None]) & fell[:, None])
        return tokens, length + count, verdict.count <= depth, after

    start = (tokens, jnp.full(rows, 2, jnp.int32), jnp.zeros(rows, bool), jnp.zeros(tokens.shape, bool))
    tokens, _, _, after = jax.lax.while_loop(lambda s: jnp.any(s[1] < 2 + LENGTH), round_, start)
    return tokens[:, : 2 + LENGTH], after[:, : 2 + LENGTH]


def conditionals(temperature, law):
    return np.exp(np.asarray(log_law(TABLE, np.full((V, V), temperature, np.float32), law), np.float64))


def p_value(counts, expected):
    assert not counts[expected == 0].any()
    kept = expected > 0
    return stats.chisquare(counts[kept], expected[kept] * counts.sum() / expected[kept].sum()).pvalue


def run(method, drafter, depth, temperature=1.0, law=Law(), seed=0, draws=DRAWS, **options):  # noqa: B008 (frozen)
    keys = jnp.asarray(noise.request_keys(seed, np.arange(draws), 0, 0))
    tokens, after = decode(
        TABLE, DRAFTERS[drafter], keys, jnp.full(draws, temperature), method=method, depth=depth, law=law, **options
    )
    return np.asarray(tokens), np.asarray(after)


CASES = [
    ("coupled", "near", 3, {}),
    ("coupled", "adversarial", 3, {}),
    ("rejection", "near", 3, {}),
    ("rejection", "adversarial", 3, {}),
    ("rejection", "adversarial", 1, {}),
    ("rejection", "near", 2, {"temperature": 0.6, "law": Law(top_k=3), "draws": 50_000}),
    ("rejection", "adversarial", 3, {"temperature": 1.4, "law": Law(top_p=0.9), "draws": 50_000}),
    ("rejection", "near", 3, {"deterministic": True}),
]


@pytest.mark.parametrize("method, drafter, depth, options", CASES, ids=str)
def test_output_has_exactly_the_targets_law(method, drafter, depth, options):
    tokens, after = run(method, drafter, depth, **options)
    p = conditionals(options.get("temperature", 1.0), options.get("law", Law()))
    first = p[CONTEXT]
    joint = first[:, None, None] * p[CONTEXT[1]][:, :, None] * p
    code = (tokens[:, 2] * V + tokens[:, 3]) * V + tokens[:, 4]
    assert p_value(np.bincount(code, minlength=V**3), joint.ravel()) > 0.001
    for place in range(2, 5):  # the marginals on their own, more sensitive to a bias of one position
        marginal = joint.sum(axis=tuple(i for i in range(3) if i != place - 2))
        assert p_value(np.bincount(tokens[:, place], minlength=V), marginal) > 0.001
    seen = 0
    for place in range(3, 2 + LENGTH):  # given the past and that the round before ended in a rejection
        rows = after[:, place]
        past = tokens[rows, place - 2] * V + tokens[rows, place - 1]
        counts = np.zeros((V * V, V))
        np.add.at(counts, (past, tokens[rows, place]), 1)
        statistic, freedom = 0.0, 0
        for context in np.flatnonzero(counts.sum(1) >= 200):
            law_here = p[context // V, context % V]
            expected = counts[context].sum() * law_here
            assert not counts[context][law_here == 0].any()
            kept = expected > 0
            statistic += ((counts[context] - expected)[kept] ** 2 / expected[kept]).sum()
            freedom += kept.sum() - 1
        seen += freedom
        assert freedom == 0 or stats.chi2.sf(statistic, freedom) > 0.001
    assert seen > 20


def test_a_wrong_residual_law_would_be_seen():
    """The same check on the classic fault, resuming from p after a rejection, fails by many orders of magnitude."""
    p, q = (np.exp(t[CONTEXT].astype(np.float64)) for t in (TABLE, DRAFTERS["near"]))
    p, q = p / p.sum(), q / q.sum()
    accepted = np.minimum(p, q)
    wrong = accepted + (1 - accepted.sum()) * p
    counts = np.random.default_rng(0).multinomial(DRAWS, wrong)
    assert p_value(counts, p) < 1e-12


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_coupled_tokens_do_not_depend_on_drafter_or_depth(temperature):
    runs = [run("coupled", d, n, temperature, draws=2000)[0] for d in DRAFTERS for n in (1, 4)]
    runs.append(run("coupled", "near", 3, temperature, draws=2000, deterministic=True)[0])
    for tokens in runs[1:]:
        np.testing.assert_array_equal(tokens, runs[0])


def test_coupled_accepts_nearly_as_often_as_possible():
    rows = 50_000
    keys = jnp.asarray(noise.request_keys(3, np.arange(rows), 0, 0))
    target, drafter = TABLE[CONTEXT], DRAFTERS["near"][CONTEXT]
    ones = jnp.ones((rows, 1, 1))
    draw = jax.jit(verify.make_draw("coupled", jnp.ones(rows), keys, Law()))
    drafts, _ = draw(ones * drafter, jnp.zeros((rows, 1), jnp.int32))
    verdict = jax.jit(verify.coupled, static_argnames="law")(
        jnp.tile(target, (rows, 2, 1)), drafts, jnp.ones(rows, jnp.int32), jnp.ones(rows), keys, jnp.tile(jnp.arange(2), (rows, 1)),
        law=Law(),
    )  # fmt: skip
    p, q = np.exp(target) / np.exp(target).sum(), np.exp(drafter) / np.exp(drafter).sum()
    distance = 1 - np.minimum(p, q).sum()
    accepted = float(jnp.mean(verdict.count == 2))
    assert (1 - distance) / (1 + distance) - 0.01 <= accepted <= 1 - distance + 0.01
