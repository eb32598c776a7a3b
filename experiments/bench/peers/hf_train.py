"""Peer `hf`: Hugging Face transformers, forward and backward pass in float32 of sequences of given lengths, no optimizer step.

Config: `model` (Hugging Face folder), `sequences` (lists of token ids). Request: `layout`, `padded` (one sequence a row, to the longest) or
`packed` (all in one row, positions restarting). The loss is the mean next-token cross-entropy over all tokens but the first of
each sequence.
"""

import protocol
import torch
import transformers


def script(channel: protocol.Channel, config: dict) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    sequences = [torch.tensor(ids) for ids in config["sequences"]]
    predicted = sum(map(len, sequences)) - len(sequences)

    def padded() -> dict:
        width = max(map(len, sequences))
        ids = torch.zeros((len(sequences), width), dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for i, s in enumerate(sequences):
            ids[i, : len(s)], mask[i, : len(s)], labels[i, : len(s)] = s, 1, s
        return dict(input_ids=ids, attention_mask=mask, labels=labels)

    def packed() -> dict:
        ids = torch.cat(sequences)[None]
        positions = torch.cat([torch.arange(len(s)) for s in sequences])[None]
        labels = torch.where(positions == 0, -100, ids)
        return dict(input_ids=ids, position_ids=positions, labels=labels)

    layouts = {"padded": padded(), "packed": packed()}

    def run(request: dict) -> dict:
        loss = model(**layouts[request["layout"]], num_items_in_batch=predicted, use_cache=False).loss
        loss.backward()
        norm = torch.stack([p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
        record = {"loss": float(loss.detach()), "grad_norm": float(norm)}
        model.zero_grad()
        return record

    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
    protocol.serve(channel, facts, run)


if __name__ == "__main__":
    protocol.main(script)
