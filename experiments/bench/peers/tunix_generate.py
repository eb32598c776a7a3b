"""Peer `tunix`: google-tunix's own sampler, float32, forced lengths.

Config: `model` (Hugging Face folder), `temperature`, `seed`. Request: `prompts` (lists of token ids), `new_tokens`.
"""

import protocol
import tunix_model
from tunix.generate import sampler as tunix_sampler


def script(channel: protocol.Channel, config: dict) -> None:
    model, _, sizes, facts = tunix_model.load(config["model"])
    tokenizer = tunix_model.IdTokenizer(pad=0, eos=-1)  # an end token that never appears forces the length
    temperature, seed = config.get("temperature", 1.0), config.get("seed", 0)
    law = dict(temperature=temperature, top_p=1.0) if temperature > 0 else dict(temperature=0.0)
    samplers = {}

    def sampler(capacity: int):
        if capacity not in samplers:
            cache = tunix_sampler.CacheConfig(
                cache_size=capacity, num_layers=sizes.num_layers, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim
            )
            samplers[capacity] = tunix_sampler.Sampler(model, tokenizer, cache)
        return samplers[capacity]

    def run(request: dict) -> dict:
        nonlocal seed
        seed += 1
        prompts, new_tokens = request["prompts"], request["new_tokens"]
        width = tunix_model.round_up(max(map(len, prompts)))
        out = sampler(width + new_tokens)(
            input_strings=[tunix_model.text(prompt) for prompt in prompts],
            max_generation_steps=new_tokens,
            max_prompt_length=width,
            eos_tokens=[-1],
            seed=seed,
            **law,
        )
        lengths = {len(ids) for ids in out.tokens}
        if lengths != {new_tokens}:
            raise RuntimeError(f"generated {sorted(lengths)} tokens instead of {new_tokens}")
        record = {"tokens": len(prompts) * new_tokens}
        return {**record, "ids": [row.tolist() for row in out.tokens]} if request.get("return_ids") else record

    protocol.serve(channel, facts, run)


if __name__ == "__main__":
    protocol.main(script)
