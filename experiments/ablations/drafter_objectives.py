"""What to ask of a drafter: the same answers, learnt from with different losses and architectures (as TLT's Table 7).

python -m experiments.ablations.drafter_objectives --model=smollm2 --json=objectives.json          (--small for a look)

    feature      smooth L1 between predicted and true hidden states alone
    token        soft cross-entropy between token laws alone
    both         1.0 and 0.1, as TLT trains EAGLE
    overlap      total variation distance between token laws: what coupled verification accepts on
    eagle3       low, middle and high hidden states fused, cross-entropy on predictions fed back (training-time test)
    eagle3_overlap   the same architecture, trained on the total variation distance

Each row: accept length and tokens/s on held-out prompts (chains of `--depth`), seconds of training. Everything but the loss and
the architecture is shared: answers, what the policy made of them, their order, steps, learning rate and its schedule. About 20
minutes on two cores.
"""

import contextlib
import pathlib
import shutil
import tempfile
from typing import Any

from experiments import drafter_warmup, schema, warmup_config
from experiments.bench import form
from experiments.configs.drafter import smollm2_arithmetic
from experiments.warmup_config import WarmupConfig

OBJECTIVES: dict[str, dict[str, Any]] = {
    "feature": dict(feature_weight=1.0, token_weight=0.0, overlap_weight=0.0, depths=1),
    "token": dict(feature_weight=0.0, token_weight=1.0, overlap_weight=0.0, depths=1),
    "both": dict(feature_weight=1.0, token_weight=0.1, overlap_weight=0.0, depths=1),
    "overlap": dict(feature_weight=0.0, token_weight=0.0, overlap_weight=1.0, depths=1),
    "eagle3": dict(architecture="eagle3", feature_weight=0.0, token_weight=1.0, overlap_weight=0.0, depths=3),
    "eagle3_overlap": dict(architecture="eagle3", feature_weight=0.0, token_weight=0.0, overlap_weight=1.0, depths=3),
}
SMALL = {
    "generation.tokens": 800,
    "generation.max_new_tokens": 16,
    "training.steps": 5,
    "training.row_length": 128,
    "training.draft_vocab_size": 1024,
    "task.eval_prompts": 2,
    "generation.max_batch": 16,
    "evaluation.max_batch": 2,
}


def settings(objective: str, model: str, depth: int, changes: dict[str, Any]) -> WarmupConfig:
    """The arithmetic warm-up with one objective.

    Raises:
        ConfigError: a setting cannot be used.
    """
    c = smollm2_arithmetic.get_config()
    c.model.source, c.evaluation.depth = model, depth
    c.task.eval_prompts, c.training.rows = 16, 2
    c.training.optimizer, c.training.learning_rate = "adamw", 6e-4
    c.update_from_flattened_dict(changes | {f"training.{k}": v for k, v in OBJECTIVES[objective].items()})
    found = schema.build(WarmupConfig, c)
    warmup_config.check(found)
    return found


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder or file of weights")
    parser.add_argument("--objectives", default=",".join(OBJECTIVES), help="rows of the table, separated by commas")
    parser.add_argument("--depth", type=int, default=5, help="drafted tokens a pass")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--tokens", type=int, default=20_000, help="response tokens to learn from")
    parser.add_argument("--workdir", default=None, help="kept, with the answers; default: a temporary folder")
    parser.add_argument("--small", action="store_true", help="minutes, to see that it runs; figures mean nothing")
    args = parser.parse_args(argv)
    names = args.objectives.split(",")
    if unknown := set(names) - OBJECTIVES.keys():
        parser.error(f"--objectives: {sorted(unknown)[0]!r} is unknown; choose among {', '.join(OBJECTIVES)}")
    changes = {"training.steps": args.steps, "generation.tokens": args.tokens} | (SMALL if args.small else {})
    chosen = {name: settings(name, args.model, args.depth, changes) for name in names}

    results: dict[str, Any] = {"accept_length": {}, "tokens_per_s": {}, "train_s": {}}
    with contextlib.ExitStack() as stack:
        root = pathlib.Path(args.workdir or stack.enter_context(tempfile.TemporaryDirectory()))
        answers = root / "responses.npz"
        read: dict[Any, Any] = {}
        for name, c in chosen.items():
            workdir = root / name
            workdir.mkdir(parents=True, exist_ok=True)
            if answers.exists() and not (workdir / answers.name).exists():
                shutil.copy(answers, workdir)
            print(f"  {name}", flush=True)
            record = drafter_warmup.run(c, workdir, read=read, measure_before=False)
            if not answers.exists():
                shutil.copy(workdir / answers.name, answers)
            results["accept_length"][name] = record["accept_length_after"]
            results["tokens_per_s"][name] = record["tokens_per_s_after"]
            results["train_s"][name] = record["train_s"]
    return form.finish("drafter_objectives", vars(args), results, args.json)


if __name__ == "__main__":
    main()
