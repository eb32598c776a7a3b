"""The learner's benchmark: what is compared holds the same, and a tiny model goes through all its parts."""

import json

import jax
import numpy as np
import pytest

from adrl_jax.learner import supervised
from adrl_jax.models import families, transformer, weights
from adrl_jax.models.tokenizer import CharTokenizer
from adrl_jax.tasks import division
from experiments.bench import learner, learner_memory
from experiments.bench.step import useful_flops

TOKENIZER = CharTokenizer(division.ALPHABET)
CONFIG = families.from_hf(
    {"model_type": "llama", "vocab_size": TOKENIZER.size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
     "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
     "tie_word_embeddings": True},
    "float32",
)  # fmt: skip


@pytest.mark.parametrize("divisor", [1, 4])
def test_packed_and_padded_hold_the_same_targets_and_lengths_keep_their_shape(divisor):
    found = [ids[: len(ids) // divisor] for ids in learner.sequences(512)]
    lengths = sorted(map(len, found))
    assert lengths == sorted(n // divisor for n in learner.LENGTHS) and sum(lengths) == 1472 // divisor
    assert max(lengths) / np.mean(lengths) == pytest.approx(512 / (1472 / 16))
    both = learner.batches(learner.as_rollouts(found), max(lengths))
    targets = {name: np.sort(batch.target_ids[np.asarray(batch.target_mask)]) for name, batch in both.items()}
    np.testing.assert_array_equal(targets["packed"], targets["padded"])
    np.testing.assert_array_equal(targets["packed"], np.sort(np.concatenate([ids[1:] for ids in found])))
    assert both["padded"].token_ids.shape == (16, 512 // divisor) and both["packed"].token_ids.shape == (3, 512 // divisor)


def test_the_batch_is_the_peers():
    """`hf_train.py packed`, 157 tokens/s, has these lengths and as many predicted tokens."""
    assert sorted(learner.LENGTHS) == [32] * 10 + [96] * 4 + [256, 512]
    rollouts = learner.as_rollouts(learner.sequences(100))
    assert sum(r.response_length for r in rollouts) == 1472 - 16


def test_wrong_flags_are_named_before_a_model_is_loaded(capsys):
    for flag, message in (
        ("--update_divisor=0", "--update_divisor=0 must be between 1 and 16"),
        ("--update_divisor=17", "--update_divisor=17 must be between"),
        ("--row_length=100", "--row_length=100 must be 0 or at least the longest sequence, 512"),
    ):
        with pytest.raises(SystemExit):
            learner.main([flag, "--model=/nowhere"])
        assert message in capsys.readouterr().err


def test_counted_memory_grows_with_length_by_what_is_kept():
    config = CONFIG
    a, b = (learner_memory.counted_bytes(config, 1000, n, 64) for n in (256, 512))
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    token = (config.num_layers + 2) * config.hidden_size + 2 * (4 * config.hidden_size + heads + 3 * config.intermediate_size)
    assert b - a == 256 * token * 4.0


@pytest.mark.slow
def test_a_tiny_model_through_all_parts(tmp_path):
    path, model = tmp_path / "f.json", tmp_path / "model"
    weights.save_hf(model, CONFIG, jax.device_get(transformer.init_params(CONFIG, jax.random.key(0))), TOKENIZER)
    with pytest.raises(SystemExit):
        learner.main([f"--model={model}", "--memory_lengths=64,1024"])
    made = learner.main([f"--model={model}", "--memory_lengths=64", f"--json={path}"])
    found = made["results"]
    assert list(found["part_s"]) == ["passes", "segments", "updates", "memory"]
    assert found["packed_over_padded"] > 1 and found["segment_cost_expected"] > 1 and found["tokens_per_s"] > 0
    assert 0 < found["flops_fraction_of_peak"] < 1.5 and found["peak_rss_mb"] > 0 and found["peer_tokens_per_s"] is None
    assert len(found["memory"]) == 1 and (tmp_path / "f.svg").stat().st_size
    written = json.loads(path.read_text())
    assert written["results"].keys() == found.keys() and "parts" not in written["config"].get("notes", {})


def test_one_long_segment_is_more_work_than_many_short_ones():
    work = []
    for lengths in ([512], [32] * 16):
        rollouts = supervised.examples([(ids[:-4], ids[-4:]) for ids in learner.sequences(CONFIG.vocab_size, lengths)])
        work.append(useful_flops(CONFIG, rollouts))
    assert work[0] > 1.3 * work[1]
