import jax
import jax.numpy as jnp
import pytest

from adrl_jax.models import families, transformer, weights
from adrl_jax.models.tokenizer import CharTokenizer
from experiments.bench import workload

LETTERS = CharTokenizer("".join(map(chr, range(32, 127))))


def test_prompts_are_full_distinct_and_do_not_depend_on_the_count():
    made = workload.prompts(LETTERS, 16, max_tokens=200)
    assert all(190 <= len(prompt.token_ids) <= 200 for prompt in made)
    assert len({prompt.text for prompt in made}) == 16
    assert [LETTERS.decode(prompt.token_ids) for prompt in made] == [prompt.text for prompt in made]
    assert [p.text for p in workload.prompts(LETTERS, 4, max_tokens=200)] == [p.text for p in made[:4]]


def test_prompts_refuse_a_length_that_holds_no_problem():
    with pytest.raises(ValueError, match="max_tokens=20 is too small"):
        workload.prompts(LETTERS, 1, max_tokens=20)


def test_hf_folder_is_written_once_and_loads(tmp_path):
    config = families.from_hf(
        dict(
            model_type="llama",
            vocab_size=LETTERS.size,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    params = transformer.init_params(config, jax.random.key(0))
    source = tmp_path / "source"
    weights.save_hf(source, config, params, LETTERS)
    model = weights.load(source)
    folder = workload.hf_folder(model, tmp_path / "cache")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert workload.hf_folder(model, tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert jnp.array_equal(weights.load(folder).params["embedding"], params["embedding"])
