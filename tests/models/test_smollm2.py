"""SmolLM2-135M-Instruct as its package ships it (4-bit GGUF) against figures computed with `transformers` in float32."""

import json
import pathlib

import numpy as np
import pytest

from adrl_jax.models import weights

try:
    weights.find_named("smollm2")
    MISSING = ""
except FileNotFoundError as error:
    MISSING = str(error)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

REFERENCE = json.loads((pathlib.Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text())
PROMPTS = REFERENCE["prompts"]
LENGTH = 136  # longest prompt and its 64 greedy tokens


@pytest.fixture(scope="module")
def model():
    return weights.load_named("smollm2")


@pytest.fixture(scope="module")
def logits(model, forward):
    """Name of a prompt -> float64 logits at every place of the prompt and its greedy continuation. One program for all."""
    rows = [entry["ids"] + entry["greedy64_ids"] for entry in PROMPTS.values()]
    tokens = np.zeros((len(rows), LENGTH), np.int32)
    for row, ids in zip(tokens, rows):
        row[: len(ids)] = ids
    out = forward(model.config, model.params, tokens)
    return {name: out[i, : len(rows[i])].astype(np.float64) for i, name in enumerate(PROMPTS)}


def log_sum_exp(x: np.ndarray) -> np.ndarray:
    top = x.max(-1)
    return top + np.log(np.exp(x - top[..., None]).sum(-1))


def test_config(model):
    c, expected = model.config, REFERENCE["config"]
    assert (c.family, c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.intermediate_size, c.head_dim) == tuple(
        expected[key] for key in ("arch", "hidden_size", "n_layers", "n_heads", "n_kv_heads", "ffn", "head_dim")
    )
    assert (c.rope_theta, c.norm_eps) == (expected["rope_theta"], expected["rms_eps"])
    assert c.tie_embeddings and "head" not in model.params


def test_tokenizer(model):
    tok = model.tokenizer
    assert (tok.eos_ids, tok.pad_id, tok.bos_id) == ((REFERENCE["eos"],), 2, REFERENCE["bos"])
    assert tok.size == model.valid_vocab == model.config.vocab_size == 49_152
    assert tok.chat_template == REFERENCE["chat_template"]
    for entry in PROMPTS.values():
        assert tok.encode(entry["text"]).tolist() == entry["ids"]
        assert tok.decode(entry["ids"], skip_special=False) == entry["text"]
        assert tok.decode(entry["greedy64_ids"], skip_special=False) == entry["greedy_text"]
    text = tok.chat([{"role": "user", "content": "What is 2+2?"}])
    assert text == PROMPTS["chat_2plus2"]["text"]
    assert len(tok.encode(text)) == 37


@pytest.mark.parametrize(
    "text", ["The year 1234567, 3.14 & 10%", "  x\n\n\ty ", "naïve — 日本語 🙂👩‍👩‍👧", "#### 72 <<48/2=24>>24"]
)
def test_text_survives_the_round_trip(model, text):
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_logits(logits, name):
    entry = PROMPTS[name]
    last = logits[name][len(entry["ids"]) - 1]
    assert np.argsort(-last)[:20].tolist() == entry["last_top20_ids"]
    np.testing.assert_allclose(last[entry["last_top20_ids"]], entry["last_top20_logits"], atol=1e-3, rtol=0)
    np.testing.assert_allclose(log_sum_exp(last), entry["last_logsumexp"], atol=1e-3, rtol=0)
    np.testing.assert_allclose(last.mean(), entry["last_logit_mean"], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", PROMPTS)
def test_log_probs_of_prompt_and_continuation(logits, name):
    entry = PROMPTS[name]
    ids = np.array(entry["ids"] + entry["greedy64_ids"])
    x = logits[name][:-1]
    log_probs = x[np.arange(len(x)), ids[1:]] - log_sum_exp(x)
    expected = entry["prompt_token_logprobs"] + entry["greedy64_logprobs"]
    np.testing.assert_allclose(log_probs, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_ids(logits, name):
    """Every one of the 64 ids is the argmax after its predecessors, so greedy decoding gives exactly them."""
    entry = PROMPTS[name]
    start = len(entry["ids"]) - 1
    assert logits[name][start:-1].argmax(-1).tolist() == entry["greedy64_ids"]
