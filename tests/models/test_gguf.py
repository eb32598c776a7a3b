import dataclasses

import gguf
import jax
import numpy as np
import pytest

from adrl_jax.models import gguf_file, safetensors_file, weights
from adrl_jax.models.families import RopeScaling

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3", "gpt_neox": "gptneox"}
QuantType = gguf.GGMLQuantizationType


def interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """What a converter does to q and k of a llama: channel i and i + D/2 of a head become neighbours."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def split_heads(value: np.ndarray, heads: int) -> np.ndarray:
    """What a converter does to GPT-NeoX's q, k, v of each head: all q, all k, all v."""
    size = value.shape[0] // (3 * heads)
    rows = [value[(head * 3 + part) * size :][:size] for part in range(3) for head in range(heads)]
    return np.concatenate(rows)


def write(path, model, tensors, kind=QuantType.F32, tokenizer=None, **changes):
    """Writes `model` (a `weights.Model`, its tensors under Hugging Face names) as a converter would."""
    c = model.config
    arch = ARCHITECTURES[c.family]
    writer = gguf.GGUFWriter(str(path), arch)
    fields = dict(
        block_count=c.num_layers,
        context_length=c.max_positions,
        embedding_length=c.hidden_size,
        feed_forward_length=c.intermediate_size,
        **{"attention.head_count": c.num_heads, "attention.head_count_kv": c.num_kv_heads},
        **{"attention.key_length": c.head_dim, "rope.freq_base": c.rope_theta},
        **{"rope.dimension_count": int(c.head_dim * c.rotary_fraction)},
    )
    fields["attention.layer_norm_epsilon" if c.norm == "layer" else "attention.layer_norm_rms_epsilon"] = c.norm_eps
    if c.family == "gpt_neox":
        fields["use_parallel_residual"] = c.parallel_residual
    if c.family == "gemma3":
        fields |= {"attention.sliding_window": c.sliding_window, "attention.sliding_window_pattern": c.sliding_pattern}
        fields["rope.freq_base_swa"] = c.local_rope_theta
    if c.rope_scaling is not None and c.rope_scaling.kind == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": c.rope_scaling.factor}
    for name, value in (fields | changes).items():
        if value is None:
            continue
        put = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        put[type(value)](f"{arch}.{name}", value)
    if tokenizer is not None:
        tokenizer(writer)
    if c.rope_scaling is not None and c.rope_scaling.kind == "llama3":
        rule, theta = c.rope_scaling, c.rope_theta
        wavelength = 2 * np.pi * theta ** (np.arange(0, c.head_dim, 2) / c.head_dim)
        smooth = (rule.original_positions / wavelength - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
        divisors = 1 / ((1 - np.clip(smooth, 0, 1)) / rule.factor + np.clip(smooth, 0, 1))
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c.num_layers)
    for name, value in tensors.items():
        value = value.astype(np.float32)
        if c.family == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = interleave_halves(value, c.num_heads if ".q_proj." in name else c.num_kv_heads)
        if c.family == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        if ".query_key_value." in name:
            value = split_heads(value, c.num_heads)
        if value.ndim == 1 or kind == QuantType.F32 or value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), value)
        else:
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama(families_folder):
    files = safetensors_file.SafetensorsFiles(families_folder / "llama")
    return weights.load(families_folder / "llama"), {name: np.array(files.read(name)) for name in files.names()}


def load(path, **kwargs):
    return weights.load(path, with_tokenizer=False, **kwargs)


# Not `llama3_rope`, whose original length of 16 is not Llama 3's: see `test_llama3_frequencies_are_recognised`.
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma3", "gpt_neox", "gpt_neox_sequential"])
def test_gguf_equals_safetensors(families_folder, tmp_path, case):
    model = weights.load(families_folder / case)
    files = safetensors_file.SafetensorsFiles(families_folder / case)
    tensors = {name: np.array(files.read(name)) for name in files.names()}
    write(tmp_path / "m.gguf", model, tensors)
    loaded = load(tmp_path / "m.gguf")
    want, got = dict(vars(model.config)), dict(vars(loaded.config))
    want["activation"] = "gelu" if case == "gpt_neox_sequential" else want["activation"]  # GGUF does not say which gelu
    floats = {key for key, value in want.items() if isinstance(value, float)} | {"rope_scaling", "query_scale"}
    assert {k: v for k, v in got.items() if k not in floats} == {k: v for k, v in want.items() if k not in floats}
    if model.config.family != "gemma3":
        assert got["query_scale"] == want["query_scale"]
    assert got["rope_scaling"] == want["rope_scaling"]
    for key in floats - {"rope_scaling", "query_scale"}:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-6, err_msg=key)
    # Adding one to Gemma's norms and taking it off again rounds; everything else is exact.
    atol = 1e-6 if model.config.family == "gemma3" else 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=0), loaded.params, model.params)


