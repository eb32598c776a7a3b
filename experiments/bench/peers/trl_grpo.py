"""Peer `trl`: one optimizer step of TRL's GRPOTrainer, float32, forced lengths; each request runs one step.

Config: `model` (Hugging Face folder with tokenizer), `texts` (prompt texts, chat template applied), `prompts` (their token
ids), `group`, `new_tokens`, `temperature`, `learning_rate`, `seed`. Answers `seconds`, `generate_s`, `update_s` (the rest).
"""

import time

import datasets
import protocol
import torch
import transformers
import trl


def script(channel: protocol.Channel, config: dict) -> None:
    folder, texts = config["model"], config["texts"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer(text=texts)["input_ids"] != config["prompts"]:
        raise ValueError("the folder's tokenizer gives other ids for the prompts than ours")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    steps = 1000  # more than anyone asks for; the end of standard input ends the training
    arguments = trl.GRPOConfig(
        output_dir=config["scratch"],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=len(texts) * config["group"],
        gradient_accumulation_steps=1,
        num_generations=config["group"],
        max_completion_length=config["new_tokens"],
        generation_kwargs={"min_new_tokens": config["new_tokens"]},
        temperature=config.get("temperature", 1.0),
        top_p=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=config.get("learning_rate", 1e-6),
        seed=config.get("seed", 0),
        max_steps=steps,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    spent = {}

    class Line(transformers.TrainerCallback):
        """Waits for a request before each step and answers after it."""

        def on_step_begin(self, args, state, control, **_):
            if channel.receive() is None:
                raise StopIteration
            spent.clear()
            spent["start"] = time.perf_counter()
            return control

        def on_step_end(self, args, state, control, **_):
            seconds = time.perf_counter() - spent["start"]
            channel.answer({"seconds": seconds, "generate_s": spent["generate"], "update_s": seconds - spent["generate"]})
            return control

    def reward(completion_ids, **_):
        return [(sum(ids) % 17) / 17.0 for ids in completion_ids]  # any reward that differs within a group

    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in texts] * steps),
        callbacks=[Line()],
    )
    generate = trainer._generate_single_turn

    def timed_generate(*args, **kwargs):
        start = time.perf_counter()
        out = generate(*args, **kwargs)
        spent["generate"] = time.perf_counter() - start
        lengths = {len(ids) for ids in out[0]}
        if lengths != {config["new_tokens"]}:
            raise RuntimeError(f"generated {sorted(lengths)} tokens instead of {config['new_tokens']}")
        return out

    trainer._generate_single_turn = timed_generate
    facts = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    channel.ready({**facts, "threads": torch.get_num_threads()})
    try:
        trainer.train()
    except StopIteration:
        pass  # the benchmark is done


if __name__ == "__main__":
    protocol.main(script)
