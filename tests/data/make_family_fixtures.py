"""Writes `tests/data/families/`: small random models of every family, saved by `transformers`, with their logits.

Needs torch and transformers (made with 2.13 and 5.24), which nothing else here does; run it again only to add a case:

    python tests/data/make_family_fixtures.py

Weights are drawn far from their usual start (wide matrices, uneven norms, biases that matter) so that a wrong
permutation, norm or angle shows. Logits are computed in float64 from the weights as stored.
"""

import os
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent / "families"
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64)
GROUPED = SMALL | dict(num_attention_heads=4, num_key_value_heads=2)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
LENGTH = 24

# name -> (model class, config, dtype of the file, largest shard)
CASES = {
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True, rms_norm_eps=1e-5),
        torch.float32,
        "1GB",
    ),
    # Head size 16, twice what the hidden size gives; Llama 3's rescaled frequencies; untied.
    "llama3_rope": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**GROUPED, head_dim=16, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
        torch.bfloat16,
        "1GB",
    ),
    # Several shards with an index.
    "qwen2": (
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config(
            **GROUPED, tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=5e3)
        ),
        torch.bfloat16,
        "12KB",
    ),
    "qwen3": (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config(**GROUPED, head_dim=12, tie_word_embeddings=False),
        torch.float16,
        "1GB",
    ),
    # Two local layers, one global, one local; the sequence is three windows long.
    "gemma3": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig(
            **GROUPED | dict(num_hidden_layers=4),
            head_dim=8,
            sliding_window=8,
            sliding_window_pattern=3,
            query_pre_attn_scalar=24,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=2.0, rope_theta=2000.0),
                sliding_attention=dict(rope_type="default", rope_theta=50.0),
            ),
        ),
        torch.bfloat16,
        "1GB",
    ),
    "gpt_neox": (
        transformers.GPTNeoXForCausalLM,
        transformers.GPTNeoXConfig(
            **SMALL,
            num_attention_heads=2,
            tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=300.0, partial_rotary_factor=0.25),
        ),
        torch.float16,
        "1GB",
    ),
    "gpt_neox_sequential": (
        transformers.GPTNeoXForCausalLM,
        transformers.GPTNeoXConfig(
            **SMALL, num_attention_heads=2, use_parallel_residual=False, hidden_act="gelu_new", tie_word_embeddings=True
        ),
        torch.bfloat16,
        "1GB",
    ),
}


def main() -> None:
    for name, (build, config, dtype, shard) in CASES.items():
        torch.manual_seed(sum(map(ord, name)))
        model = build(config).eval()
        for key, value in model.named_parameters():
            if value.ndim == 2:
                value.data.normal_(0.0, 0.5 if "embed" in key else 0.25)
            elif key.endswith("bias"):
                value.data.normal_(0.0, 0.3)
            else:
                value.data = (0.0 if "gemma" in name else 1.0) + 0.3 * torch.randn_like(value)
        model = model.to(dtype)
        folder = HERE / name
        os.makedirs(folder, exist_ok=True)
        model.save_pretrained(folder, max_shard_size=shard)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokens = torch.randint(0, config.vocab_size, (2, LENGTH))
        # Loaded again: casting a live model would also round its rotary frequencies.
        model = build.from_pretrained(folder, dtype=torch.float32).double().eval()
        with torch.no_grad():
            logits = model(tokens).logits
        np.savez_compressed(
            folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy().astype(np.float32)
        )
        print(name, sorted(p.name for p in folder.iterdir()), f"logits std {logits.std():.2f}")


if __name__ == "__main__":
    main()