def test_gemma_query_scale_is_the_head_size_but_for_the_27b_model(families_folder, tmp_path):
    model = weights.load(families_folder / "gemma3")
    files = safetensors_file.SafetensorsFiles(families_folder / "gemma3")
    write(tmp_path / "m.gguf", model, {name: np.array(files.read(name)) for name in files.names()})
    file = gguf_file.GgufFile(tmp_path / "m.gguf")
    assert gguf_file.config(file)["query_pre_attn_scalar"] == model.config.head_dim
    file.metadata["gemma3.block_count"] = 62
    file.metadata["gemma3.embedding_length"], file.metadata["gemma3.attention.head_count"] = 5376, 32
    assert gguf_file.config(file)["query_pre_attn_scalar"] == 168


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_are_recognised(llama, tmp_path, factor):
    model, tensors = llama
    config = dataclasses.replace(model.config, rope_theta=500_000.0, rope_scaling=RopeScaling("llama3", factor))
    write(tmp_path / "m.gguf", dataclasses.replace(model, config=config), tensors)
    assert load(tmp_path / "m.gguf").config.rope_scaling == config.rope_scaling


def test_unknown_frequency_tables_are_refused(families_folder, tmp_path):
    model = weights.load(families_folder / "llama3_rope")
    files = safetensors_file.SafetensorsFiles(families_folder / "llama3_rope")
    write(tmp_path / "m.gguf", model, {name: np.array(files.read(name)) for name in files.names()})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight.*no known rule"):
        load(tmp_path / "m.gguf")


class TestPermutation:
    def test_rows(self):
        rows = np.array([0, 2, 1, 3, 4, 6, 5, 7], np.float32)[:, None]
        assert gguf_file.unpermute(rows, 2)[:, 0].tolist() == list(range(8))
        assert gguf_file.unpermute(rows, 1)[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]

    def test_it_is_not_its_own_inverse(self):
        rows = np.arange(16, dtype=np.float32)[:, None]
        once = gguf_file.unpermute(rows, 2)
        assert not np.array_equal(gguf_file.unpermute(once, 2), rows)
        np.testing.assert_array_equal(gguf_file.unpermute(interleave_halves(rows, 2), 2), rows)

    def test_qwen_is_left_alone(self, families_folder, tmp_path):
        model = weights.load(families_folder / "qwen2")
        files = safetensors_file.SafetensorsFiles(families_folder / "qwen2")
        tensors = {name: np.array(files.read(name)) for name in files.names()}
        write(tmp_path / "m.gguf", model, tensors)
        file = gguf_file.GgufFile(tmp_path / "m.gguf")
        name = "model.layers.0.self_attn.q_proj.weight"
        got = gguf_file.GgufTensors(file, 4, 2).read(name)
        np.testing.assert_array_equal(got, tensors[name].astype(np.float32))


def random_blocks(kind: QuantType, shape: tuple[int, int], rng) -> tuple[np.ndarray, np.ndarray | None]:
    """(block bytes, the floats they stand for where this package can quantise)."""
    values = rng.standard_normal(shape).astype(np.float32)
    if kind not in (QuantType.Q4_K, QuantType.Q6_K):
        return gguf.quantize(values, kind), values
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if kind == QuantType.Q4_K:  # two float16 scales lead the block
        blocks[..., 0:2] = blocks[..., 2:4] = scale
    else:  # one float16 scale ends it
        blocks[..., -2:] = scale
    return blocks.reshape(shape[0], -1), None


# Largest error on standard normal values (half a quantum of the largest block).
ERRORS = {"F32": 0.0, "F16": 0.002, "BF16": 0.016, "Q8_0": 0.016, "Q4_0": 0.6, "Q4_1": 0.3, "Q4_K": None, "Q6_K": None}


