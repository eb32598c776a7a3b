"""Peer `hf`: Hugging Face transformers `generate`, float32, forced lengths.

Config: `model` (Hugging Face folder), `temperature`, `seed`. Request: `prompts` (lists of token ids), `new_tokens`.
"""

import protocol
import torch
import transformers


def script(channel: protocol.Channel, config: dict) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32, attn_implementation="sdpa")
    model.eval()
    torch.manual_seed(config.get("seed", 0))
    pad = model.config.pad_token_id or 0
    temperature = config.get("temperature", 1.0)
    # The model's own generation defaults may filter; every filter is switched off.
    law = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature > 0 else dict(do_sample=False)

    def run(request: dict) -> dict:
        prompts, new_tokens = request["prompts"], request["new_tokens"]
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=pad,
                **law,
            )
        if out.shape[1] - width != new_tokens:
            raise RuntimeError(f"generated {out.shape[1] - width} tokens instead of {new_tokens}")
        record = {"tokens": len(prompts) * new_tokens}
        return {**record, "ids": out[:, width:].tolist()} if request.get("return_ids") else record

    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
    protocol.serve(channel, facts, run)


if __name__ == "__main__":
    protocol.main(script)
