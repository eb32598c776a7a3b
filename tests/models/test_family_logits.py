"""Every family against `transformers` on small random models (see tests/data/make_family_fixtures.py)."""

import dataclasses

import jax
import numpy as np
import pytest

from adrl_jax.models import weights


def test_logits_equal_transformers_at_every_position(family_folder, forward):
    model = weights.load(family_folder)
    expected = np.load(family_folder / "expected.npz")
    logits = forward(model.config, model.params, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=5e-5, rtol=0)


def test_bfloat16_load_keeps_the_dtype_and_stays_near(family_folder, forward):
    model = weights.load(family_folder, "bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    assert model.config.dtype == "bfloat16"
    expected = np.load(family_folder / "expected.npz")
    logits = forward(model.config, model.params, expected["tokens"])
    assert logits.dtype == np.float32
    error = np.sqrt(np.mean((logits - expected["logits"]) ** 2))
    assert 0 < error < 0.1 * expected["logits"].std()


def test_gemma_window_and_local_angles_matter(families_folder, forward):
    """The fixture would not notice a wrong window or local frequency if they changed nothing."""
    model = weights.load(families_folder / "gemma3")
    expected = np.load(families_folder / "gemma3" / "expected.npz")
    for change in (dict(sliding_window=9), dict(local_rope_theta=60.0), dict(rope_scaling=None), dict(sliding_pattern=2)):
        config = dataclasses.replace(model.config, **change)
        logits = forward(config, model.params, expected["tokens"], jit=False)
        assert np.abs(logits - expected["logits"]).max() > 1e-2, change


@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt_neox_sequential"])
def test_tied_models_hold_their_table_once(families_folder, case):
    model = weights.load(families_folder / case)
    assert model.config.tie_embeddings
    assert "head" not in model.params
