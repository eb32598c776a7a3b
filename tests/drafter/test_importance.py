"""Weighted expectations under the law that drew are expectations under the other one: by enumeration."""

import itertools

import numpy as np
import pytest

from adrl_jax.drafter.importance import target_weights
from adrl_jax.drafter.loss import DrafterLossConfig

VOCAB, LENGTH = 3, 4


def conditional(seed):
    """`log p(token | context)` for every context of a tiny vocabulary."""
    rng = np.random.default_rng(seed)
    law = {}
    for n in range(LENGTH):
        for context in itertools.product(range(VOCAB), repeat=n):
            law[context] = np.log(rng.dirichlet(np.ones(VOCAB)))
    return law


PI, MU = conditional(0), conditional(1)
TEXTS = list(itertools.product(range(VOCAB), repeat=LENGTH))


def log_probs(law):
    return np.array([[law[t[:i]][t[i]] for i in range(LENGTH)] for t in TEXTS], np.float32)


def weights(kind, cap, pi=None, mu=None):
    pi, mu = log_probs(PI) if pi is None else pi, log_probs(MU) if mu is None else mu
    mask = np.ones(pi.shape, bool)
    return np.asarray(target_weights(kind, cap, pi, mu, mask, np.zeros(pi.shape, np.int32)))


def test_prefix_weights_are_exact():
    """A loss that depends on the context of each target: its mean under mu with weights is its mean under pi without."""
    rng = np.random.default_rng(2)
    loss_of_context = {c: rng.normal() for c in PI}
    losses = np.array([[loss_of_context[t[:i]] for i in range(LENGTH)] for t in TEXTS])
    under = {name: np.exp(log_probs(law).sum(1, dtype=np.float64)) for name, law in (("pi", PI), ("mu", MU))}
    truth = (under["pi"] @ losses).sum()
    np.testing.assert_allclose((under["mu"] @ (weights("prefix", np.inf) * losses)).sum(), truth, rtol=1e-5)
    assert abs((under["mu"] @ losses).sum() - truth) > 0.1 * abs(truth)  # without weights it is something else


@pytest.mark.parametrize("kind", ["token", "prefix"])
@pytest.mark.parametrize("cap", [0.5, 2.0, np.inf])
def test_several_responses_in_a_row_are_told_apart(kind, cap):
    rng = np.random.default_rng(0)
    lengths, width = (3, 1, 5), 12
    pi, mu = (rng.normal(size=(1, width)).astype(np.float32) * 3 for _ in range(2))
    owner, mask = np.zeros((1, width), np.int32), np.zeros((1, width), bool)
    expected, at = np.ones((1, width)), 0
    for i, n in enumerate(lengths):
        owner[0, at : at + n], mask[0, at : at + n] = i, True
        delta = (pi - mu)[0, at : at + n].astype(np.float64)
        for k in range(n):
            log = {"token": delta[k - 1] if k else 0.0, "prefix": delta[:k].sum()}[kind]
            expected[0, at + k] = min(np.exp(log), cap)
        at += n
    got = np.asarray(target_weights(kind, cap, pi, mu, mask, owner))
    np.testing.assert_allclose(got[mask], expected[mask], rtol=1e-5)
    assert np.all(np.isfinite(got))


def test_equal_laws_weigh_one_and_extreme_ones_stay_finite():
    same = log_probs(PI)
    for kind in ("none", "token", "prefix"):
        np.testing.assert_array_equal(weights(kind, 2.0, same, same), 1.0)
        assert np.all(np.isfinite(weights(kind, 2.0, same + 1e4, same)))
        assert weights(kind, 2.0, same + 1e4, same).max() <= 2.0 + 1e-6
    np.testing.assert_array_equal(weights("none", 2.0), 1.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(importance_weights="sequence"), "importance_weights='sequence' is unknown; choose one of none, token, prefix"),
        (dict(importance_weights="token", importance_cap=0.0), "importance_cap=0.0 must be > 0"),
        (dict(importance_weights="token", importance_cap=float("nan")), "importance_cap=nan must be > 0"),
    ],
)
def test_bad_settings(fields, words):
    with pytest.raises(ValueError) as error:
        DrafterLossConfig(**fields)
    assert words in str(error.value)
