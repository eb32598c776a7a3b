"""A drafter comes back from disk bit for bit, and only to its own target."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from adrl_jax.drafter import checkpoint
from adrl_jax.models.families import ModelConfig, RopeScaling
from adrl_jax.models.transformer import init_params
from adrl_jax.speculation.eagle import DRAFT_HEAD, DRAFT_IDS, Eagle

CONFIG = ModelConfig("llama", 40, 24, 48, 2, 4, 2, 8)
IDS = np.array([1, 5, 8, 39], np.int32)


def saved(folder, config=CONFIG, ids=IDS):
    drafter = Eagle(config, draft_vocab_size=None if ids is None else len(ids))
    params = drafter.init_params(jax.random.key(0))
    if ids is not None:
        params[DRAFT_IDS] = jnp.asarray(ids)
    checkpoint.save(folder, drafter, params, target_fingerprint="abc", record={"train_tokens": 7})
    return drafter, params


@pytest.mark.parametrize("ids", [IDS, None])
def test_round_trip(tmp_path, ids):
    config = dataclasses.replace(CONFIG, rope_scaling=RopeScaling("linear", 2.0), qk_norm=True, qkv_bias=True)
    drafter, params = saved(tmp_path, config, ids)
    found, loaded, record = checkpoint.load(tmp_path, config, "abc")
    assert found == drafter and record["train_tokens"] == 7
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    # In another precision, or to weights that have moved since, it is the same drafter.
    assert checkpoint.load(tmp_path, dataclasses.replace(config, dtype="bfloat16"))[0].config.dtype == "bfloat16"


def test_the_targets_share_is_not_written(tmp_path):
    drafter, params = saved(tmp_path)
    served = drafter.serve(params, init_params(CONFIG, jax.random.key(1)))
    checkpoint.save(tmp_path / "again", drafter, served, target_fingerprint="abc")
    assert DRAFT_HEAD in served and DRAFT_HEAD not in checkpoint.load(tmp_path / "again", CONFIG)[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 41}, "target.vocab_size=40, the model here has 41"),
        ({"hidden_size": 32}, "target.hidden_size=24, the model here has 32"),
        ({"num_layers": 3}, "target.num_layers=2, the model here has 3"),
        ({"family": "qwen3"}, "target.family='llama', the model here has 'qwen3'"),
        ({"rope_theta": 5e5}, "target.rope_theta=10000.0"),
    ],
)
def test_another_target_is_refused_and_the_field_named(tmp_path, change, words):
    saved(tmp_path)
    with pytest.raises(ValueError, match="of another target") as error:
        checkpoint.load(tmp_path, dataclasses.replace(CONFIG, **change))
    assert words in str(error.value)


def test_other_weights_are_refused_where_the_same_are_asked_for(tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match="target_fingerprint='abc', the weights here have 'xyz'"):
        checkpoint.load(tmp_path, CONFIG, "xyz")


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"drafter\.json: absent"):
        checkpoint.load(tmp_path, CONFIG)
    saved(tmp_path)
    weights, record = tmp_path / checkpoint.WEIGHTS, tmp_path / checkpoint.RECORD
    whole = safetensors.numpy.load_file(weights)

    def refused(tensors, words):
        safetensors.numpy.save_file(tensors, weights)
        with pytest.raises(ValueError) as error:
            checkpoint.load(tmp_path, CONFIG)
        assert words in str(error.value)

    refused({k: v for k, v in whole.items() if k != "fc/kernel"}, "lacks the tensor 'fc/kernel'")
    refused({**whole, "head": np.zeros(3, np.float32)}, "holds the tensor 'head'")
    refused({**whole, "fc/kernel": whole["fc/kernel"][:, :3].copy()}, "fc/kernel is float32 (48, 3), expected float32 (48, 24)")
    refused({**whole, DRAFT_IDS: IDS[::-1].copy()}, "draft_ids must be distinct ids in [0, 40), ascending")
    refused({**whole, DRAFT_IDS: IDS + 1}, "draft_ids must be distinct ids")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.load(tmp_path, CONFIG)
    safetensors.numpy.save_file(whole, weights)
    facts = json.loads(record.read_text())
    for change, words in (
        ({"format": 9}, "format=9 is not 1"),
        ({"drafter": "medusa"}, "drafter='medusa' is unknown; choose one of eagle, eagle3"),
        ({"target": None}, "target=None"),
        ({"draft_vocab_size": 99}, "draft_vocab_size=99 must be in [1, 40]"),
    ):
        record.write_text(json.dumps(facts | change))
        with pytest.raises(ValueError) as error:
            checkpoint.load(tmp_path, CONFIG)
        assert words in str(error.value)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"drafter\.safetensors: absent"):
        checkpoint.load(tmp_path, CONFIG)