@pytest.mark.parametrize("name", ERRORS)
def test_block_formats(tmp_path, name):
    """Sizes are listed innermost first: (8, 512) is stored as [512, 8] and must come back untransposed, every row."""
    kind = QuantType[name]
    blocks, values = random_blocks(kind, (8, 512), np.random.default_rng(0))
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tensor("pad", np.ones(3, np.float32))
    writer.add_tensor("x", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf_file.GgufFile(tmp_path / "x.gguf")
    got = file.read("x")
    assert got.shape == (8, 512) and got.dtype == np.float32
    np.testing.assert_array_equal(got, gguf.dequantize(blocks, kind))
    assert np.isfinite(got).all() and got.std() > 0.01
    if values is not None:
        assert np.abs(got - values).max() <= ERRORS[name]
    np.testing.assert_array_equal(file.read("pad"), np.ones(3, np.float32))


@pytest.mark.parametrize(("kind", "tolerance"), [(QuantType.Q8_0, 0.06), (QuantType.BF16, 0.02), (QuantType.Q4_1, 0.5)])
def test_quantised_model_stays_near(llama, tmp_path, forward, kind, tolerance):
    """As in real files, rows that do not divide into blocks (here 48 wide) and vectors stay float32."""
    model, tensors = llama
    write(tmp_path / "m.gguf", model, tensors, kind)
    file = gguf_file.GgufFile(tmp_path / "m.gguf")
    block = gguf.GGML_QUANT_SIZES[kind][0]
    assert file.tensors["blk.0.attn_q.weight"].kind == file.tensors["token_embd.weight"].kind == kind
    assert file.tensors["blk.0.ffn_down.weight"].kind == (QuantType.F32 if 48 % block else kind)
    tokens = np.arange(12)[None]
    got, want = (forward(m.config, m.params, tokens, jit=False) for m in (load(tmp_path / "m.gguf"), model))
    error = np.sqrt(np.mean((got - want) ** 2)) / want.std()
    assert 0 < error < tolerance


class TestBadFiles:
    @pytest.fixture
    def path(self, llama, tmp_path):
        write(tmp_path / "m.gguf", *llama)
        return tmp_path / "m.gguf"

    def test_foreign(self, tmp_path):
        (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" * 100)
        with pytest.raises(ValueError, match="not a GGUF file"):
            load(tmp_path / "x.gguf")

    def test_empty(self, tmp_path):
        (tmp_path / "x.gguf").write_bytes(b"")
        with pytest.raises(ValueError, match="0 bytes is too short"):
            load(tmp_path / "x.gguf")

    def test_old_version(self, path):
        data = bytearray(path.read_bytes())
        data[4] = 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match="version 1 is not supported"):
            load(path)

    @pytest.mark.parametrize("keep", [30, 60, 400, 900])
    def test_truncated_header(self, path, keep):
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ValueError, match="truncated inside the header"):
            load(path)

    def test_truncated_tensors(self, path):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=r"truncated: tensor '.*' ends at byte \d+, the file has \d+"):
            load(path)

    def test_unknown_tensor_type(self, path):
        data = bytearray(path.read_bytes())
        at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
        data[at] = 200
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"'token_embd.weight' has the unknown type 200"):
            load(path)

    def test_undecodable_tensor_type(self, path):
        file = gguf_file.GgufFile(path)
        info = file.tensors["token_embd.weight"]
        file.tensors["token_embd.weight"] = info._replace(kind=QuantType.I32)
        with pytest.raises(ValueError, match=r"'token_embd.weight' has type I32, which cannot be decoded"):
            file.read("token_embd.weight")

    def test_unknown_architecture(self, tmp_path):
        gguf_writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "rwkv7")
        gguf_writer.write_header_to_file()
        gguf_writer.write_kv_data_to_file()
        gguf_writer.write_tensors_to_file()
        gguf_writer.close()
        with pytest.raises(ValueError, match=r"general.architecture='rwkv7' is not supported; choose one of llama"):
            load(tmp_path / "x.gguf")

    @pytest.mark.parametrize("field", ["block_count", "attention.head_count", "attention.layer_norm_rms_epsilon"])
    def test_missing_metadata(self, llama, tmp_path, field):
        write(tmp_path / "m.gguf", *llama, **{field: None})
        with pytest.raises(ValueError, match=f"'llama.{field}' is missing"):
            load(tmp_path / "m.gguf")

    def test_yarn(self, llama, tmp_path):
        write(tmp_path / "m.gguf", *llama, **{"rope.scaling.type": "yarn"})
        with pytest.raises(ValueError, match="'yarn' is not supported"):
            load(tmp_path / "m.gguf")

    def test_partly_rotated_llama(self, llama, tmp_path):
        write(tmp_path / "m.gguf", *llama, **{"rope.dimension_count": 4})
        with pytest.raises(ValueError, match=r"rope.dimension_count=4 differs from the head size 8"):
            load(tmp_path / "m.gguf")

    def test_wrong_shape(self, llama, tmp_path):
        model, tensors = llama
        write(tmp_path / "m.gguf", model, tensors, **{"feed_forward_length": 40})
        with pytest.raises(ValueError, match=r"gate_proj.*\(48, 32\).*\(40, 32\)"):
            load(tmp_path / "m.gguf")

    def test_left_over_tensor(self, llama, tmp_path):
        model, tensors = llama
        write(tmp_path / "m.gguf", model, tensors, **{"block_count": 1})
        with pytest.raises(ValueError, match="holds 9 tensors"):
            load(tmp_path / "m.gguf")

    def test_no_tokenizer(self, path):
        with pytest.raises(ValueError, match="holds no tokenizer"):
            weights.load(path)
