"""One alignment for serving and training, also where siblings share a packed prompt; and a draft vocabulary."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from adrl_jax.models.kv_cache import masked_attention
from adrl_jax.models.transformer import Transformer, engine_layout
from adrl_jax.sampling.law import Law
from adrl_jax.speculation import eagle, verify
from adrl_jax.speculation.eagle import Eagle

PROMPT = [3, 9, 4, 21]
RESPONSES = [[5, 6, 7], [8], [11, 12, 13, 14, 2]]
CONFIG = tiny.LLAMA


def packed_row(responses, prompt=PROMPT, pad=2):
    """One prefix-shared row: token ids, positions, segments, branches `[1, T]` and source, target indices `[1, U]`."""
    ids, positions, branches = list(prompt), list(range(len(prompt))), [0] * len(prompt)
    source, target = [], []
    for branch, response in enumerate(responses, 1):
        for i, token in enumerate(response):
            source.append(len(prompt) - 1 if i == 0 else len(ids) - 1)
            target.append(len(ids))
            ids.append(token)
            positions.append(len(prompt) + i)
            branches.append(branch)
    segments = [1] * len(ids) + [0] * pad
    columns = (ids + [0] * pad, positions + [0] * pad, segments, branches + [0] * pad, source, target)
    return [jnp.array([c], jnp.int32) for c in columns]


def packed_attend(segments, branches):
    places = jnp.arange(segments.shape[1])
    visible = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
    visible &= places[:, None] >= places
    visible &= (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])

    def attend(q, k, v, *, layer, window, cache):
        return masked_attention(q, k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), visible), cache

    return attend


def drafter_params(seed=1):
    return tiny.drafter_params(Eagle(CONFIG), seed)


@jax.jit
def packed_predictions(target, params, row, hidden=None):
    ids, positions, segments, branches, source, where = row
    if hidden is None:
        hidden = packed_hidden(target, row)
    entries = eagle.entry_segments(segments)
    sources = eagle.packed_sources(ids.shape[1], source, where, jnp.ones_like(where, bool))
    attend = packed_attend(entries, branches)
    return eagle.packed_forward(params, target, CONFIG, hidden, ids, positions, attend, sources=sources)[0][0]


@jax.jit
def packed_hidden(target, row):
    ids, positions, segments, branches, _, _ = row
    return Transformer(CONFIG).apply({"params": target}, ids, positions, attend=packed_attend(segments, branches))[0]


def test_serving_and_training_build_the_same_triples():
    # Six tokens: entry e has hidden state e, token e + 1, rotary position e.
    hidden = jnp.arange(6.0)[None, :, None] * jnp.ones((1, 1, CONFIG.hidden_size))
    tokens, places = jnp.array([[10, 11, 12, 13, 14, 15]]), jnp.arange(6)[None]
    entries = jnp.arange(5)[None]
    served = eagle.inputs(hidden, tokens, places, entries, entries + 1)
    sources = eagle.packed_sources(6, jnp.array([[2, 3, 4]]), jnp.array([[3, 4, 5]]), jnp.ones((1, 3), bool))
    trained = eagle.inputs(hidden, tokens, places, sources, places)
    triples = [[(int(h[0]), int(t), int(p)) for h, t, p in zip(x[0][0], x[1][0], x[2][0])] for x in (served, trained)]
    assert triples[0] == [(0, 11, 0), (1, 12, 1), (2, 13, 2), (3, 14, 3), (4, 15, 4)]
    assert triples[1][1:] == triples[0]  # the first token of a sequence has no entry


def test_siblings_start_from_the_last_prompt_token():
    ids, positions, segments, _, source, where = packed_row(RESPONSES)
    sources = eagle.packed_sources(ids.shape[1], source, where, jnp.ones_like(where, bool))[0]
    np.testing.assert_array_equal(sources[4:13], [3, 4, 5, 3, 3, 8, 9, 10, 11])
    np.testing.assert_array_equal(positions[0, sources[4:13]], [3, 4, 5, 3, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(eagle.entry_segments(segments)[0], [0] + [1] * 12 + [0, 0])
    np.testing.assert_array_equal(eagle.entry_segments(jnp.array([[1, 1, 1, 2, 3, 3, 0, 0]])), [[0, 1, 1, 0, 0, 3, 0, 0]])
    # Padding targets write nothing.
    mask = jnp.zeros_like(where, bool)
    np.testing.assert_array_equal(
        eagle.packed_sources(ids.shape[1], source * 0, where, mask)[0], np.maximum(np.arange(ids.shape[1]) - 1, 0)
    )


def test_training_predicts_what_serving_drafts():
    target, params, drafter = tiny.target_params(CONFIG), drafter_params(), Eagle(CONFIG)
    row = packed_row(RESPONSES)
    predicted = packed_predictions(target, params, row)
    advance = jax.jit(lambda tokens, length, hidden: drafter.advance(
        params, target, drafter.init_state(1, 12), tokens, length, hidden, 12
    ))  # fmt: skip
    at = len(PROMPT)
    for response in RESPONSES:
        for used in range(1, len(response) + 1):
            # Served: prompt and `used` response tokens are committed, the last of them unseen by the target.
            text = PROMPT + response[:used]
            tokens = jnp.array([text + [0] * (12 - len(text))])
            hidden = tiny.hidden_states(CONFIG, target, tokens)
            state = advance(tokens, jnp.array([len(text)]), hidden)
            np.testing.assert_allclose(predicted[at + used - 1], state.feature[0], atol=2e-4)
        at += len(response)


def test_later_drafts_feed_the_prediction_back():
    target, params, drafter = tiny.target_params(CONFIG), drafter_params(), Eagle(CONFIG)
    tokens, length = tiny.random_rows(1, 12), jnp.array([6])
    hidden = tiny.hidden_states(CONFIG, target, tokens)
    draw = verify.make_draw("rejection", jnp.zeros(1), tiny.request_keys(1), Law())

    @jax.jit
    def propose():
        state = drafter.advance(params, target, drafter.init_state(1, 12), tokens, length, hidden, 12)
        return drafter.propose(params, target, state, tokens, length, hidden, draw, 3)[0]

    @jax.jit
    def predict(imagined, text):
        entries = jnp.arange(12)[None]
        features, ids, at = eagle.inputs(imagined, text, entries, entries, entries + 1)
        attend = packed_attend(jnp.ones((1, 12), jnp.int32), jnp.zeros((1, 12), jnp.int32))
        return eagle.predict(params, target, CONFIG, features, ids, at, attend, None)[0]

    proposal = propose()
    # By hand: greedy drafts, each prediction put where the target's hidden state would be.
    text, imagined, drafts = tokens, hidden, []
    for i in range(3):
        feature = predict(imagined, text)[:, 6 + i - 2]
        drafts.append(int(jnp.argmax(feature @ target["head"])))
        imagined = imagined.at[:, 6 + i - 1].set(feature)
        text = text.at[:, 6 + i].set(drafts[-1])
    np.testing.assert_array_equal(proposal.tokens[0], drafts)


def test_one_segment_of_a_row_does_not_see_another():
    target, params = tiny.target_params(CONFIG), drafter_params()
    first, second = packed_row([[5, 6, 7]], pad=0), packed_row([[1, 2], [3]], prompt=[9, 8, 7], pad=1)
    size = first[0].shape[1]
    joined = [jnp.concatenate([a, b], axis=1) for a, b in zip(first[:4], second[:4])]
    joined[2] = joined[2].at[:, size:].set(jnp.where(second[2] > 0, 2, 0))
    joined += [jnp.concatenate([a, b + size], axis=1) for a, b in zip(first[4:], second[4:])]
    out = packed_predictions(target, params, joined)
    np.testing.assert_allclose(out[size + 1 : -1], packed_predictions(target, params, second)[1:-1], atol=2e-5)
    changed = [joined[0].at[0, :size].set(jnp.arange(size) + 20), *joined[1:]]
    np.testing.assert_array_equal(packed_predictions(target, params, changed)[size + 1 : -1], out[size + 1 : -1])


def test_only_fc_and_the_layer_are_trained():
    target, params, row = tiny.target_params(CONFIG), drafter_params(), packed_row(RESPONSES)
    hidden = packed_hidden(target, row)
    where = row[5][0]
    loss = lambda p: jnp.mean(jnp.square(packed_predictions(target, p, row, hidden)[where] - hidden[0, where]))  # noqa: E731
    before, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(gradient))
    step = jax.tree.map(lambda p, g: p - 0.02 * g, params, gradient)
    assert loss(step) < before


IDS = np.array([0, 2, 3, 7, 11, 19, 30, 39], np.int32)
REDUCED = Eagle(CONFIG, draft_vocab_size=len(IDS))


def reduced_params(ids=IDS):
    return {**drafter_params(), eagle.DRAFT_IDS: jnp.asarray(ids)}


def layouts():
    """The same target as the learner keeps it, tied and untied, and as the engine serves it."""
    tied = {name: value for name, value in tiny.target_params(CONFIG).items() if name != "head"}
    untied = {**tied, "head": tied["embedding"][::-1].T}
    return {"tied": tied, "untied": untied, "served": {**tied, "head_t": untied["head"].T}}


@pytest.mark.parametrize("layout", ["tied", "untied", "served"])
@pytest.mark.parametrize("served", [True, False])
def test_draft_logits_are_the_targets_on_the_map_and_nothing_elsewhere(layout, served):
    target, params = layouts()[layout], reduced_params()
    feature = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, CONFIG.hidden_size)), jnp.float32)
    found = REDUCED.draft_logits(REDUCED.serve(params, target) if served else params, target, feature)
    table = np.asarray(target["embedding"] if layout == "tied" else target["embedding"][::-1], np.float64)
    expected = np.full((2, 3, CONFIG.vocab_size), -np.inf)
    expected[..., IDS] = np.asarray(feature, np.float64) @ table[IDS].T
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.dtype == jnp.float32
    whole = Eagle(CONFIG).draft_logits(drafter_params(), target, feature)
    np.testing.assert_allclose(whole, np.asarray(feature) @ table.T, atol=1e-5)


def test_serving_takes_the_rows_of_the_target_that_is_served():
    params, first = reduced_params(), layouts()["tied"]
    second = {**first, "embedding": first["embedding"] + 1}
    served = REDUCED.serve(params, first)
    np.testing.assert_array_equal(served[eagle.DRAFT_HEAD], first["embedding"][IDS])
    # Published anew, drafter and all: what was taken from the earlier target is replaced.
    np.testing.assert_array_equal(REDUCED.serve(served, second)[eagle.DRAFT_HEAD], second["embedding"][IDS])
    layout = engine_layout(params, dataclasses.replace(CONFIG, dtype="bfloat16"))
    np.testing.assert_array_equal(layout[eagle.DRAFT_IDS], IDS)
    assert layout[eagle.DRAFT_IDS].dtype == jnp.int32


@pytest.mark.parametrize("method", verify.METHODS)
def test_nothing_outside_the_map_is_drafted(method):
    target, rows, depth = tiny.target_params(CONFIG), 16, 3
    tokens, length = tiny.random_rows(rows, 12), jnp.full(rows, 6)
    hidden = tiny.hidden_states(CONFIG, target, tokens)
    draw = verify.make_draw(method, jnp.full(rows, 3.0), tiny.request_keys(rows), Law())  # hot: every id has its chance

    @functools.partial(jax.jit, static_argnums=0)
    def drafts(drafter, params):
        state = drafter.advance(params, target, drafter.init_state(rows, 12), tokens, length, hidden, 12)
        return drafter.propose(params, target, state, tokens, length, hidden, draw, depth)[0]

    inside = drafts(REDUCED, REDUCED.serve(reduced_params(), target))
    assert np.isin(inside.tokens, IDS).all() and len(np.unique(inside.tokens)) > 4
    whole = drafts(Eagle(CONFIG), drafter_params())
    assert not np.isin(whole.tokens, IDS).all()
    if method == "rejection":
        np.testing.assert_allclose(np.exp(inside.log_q).sum(-1), 1.0, rtol=1e-4)
    # A map of all ids changes nothing.
    everything = Eagle(CONFIG, draft_vocab_size=CONFIG.vocab_size)
    same = drafts(everything, everything.serve(reduced_params(np.arange(CONFIG.vocab_size, dtype=np.int32)), target))
    np.testing.assert_array_equal(same.tokens, whole.tokens)


def test_the_map_is_no_part_of_what_is_trained():
    trained, fixed = eagle.split(REDUCED.serve(reduced_params(), tiny.target_params(CONFIG)))
    assert sorted(trained) == ["fc", "layer"] and list(fixed) == [eagle.DRAFT_IDS]
    assert eagle.split(drafter_params())[1] == {}
    fresh = REDUCED.init_params(jax.random.key(0))
    np.testing.assert_array_equal(fresh[eagle.DRAFT_IDS], np.arange(len(IDS)))


def test_faults_of_the_map_are_named():
    target = tiny.target_params(CONFIG)
    for size in (0, CONFIG.vocab_size + 1):
        with pytest.raises(ValueError, match=rf"draft_vocab_size={size} must be in \[1, 40\]"):
            Eagle(CONFIG, draft_vocab_size=size)
    with pytest.raises(ValueError, match="has 7 ids, draft_vocab_size=8"):
        REDUCED.serve(reduced_params(IDS[:7]), target)
    with pytest.raises(ValueError, match="has None ids, draft_vocab_size=8"):
        REDUCED.serve(drafter_params(), target)
    with pytest.raises(ValueError, match="has 8 ids, draft_vocab_size=None"):
        Eagle(CONFIG).serve(reduced_params(), target)
