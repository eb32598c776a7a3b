"""Trees on a language that can be enumerated: five tokens whose law depends on the last two, with near and adversarial drafters.

Whole decoding loops with the real draft and verify functions are compared with the exact joint law by chi-square; single
nodes with the law and the acceptance that enumeration gives.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, log_law
from adrl_jax.speculation import tree, verify, verify_tree
from adrl_jax.speculation.drafter import draft_chain
from adrl_jax.speculation.strategy import Strategy

V, DRAWS, LENGTH, CONTEXT = 5, 100_000, 4, (0, 1)
TABLE = np.random.default_rng(0).normal(size=(V, V, V)).astype(np.float32) * 1.5
DRAFTERS = {
    "near": TABLE + np.random.default_rng(1).normal(size=TABLE.shape).astype(np.float32) * 0.5,
    "adversarial": -2.0 * TABLE,
}


def request_keys(rows, seed=0):
    return jnp.asarray(noise.request_keys(seed, np.arange(rows), 0, 0))


def uniform(method, rows, strategy):
    nothing = jnp.zeros(rows, jnp.int32)
    return tree.belief(method, nothing, nothing, strategy.depth)


def grow(drafter_table, before, last, length, branch, strategy, method):
    """Trees below the contexts (before, last), and each node's parent's token."""

    def step(fed, ids, parents, index):
        context = jnp.where(index == 0, last[:, None], jnp.take_along_axis(fed, parents, axis=1))
        return drafter_table[context, ids], ids

    start = jnp.broadcast_to(last[:, None], (len(last), strategy.width))
    weights = uniform(method, len(last), strategy)
    drafts, _ = tree.draft_tree(drafter_table[before, last], step, start, last, length, branch, weights, strategy)
    context = jnp.take_along_axis(drafts.tokens, drafts.parents, axis=1)
    return drafts, jnp.where(drafts.levels == 0, before[:, None], context)


@functools.partial(jax.jit, static_argnames=("method", "strategy", "law"))
def decode(table, drafter_table, keys, temperature, *, method, strategy, law):
    """Rounds of draft, verify, commit until every row has `LENGTH` tokens.

    Returns tokens `[B, 2 + LENGTH]` (the context first), and the level of its tree at which each was decided.
    """
    rows = keys.shape[0]
    every = jnp.arange(rows)
    tokens = jnp.zeros((rows, 2 + LENGTH), jnp.int32).at[:, :2].set(jnp.array(CONTEXT))
    branch = tree.make_branch(method, strategy.width, temperature, keys, law)
    decide = getattr(verify_tree, method)

    def round_(state):
        tokens, length, levels = state
        before, last = tokens[every, length - 2], tokens[every, length - 1]
        drafts, context = grow(drafter_table, before, last, length, branch, strategy, method)
        walk = decide(table[context, drafts.tokens], drafts, strategy, temperature, keys, length, law)
        count = jnp.minimum(walk.verdict.count, 2 + LENGTH - length)
        places = jnp.arange(tokens.shape[1])
        taken = (places >= length[:, None]) & (places < (length + count)[:, None])
        source = jnp.clip(places - length[:, None], 0, strategy.depth)
        tokens = jnp.where(taken, jnp.take_along_axis(walk.verdict.tokens, source, axis=1), tokens)
        return tokens, length + count, jnp.where(taken, source + 1, levels)

    start = (tokens, jnp.full(rows, 2, jnp.int32), jnp.zeros_like(tokens))
    tokens, _, levels = jax.lax.while_loop(lambda s: jnp.any(s[1] < 2 + LENGTH), round_, start)
    return tokens, levels


def run(method, drafter, shape, temperature=1.0, law=Law(), seed=0, draws=DRAWS):  # noqa: B008 (frozen)
    return jax.tree.map(
        np.asarray,
        decode(
            TABLE, DRAFTERS[drafter], request_keys(draws, seed), jnp.full(draws, temperature),
            method=method, strategy=Strategy("x", *shape), law=law,
        ),
    )  # fmt: skip


def p_value(counts, expected):
    assert not counts[expected == 0].any()
    kept = expected > 0
    return stats.chisquare(counts[kept], expected[kept] * counts.sum() / expected[kept].sum()).pvalue


CASES = [
    ("coupled", "near", (3, 3, 12), {}),
    ("coupled", "adversarial", (3, 3, 12), {}),
    ("rejection", "near", (3, 3, 12), {}),
    ("rejection", "adversarial", (3, 3, 12), {}),
    ("rejection", "adversarial", (1, 5, 6), {}),
    ("rejection", "near", (3, 2, 6), {"temperature": 0.6, "law": Law(top_k=3), "draws": 20_000}),
    ("rejection", "adversarial", (2, 4, 10), {"temperature": 1.4, "law": Law(top_p=0.9), "draws": 20_000}),
]


@pytest.mark.parametrize("method, drafter, shape, options", CASES, ids=str)
def test_output_has_exactly_the_targets_law(method, drafter, shape, options):
    tokens, levels = run(method, drafter, shape, **options)
    temperature = options.get("temperature", 1.0)
    p = np.exp(np.asarray(log_law(TABLE, np.full((V, V), temperature, np.float32), options.get("law", Law())), np.float64))
    joint = p[CONTEXT][:, None, None] * p[CONTEXT[1]][:, :, None] * p
    code = (tokens[:, 2] * V + tokens[:, 3]) * V + tokens[:, 4]
    assert p_value(np.bincount(code, minlength=V**3), joint.ravel()) > 0.001
    for place in range(2, 5):  # the marginals on their own, more sensitive to a bias of one position
        marginal = joint.sum(axis=tuple(i for i in range(3) if i != place - 2))
        assert p_value(np.bincount(tokens[:, place], minlength=V), marginal) > 0.001
    if method == "coupled":
        return  # which level a token is decided at depends on its noise; tokens as such do not depend on the tree at all
    # Tokens of the first round, by the level of the tree they come from, given the path so far: nothing but the target's law.
    seen = 0
    for level in range(1, min(shape[0] + 1, 3) + 1):
        at = np.ones(len(tokens), bool)
        for place in range(1, level + 1):
            at &= levels[:, 1 + place] == place
        statistic, freedom = 0.0, 0
        counts = np.zeros((V * V, V))
        np.add.at(counts, (tokens[at, level - 1] * V + tokens[at, level], tokens[at, level + 1]), 1)
        for context in np.flatnonzero(counts.sum(1) >= 200):
            here = p[context // V, context % V]
            expected = counts[context].sum() * here
            assert not counts[context][here == 0].any()
            kept = expected > 0
            statistic += ((counts[context] - expected)[kept] ** 2 / expected[kept]).sum()
            freedom += kept.sum() - 1
        seen += freedom
        assert freedom == 0 or stats.chi2.sf(statistic, freedom) > 0.001
    assert seen > (10 if drafter == "near" else 1)


def draft_orders(q, width):
    """All ordered draws without replacement, with their probabilities."""
    for order in itertools.permutations(range(len(q)), width):
        left, probability = 1.0, 1.0
        for x in order:
            probability *= q[x] / left
            left -= q[x]
        yield order, probability


def enumerated(p, q, width):
    """The law of the committed token and the chance that a draft stands, by the definition, in float64."""
    out, stands = np.zeros(len(p)), 0.0
    for order, probability in draft_orders(q, width):
        left_p, left_q = p.copy(), q.copy()
        for x in order:
            accept = min(1.0, left_p[x] / left_q[x])
            out[x] += probability * accept
            stands += probability * accept
            probability *= 1 - accept
            residual = np.maximum(left_p - left_q, 0)
            if residual.sum() <= 1e-12 or probability <= 1e-15:
                probability = 0.0
                break
            left_p = residual / residual.sum()
            left_q[x] = 0
            left_q = left_q / left_q.sum()
        out += probability * left_p
    return out, stands


@pytest.mark.parametrize("width", [1, 2, 4])
def test_one_node_accepts_as_often_as_enumeration_says(width):
    p, q = (np.exp(t[CONTEXT].astype(np.float64)) for t in (TABLE, DRAFTERS["near"]))
    p, q = p / p.sum(), q / q.sum()
    law, stands = enumerated(p, q, width)
    np.testing.assert_allclose(law, p, atol=1e-9)  # the method is exact
    rows, strategy, filters = DRAWS, Strategy("x", 1, width, 1 + width), Law()

    @jax.jit
    def once(keys):
        ones, length = jnp.ones(rows), jnp.full(rows, 9)
        branch = tree.make_branch("rejection", width, ones, keys, filters)
        before, last = (jnp.full(rows, x) for x in CONTEXT)
        drafts, context = grow(jnp.asarray(DRAFTERS["near"]), before, last, length, branch, strategy, "rejection")
        return verify_tree.rejection(jnp.asarray(TABLE)[context, drafts.tokens], drafts, strategy, ones, keys, length, filters)

    walk = once(request_keys(rows))
    first, stood = np.asarray(walk.verdict.tokens[:, 0]), np.asarray(walk.verdict.count) == 2
    assert p_value(np.bincount(first, minlength=V), p) > 0.001
    assert stats.binomtest(int(stood.sum()), rows, stands).pvalue > 0.001
    # More tries, more acceptance: the enumeration itself must say so.
    assert width == 1 or stands > enumerated(p, q, width - 1)[1]


def test_a_law_that_forgets_rejected_siblings_would_be_seen():
    """The classic fault, trying each child against the unchanged p, fails the same check by many orders of magnitude."""
    p, q = (np.exp(t[CONTEXT].astype(np.float64)) for t in (TABLE, DRAFTERS["near"]))
    p, q = p / p.sum(), q / q.sum()
    wrong = np.zeros(V)
    for order, probability in draft_orders(q, 3):
        for x in order:
            accept = min(1.0, p[x] / q[x])
            wrong[x] += probability * accept
            probability *= 1 - accept
        wrong += probability * p
    assert p_value(np.random.default_rng(0).multinomial(DRAWS, wrong), p) < 1e-12


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_coupled_tokens_do_not_depend_on_drafter_or_shape(temperature):
    shapes = [(1, 5, 6), (2, 3, 8), (4, 2, 7)]
    runs = [run("coupled", d, shape, temperature, draws=2000)[0] for d in DRAFTERS for shape in shapes]
    for tokens in runs[1:]:
        np.testing.assert_array_equal(tokens, runs[0])
    # The very tokens that the target draws on its own.
    keys, own = request_keys(2000), runs[0]
    for place in range(2, 2 + LENGTH):
        logits = jnp.asarray(TABLE)[own[:, place - 2], own[:, place - 1]][:, None]
        positions = jnp.full((2000, 1), place)
        nothing = jnp.zeros((2000, 0), jnp.int32), jnp.zeros(2000, jnp.int32)
        verdict = verify.coupled(logits, *nothing, jnp.full(2000, temperature), keys, positions, Law())
        np.testing.assert_array_equal(verdict.tokens[:, 0], own[:, place])


WIDE, MANY, TREE = 60, 600, Strategy("x", 4, 3, 14)
WIDE_LAW, WIDE_KEYS, WIDE_LENGTH = Law(valid_vocab=50), request_keys(MANY), jnp.full(MANY, 5)
WIDE_TABLE = np.random.default_rng(3).normal(size=(WIDE, WIDE)).astype(np.float32) * 2.5
WIDE_DRAFTER = WIDE_TABLE + np.random.default_rng(4).normal(size=WIDE_TABLE.shape).astype(np.float32) * 0.7


@functools.partial(jax.jit, static_argnames=("method", "strategy"))
def one_pass(method, strategy, temperature):
    """A tree and its walk on a bigram language of 60 tokens."""
    table, drafter = jnp.asarray(WIDE_TABLE), jnp.asarray(WIDE_DRAFTER)
    last = jnp.arange(MANY, dtype=jnp.int32) % WIDE
    branch = tree.make_branch(method, strategy.width, temperature, WIDE_KEYS, WIDE_LAW)
    step = lambda carry, ids, parents, index: (drafter[ids], carry)  # noqa: E731
    drafts, _ = tree.draft_tree(drafter[last], step, (), last, WIDE_LENGTH, branch, uniform(method, MANY, strategy), strategy)
    decide = getattr(verify_tree, method)
    return drafts, decide(table[drafts.tokens], drafts, strategy, temperature, WIDE_KEYS, WIDE_LENGTH, WIDE_LAW)


@functools.partial(jax.jit, static_argnames=("method", "depth"))
def one_chain(method, depth, temperature):
    table, drafter = jnp.asarray(WIDE_TABLE), jnp.asarray(WIDE_DRAFTER)
    last = jnp.arange(MANY, dtype=jnp.int32) % WIDE
    draw = verify.make_draw(method, temperature, WIDE_KEYS, WIDE_LAW)
    step = lambda carry, ids, index: (drafter[ids], carry)  # noqa: E731
    drafts, log_q, _ = draft_chain(drafter[last][:, None], step, (), WIDE_LENGTH, draw, depth)
    logits = table[jnp.concatenate([last[:, None], drafts], axis=1)]
    positions = WIDE_LENGTH[:, None] + jnp.arange(depth + 1)
    arguments = (logits, drafts, jnp.full(MANY, depth), temperature, WIDE_KEYS, positions, WIDE_LAW)
    return verify.coupled(*arguments) if method == "coupled" else verify.rejection(*arguments, log_q)


@pytest.mark.parametrize("method", verify.METHODS)
def test_width_one_is_the_chains_verdict(method):
    temperature = jnp.array([0.7, 1.0, 1.3] * (MANY // 3))
    walk, chain = one_pass(method, Strategy("x", 4), temperature)[1], one_chain(method, 4, temperature)
    np.testing.assert_array_equal(walk.verdict.count, chain.count)
    assert len(np.unique(chain.count)) == 5
    committed = np.arange(5) < np.asarray(chain.count)[:, None]
    np.testing.assert_array_equal(np.asarray(walk.verdict.tokens)[committed], np.asarray(chain.tokens)[committed])
    np.testing.assert_allclose(np.asarray(walk.verdict.log_probs)[committed], np.asarray(chain.log_probs)[committed], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_trees_accept_more_than_chains(temperature):
    """At equal depth, and at equal tokens to verify; and coupled trees keep up with rejection trees."""
    hot = jnp.full(MANY, temperature)
    length = lambda verdict: float(np.mean(np.asarray(verdict.count)))  # noqa: E731
    coupled, rejection = (length(one_pass(method, TREE, hot)[1].verdict) for method in ("coupled", "rejection"))
    assert coupled > 1.1 * length(one_chain("coupled", 4, hot))
    assert rejection > 1.05 * length(one_chain("rejection", 4, hot))
    assert coupled > 0.95 * rejection
    deep = length(one_pass("coupled", Strategy("x", 11, 3, 12), hot)[1].verdict)
    assert deep > 1.03 * length(one_chain("coupled", 11, hot))


def test_a_tree_that_holds_the_chain_accepts_at_least_as_much():
    """A chain's drafts are first children, and nothing of this tree is pruned."""
    ones = jnp.ones(MANY)
    full = np.asarray(one_pass("coupled", Strategy("x", 2, 2, 7), ones)[1].verdict.count)
    chain = np.asarray(one_chain("coupled", 2, ones).count)
    assert (full >= chain).all() and (full > chain).mean() > 0.1


