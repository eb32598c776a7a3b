"""Accelerator kernels without the accelerator: bytes, roofline times, and whether they compile for real chips.

python -m experiments.bench.kernels --json=kernels.json            (minutes: every op x model x chip x dtype is compiled)
python -m experiments.bench.kernels --aot=none --json=kernels.json (seconds: bytes and roofline only)

Bytes are counted from the grids and block specs that the kernels run with (`adrl_kernels.plan.Plan.traffic`), at ragged
lengths of 1,024 to 3,072 tokens. `minimum_bytes` is what no implementation can do without. `roofline_us` is the longer of
moving those bytes and doing the matrix products at the chip's published peaks, for bfloat16; nothing here is a measured time.
`aot_ok` says that libtpu compiled the kernel for the chip, on this machine, without one. Figures that a ratio compares with
`plain` are bytes of a whole step through the model, weights and activations included.
"""

import time
from typing import Any

import jax.numpy as jnp
from adrl_kernels import targets

from experiments.bench import form, kernel_shapes

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
BATCHES = (1, 4, 16)
NODES = 8
DRAFT_VOCAB = 32_768


def op_rows(models: list[str], batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """One row for each op, model and batch, in bfloat16: bytes, minimum, ratio, roofline."""
    rows = []
    for op, make in kernel_shapes.OPS.items():
        for model in models:
            for batch in batches[-1:] if op == "log_probs" else batches:
                case = make(kernel_shapes.MODELS[model], batch, NODES, jnp.bfloat16)
                rows.append(
                    {
                        "op": op,
                        "model": model,
                        "batch": batch,
                        "nodes": NODES,
                        "bytes": case.bytes,
                        "minimum_bytes": case.minimum,
                        "ratio": case.bytes / case.minimum,
                        "roofline_us": {c.name: 1e6 * c.seconds(case.bytes, case.flops) for c in targets.CHIPS},
                    }
                )
    return rows


def compile_all(models: list[str], chips: list[targets.Chip], dtypes: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(op -> model -> chip -> dtype -> whether it compiled, why not)."""
    found: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for op, make in kernel_shapes.OPS.items():
        for model in models:
            for chip in chips:
                for dtype in dtypes:
                    case = make(kernel_shapes.MODELS[model], BATCHES[-1], NODES, DTYPES[dtype])
                    place = found.setdefault(op, {}).setdefault(model, {}).setdefault(chip.name, {})
                    try:
                        targets.compiled(chip, case.function, *case.args, donate=case.donate)
                        place[dtype] = True
                    except Exception as error:  # whatever the compiler says is the figure
                        place[dtype] = False
                        notes[f"{op} {model} {chip.name} {dtype}"] = str(error).strip().splitlines()[0][:300]
    return found, notes


def against_plain(models: list[str], draft_vocab: int | None = None, *, drafted: bool) -> dict[str, Any]:
    """model -> chip -> batch -> bytes of a verify round (`drafted`: and of drafting) over those of a plain step.

    Bytes are the same on every chip; the chips are there because blocks may come to differ.
    """
    found: dict[str, Any] = {}
    for name in models:
        m = kernel_shapes.MODELS[name]
        ratios = {}
        for batch in BATCHES:
            plain, verify = (kernel_shapes.round_bytes(m, batch, n, jnp.bfloat16) for n in (1, NODES))
            draft = kernel_shapes.draft_bytes(m, batch, NODES - 1, jnp.bfloat16, draft_vocab) if drafted else 0
            ratios[batch] = (verify + draft) / plain
        found[name] = {c.name: ratios for c in targets.CHIPS}
    return found


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--models", default=",".join(kernel_shapes.MODELS), metavar="A,B")
    parser.add_argument("--chips", default=",".join(c.name for c in targets.CHIPS), metavar="A,B", help="to compile for")
    parser.add_argument("--dtypes", default=",".join(DTYPES), metavar="A,B", help="to compile in")
    parser.add_argument("--aot", choices=("all", "none"), default="all", help="whether kernels are compiled for the chips")
    args = parser.parse_args(argv)
    models = _chosen(parser, "models", args.models, kernel_shapes.MODELS)
    chips = [c for c in targets.CHIPS if c.name in _chosen(parser, "chips", args.chips, [c.name for c in targets.CHIPS])]
    dtypes = _chosen(parser, "dtypes", args.dtypes, DTYPES)

    rows = op_rows(models, BATCHES)
    results: dict[str, Any] = {
        "verify_attention_ratio": max(r["ratio"] for r in rows if r["op"] == "verify_attention"),
        "sample_head_ratio": max(r["ratio"] for r in rows if r["op"] == "sample_head"),
        "verify_round_over_plain": against_plain(models, drafted=False),
        "spec_round_over_plain": against_plain(models, drafted=True),
        "spec_round_over_plain_reduced_vocab": against_plain(models, DRAFT_VOCAB, drafted=True),
        "aot_ok": None,
        "aot_compiled": None,
        "aot_seconds": None,
        "ops": rows,
    }
    notes = {
        "spec_round_over_plain_reduced_vocab": f"an EAGLE drafter of {DRAFT_VOCAB:,} ids, the other of the whole vocabulary"
    }
    missing = "not asked for (--aot=none)" if args.aot == "none" else targets.missing()
    if missing:
        notes["aot_ok"] = missing
    else:
        begin = time.perf_counter()
        results["aot_ok"], faults = compile_all(models, chips, dtypes)
        results["aot_seconds"] = time.perf_counter() - begin
        flags = [v for op in results["aot_ok"].values() for m in op.values() for c in m.values() for v in c.values()]
        results["aot_compiled"] = f"{sum(flags)} of {len(flags)}"
        notes |= faults
        for row in rows:
            row["aot_ok"] = results["aot_ok"][row["op"]][row["model"]]
    return form.finish("kernels", vars(args), results, args.json, notes)


def _chosen(parser, name: str, text: str, known) -> list[str]:
    names = [x for x in text.split(",") if x]
    unknown = [x for x in names if x not in known]
    if unknown or not names:
        parser.error(f"--{name}={text}: choose from {', '.join(known)}")
    return names


if __name__ == "__main__":
    main()
