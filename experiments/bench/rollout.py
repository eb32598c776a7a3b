"""Rollout speed on a real model, one workload a run. Every side produces the same token ids.

python -m experiments.bench.rollout --model=smollm2 --json=rollout.json --peer=hf,tunix --peer_python=hf=/path/python,…
python -m experiments.bench.rollout --workload=longtail --drafter=FOLDER --data=FOLDER --json=longtail.json --peer=hf

Workloads:
  standard  16 x 64 tokens and 1 x 128: plain decoding against peers
  longtail  32 requests of 32 to 512 tokens: plain, every strategy, BEG and goodput
  grid      batches of 1 to 32: every strategy and goodput, a table of tokens/s
  group     groups of 8 on arithmetic, second epoch: drafts from what siblings and the epoch before answered
  tree      chains against trees at equal verify tokens
  queue     10,000 short requests over 16 rows, a tiny model

FOLDER of --drafter is what `experiments.drafter_warmup` wrote; --data holds GSM8K's records (train.jsonl).
"""

import importlib

from experiments.bench import form
from experiments.train import use_compilation_cache

WORKLOADS = ("standard", "longtail", "grid", "group", "tree", "queue")


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="standard")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder or file of weights")
    parser.add_argument("--drafter", default=None, metavar="FOLDER", help="a drafter from experiments.drafter_warmup")
    parser.add_argument("--data", default=None, metavar="FOLDER", help="GSM8K's records; word problems of our own without")
    parser.add_argument("--rounds_per_launch", type=int, default=8, help="decode rounds between two looks of the host")
    parser.add_argument("--temperature", type=float, default=0.9, help="of longtail, grid, group and tree")
    parser.add_argument(
        "--simulate_acceptance",
        type=float,
        default=None,
        metavar="P",
        help="longtail: drafts stand with this chance, unchecked: the engine apart from its drafter's luck",
    )
    parser.add_argument(
        "--table", default=None, metavar="FILE", help="longtail, grid: record latencies and acceptance for bench.bandit"
    )
    parser.add_argument("--trace", default=None, metavar="FILE", help="longtail: write the last rollout's Perfetto trace here")
    args = parser.parse_args(argv)
    use_compilation_cache("default", None)
    results, notes = importlib.import_module(f"experiments.bench.rollout_{args.workload}").run(args)
    name = "rollout" if args.workload == "standard" else f"rollout_{args.workload}"
    return form.finish(name, vars(args), results, args.json, notes)


if __name__ == "__main__":
    main()