@pytest.mark.parametrize("method", verify.METHODS)
def test_paths_log_probs_and_levels_fit_the_tree(method):
    temperature = jnp.array([0.0, 0.7, 1.0] * (MANY // 3))
    drafts, walk = jax.tree.map(np.asarray, one_pass(method, TREE, temperature))
    law = np.asarray(log_law(WIDE_TABLE[drafts.tokens], np.tile(np.asarray(temperature)[:, None], (1, 14)), WIDE_LAW))
    assert set(np.unique(walk.verdict.count)) == {1, 2, 3, 4, 5}
    for row in range(MANY):
        count, path = walk.verdict.count[row], walk.path[row]
        assert path[0] == 0
        for i in range(count):
            token = walk.verdict.tokens[row, i]
            assert walk.verdict.log_probs[row, i] == pytest.approx(law[row, path[i], token], abs=1e-5) and token < 50
            children = np.flatnonzero((drafts.parents[row] == path[i]) & (np.arange(14) > 0) & drafts.usable[row])
            if i < count - 1:
                assert drafts.parents[row, path[i + 1]] == path[i] and drafts.tokens[row, path[i + 1]] == token
                assert path[i + 1] in children and walk.examined[row, i]
            elif method == "coupled":
                assert token not in drafts.tokens[row, children]
            if i < TREE.depth:
                assert walk.examined[row, i] == (len(children) > 0)
        assert not walk.examined[row, count:].any()


@pytest.mark.parametrize("method", verify.METHODS)
def test_temperature_zero_is_greedy_decoding(method):
    _, walk = jax.tree.map(np.asarray, one_pass(method, TREE, jnp.zeros(MANY)))
    assert len(np.unique(walk.verdict.count)) > 2
    for row in range(WIDE):
        token = row
        for i in range(walk.verdict.count[row]):
            token = int(np.argmax(WIDE_TABLE[token, :50]))
            assert walk.verdict.tokens[row, i] == token and walk.verdict.log_probs[row, i] == 0


@pytest.mark.parametrize("method", verify.METHODS)
def test_unusable_nodes_are_never_accepted(method):
    ones = jnp.ones(MANY)
    drafts, usual = one_pass(method, TREE, ones)
    none = drafts._replace(usable=jnp.zeros_like(drafts.usable))
    decide = jax.jit(getattr(verify_tree, method), static_argnums=(2, 6))
    walk = decide(jnp.asarray(WIDE_TABLE)[drafts.tokens], none, TREE, ones, WIDE_KEYS, WIDE_LENGTH, WIDE_LAW)
    assert (walk.verdict.count == 1).all() and not walk.examined.any() and (usual.verdict.count > 1).any()
    # Without drafts both methods draw the target's own token with the target's own noise.
    own = one_pass("coupled", TREE, ones)[1].verdict.tokens[:, 0]
    np.testing.assert_array_equal(walk.verdict.tokens[:, 0], own)


@pytest.mark.parametrize("method", verify.METHODS)
def test_rows_are_independent(method):
    temperature = jnp.array([1.0, 0.5, 0.0, 1.2] * (MANY // 4))
    one = jax.tree.map(np.asarray, one_pass(method, TREE, temperature)[1])
    # Rows are told apart by their keys and last tokens alone: other neighbours, other temperatures elsewhere.
    kept = np.arange(MANY) % 3 == 0
    other = one_pass(method, TREE, jnp.where(kept, temperature, 0.9))[1]
    np.testing.assert_array_equal(one.verdict.count[kept], np.asarray(other.verdict.count)[kept])
    np.testing.assert_array_equal(one.verdict.tokens[kept], np.asarray(other.verdict.tokens)[kept])
