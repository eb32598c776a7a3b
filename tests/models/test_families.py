import json

import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.models import families, transformer

LLAMA = dict(
    model_type="llama",
    vocab_size=16,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


@pytest.mark.parametrize(("extra", "expected"), [({}, 4), ({"head_dim": None}, 4), ({"head_dim": 6}, 6)])
def test_head_dim_is_given_or_derived(extra, expected):
    config = families.from_hf(LLAMA | extra)
    assert config.head_dim == expected


def test_qwen3_default_head_dim_is_its_own():
    assert families.from_hf(LLAMA | {"model_type": "qwen3"}).head_dim == 128


def test_old_and_new_rope_fields_read_the_same():
    scaling = dict(rope_type="linear", factor=2.0)
    old = families.from_hf(LLAMA | dict(rope_theta=500.0, rope_scaling=scaling))
    new = families.from_hf(LLAMA | dict(rope_parameters=scaling | dict(rope_theta=500.0)))
    oldest = families.from_hf(LLAMA | dict(rope_theta=500.0, rope_scaling=dict(type="linear", factor=2.0)))
    assert old == new == oldest
    assert old.rope_theta == 500.0


def test_linear_scaling_halves_the_angle():
    positions = jnp.array([[5, 10]])
    base = transformer.rotation(positions, 4, 10_000.0, None)
    scaled = transformer.rotation(positions, 4, 10_000.0, families.RopeScaling("linear", 2.0))
    np.testing.assert_allclose(scaled[1][0, 1], base[1][0, 0], rtol=1e-6)


def test_llama3_scaling_has_three_regimes():
    scaling = families.RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    base = np.asarray(transformer.rope_frequencies(64, 500_000.0), np.float64)
    scaled = np.asarray(transformer.rope_frequencies(64, 500_000.0, scaling), np.float64)
    wavelength = 2 * np.pi / base
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any() and long.any() and (~short & ~long).any()
    np.testing.assert_allclose(scaled[short], base[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], base[long] / 8, rtol=1e-6)
    between = scaled[~short & ~long] / base[~short & ~long]
    assert ((between > 1 / 8) & (between < 1)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model_type="mamba"), "model_type='mamba'.*llama, qwen2"),
        (dict(model_type=None), "model_type=None"),
        (dict(hidden_act="relu"), "hidden_act='relu'.*'silu'"),
        (dict(attention_bias=True), "attention_bias=True.*False"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), "'yarn'.*default, linear or llama3"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=2.0)), "llama3.*'low_freq_factor'"),
        (dict(model_type="qwen2", use_sliding_window=True), "use_sliding_window=True"),
        (dict(model_type="gemma3_text", final_logit_softcapping=30.0), "final_logit_softcapping=30.0.*None"),
        (dict(model_type="gemma3_text", layer_types=["full_attention", "sliding_attention"]), "regular pattern"),
        (dict(model_type="gpt_neox", attention_bias=False), "attention_bias=False"),
        (dict(num_key_value_heads=3, num_attention_heads=4), "num_heads=4.*num_kv_heads=3"),
        (dict(vocab_size=0), "vocab_size=0"),
    ],
)
def test_what_is_not_implemented_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        families.from_hf(LLAMA | change)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_missing_sizes_are_named(field):
    with pytest.raises(ValueError, match=field):
        families.from_hf({key: value for key, value in LLAMA.items() if key != field})


def test_sparse_gemma_config_takes_the_published_defaults():
    raw = dict(
        model_type="gemma3",
        text_config=dict(model_type="gemma3_text", hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34),
    )
    config = families.from_hf(raw)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert (config.rope_theta, config.local_rope_theta, config.sliding_pattern) == (1e6, 1e4, 6)
    assert config.scale == 256**-0.5
    assert [config.is_local(i) for i in (0, 4, 5, 11)] == [True, True, False, False]


def test_writing_a_config_is_the_inverse_of_reading_it(family_folder):
    config = families.from_hf(json.loads((family_folder / "config.json").read_text()))
    again = json.loads(json.dumps(families.to_hf(config)))
    assert families.from_hf(again) == config
