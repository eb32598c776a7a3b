"""What a warm-up is worth: accept length of an EAGLE drafter before and after, chains of 5 drafts, held-out prompts.

python -m experiments.bench.drafter --model=smollm2 --json=drafter.json          (--small for a look)

For each set of prompts (`gsm8k`: ADRL_DATA/gsm8k, or the folder of --gsm8k; `arithmetic`: small sums) the policy answers training
prompts at temperatures 0.7 and 1, one fresh drafter learns from the answers at both (`experiments.drafter_warmup` with the settings
of experiments/configs/drafter/, but shorter, see `SHORTER`), and held-out prompts are answered with it before and after. `--workdir`
keeps answers, drafters and curves, and takes answers that are there already. About 45 minutes on two cores, two thirds of them
training; with --prompts=arithmetic a quarter of an hour.
"""

import importlib
import os
import pathlib
import tempfile
from typing import Any

from experiments import drafter_warmup, schema, warmup_config
from experiments.bench import form
from experiments.warmup_config import WarmupConfig

SETS = ("arithmetic", "gsm8k")
TEMPERATURES, DEPTH = "0.7,1.0", 5
SHORTER = {
    "arithmetic": {"generation.tokens": 40_000, "training.steps": 350},
    "gsm8k": {
        "generation.tokens": 120_000,
        "training.steps": 450,
        "training.learning_rate": 6e-4,
        "training.draft_vocab_size": 4096,
    },
}
SMALL = {
    "generation.tokens": 1500,
    "generation.max_new_tokens": 32,
    "training.steps": 10,
    "training.depths": 1,
    "training.draft_vocab_size": 1024,
    "training.row_length": 512,
    "task.eval_prompts": 4,
}


def settings(name: str, model: str, gsm8k: str, changes: dict[str, Any]) -> WarmupConfig:
    """The published settings of a set of prompts, at both temperatures.

    Raises:
        ConfigError: a setting cannot be used.
    """
    c = importlib.import_module(f"experiments.configs.drafter.smollm2_{name}").get_config()
    c.model.source = model
    c.generation.temperatures, c.evaluation.depth = TEMPERATURES, DEPTH
    if name == "gsm8k":
        c.task.path = gsm8k
    c.update_from_flattened_dict(SHORTER[name] | changes)
    found = schema.build(WarmupConfig, c)
    warmup_config.check(found)
    return found


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder or file of weights")
    parser.add_argument("--prompts", default=",".join(SETS), help="sets of prompts, separated by commas")
    parser.add_argument("--gsm8k", default=os.path.join(os.environ.get("ADRL_DATA", ""), "gsm8k"), help="folder of GSM8K")
    parser.add_argument("--workdir", default=None, help="kept; default: a temporary folder, removed at the end")
    parser.add_argument("--tokens", type=int, default=None, help="response tokens to learn from; default as in SHORTER")
    parser.add_argument("--steps", type=int, default=None, help="training steps; default as in SHORTER")
    parser.add_argument("--small", action="store_true", help="minutes, to see that it runs; figures mean nothing")
    args = parser.parse_args(argv)
    names = args.prompts.split(",")
    if unknown := set(names) - set(SETS):
        parser.error(f"--prompts: {sorted(unknown)[0]!r} is unknown; choose among {', '.join(SETS)}")
    changes = dict(SMALL) if args.small else {}
    changes |= {"generation.tokens": args.tokens} if args.tokens else {}
    changes |= {"training.steps": args.steps} if args.steps else {}
    chosen = {name: settings(name, args.model, args.gsm8k, changes) for name in names}

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, c in chosen.items():
            workdir = pathlib.Path(args.workdir or temporary) / name
            workdir.mkdir(parents=True, exist_ok=True)
            print(f"  {name}: {c.generation.tokens} response tokens, {c.training.steps} steps", flush=True)
            record = drafter_warmup.run(c, workdir)
            for key in ("accept_length_before", "accept_length_after", "train_tokens", "train_s", "generate_s", "coverage"):
                results.setdefault(key, {})[name] = record[key]
            results.setdefault("tokens_per_s_after", {})[name] = record["tokens_per_s_after"]
    return form.finish("drafter", vars(args), results, args.json)


if __name__ == "__main__":
    main()
