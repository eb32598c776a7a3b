"""The kernels compile for real chips with libtpu, on a machine that has none, and the counted bytes are what a program reads."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adrl_kernels import targets
from adrl_kernels.log_probs import pallas_tpu as log_probs_tpu
from adrl_kernels.log_probs.xla import Static
from adrl_kernels.verify_attention import pallas_tpu as attention_tpu
from adrl_kernels.verify_attention.arguments import Cache, Nodes

from experiments.bench import kernel_shapes as shapes

pytestmark = pytest.mark.skipif(targets.missing() is not None, reason=str(targets.missing()))

CHIPS = {c.name: c for c in targets.CHIPS}
QWEN = shapes.MODELS["Qwen2.5-7B"]


def compiled(case, chip):
    return targets.compiled(CHIPS[chip], case.function, *case.args, donate=case.donate)


@pytest.mark.parametrize("op", shapes.OPS)
def test_each_op_compiles_for_a_chip(op):
    program = compiled(shapes.OPS[op](QWEN, 16, 8, jnp.bfloat16), "v5e")
    assert "tpu_custom_call" in program.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("model, op", list(itertools.product(shapes.MODELS, shapes.OPS)))
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16), ids=lambda d: d.__name__)
def test_every_op_compiles_for_every_chip(chip, model, op, dtype):
    compiled(shapes.OPS[op](shapes.MODELS[model], 16, 8, dtype), chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("options", (dict(page=128), dict(page=256, int8=True), dict(int8=True, window=True)), ids=str)
def test_every_kind_of_cache_compiles(chip, options):
    page, int8 = options.get("page"), options.get("int8", False)
    struct = jax.ShapeDtypeStruct
    rows, size = (16, 4096) if page is None else (300, page)
    stored = jnp.int8 if int8 else jnp.bfloat16
    scales = struct((rows, 4, size), jnp.float32) if int8 else None
    table = None if page is None else struct((16, 4096 // page), jnp.int32)
    cache = Cache(struct((rows, 4, 128, size), stored), struct((rows, 4, size, 128), stored), table, scales, scales)
    nodes = Nodes(
        *(struct((16, 64, heads, 128), jnp.bfloat16) for heads in (28, 4, 4)),
        struct((16, 64, 64), jnp.bool_),
        struct((16, 64), jnp.int32) if options.get("window") else None,
    )
    targets.compiled(CHIPS[chip], attention_tpu.verify_attention, nodes, cache, struct((16,), jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("model", shapes.MODELS)
@pytest.mark.parametrize("which", ("by_hidden", "by_matrix"))
def test_gradients_compile(chip, model, which):
    m, struct = shapes.MODELS[model], jax.ShapeDtypeStruct
    static = Static(True, m.vocab - 3, m.vocab, 1.0, True)
    args = (
        struct((m.vocab, m.hidden), jnp.float32),
        struct((1024, m.hidden), jnp.bfloat16),
        struct((1024,), jnp.int32),
        struct((1024, 4), jnp.float32),
    )
    targets.compiled(CHIPS[chip], lambda *a: log_probs_tpu.run(which, static, False, *a), *args)


@pytest.mark.parametrize("op", ("verify_attention", "sample_head"))
def test_counted_bytes_are_those_of_the_compiled_program(op):
    """Where every row is full, what is counted is the arguments and results of the program: nothing is read twice or copied.

    The program's own cost analysis says nothing here: it does not look into kernels.
    """
    case = shapes.OPS[op](QWEN, 16, 8, jnp.bfloat16)
    moved = case.moved
    if op == "verify_attention":
        nodes, cache, _ = case.args
        full = np.full(16, shapes.CAPACITY, np.int32)
        moved = attention_tpu.plan(nodes, cache).traffic(*attention_tpu.scalars(nodes, cache, full))
    program = compiled(case, "v5e")
    memory = program.memory_analysis()
    touched = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert sum(moved.values()) == pytest.approx(touched, rel=0.1)
    assert memory.temp_size_in_bytes < 0.05 * touched
    if op == "verify_attention":
        assert not brought_into_vmem(program, case.args[1])


def brought_into_vmem(program, cache) -> bool:
    """Whether XLA moves a whole cache to where kernels compute (memory space 1), its dead entries too, before they run."""
    shapes_of = "|".join(",".join(map(str, x.shape)) for x in cache[:2])
    return re.search(rf"\[({shapes_of})\]\{{[^}}]*S\(1\)", program.as_text()) is not None


def test_commits_happen_in_place():
    """The compiled program's results are its cache, and it takes no copy of it."""
    case = shapes.OPS["commit"](QWEN, 16, 8, jnp.bfloat16)
    program = compiled(case, "v5e")
    memory = program.memory_analysis()
    assert not brought_into_vmem(program, case.args[0])
    cache = sum(x.size * 2 for x in case.args[0][:2])
    assert memory.alias_size_in_bytes == cache
    assert memory.output_size_in_bytes < cache + 4096  # and the table of results
    assert memory.temp_size_in_bytes < 0.01 * cache


def test_a_chips_limits_are_met_at_compile_time():
    """The compiler that says yes above also says no: a block that no VMEM holds."""
    from jax.experimental import pallas as pl

    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    def whole(x):
        return pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pytest.raises(Exception, match=r"(?i)vmem|RESOURCE_EXHAUSTED"):
        targets.compiled(CHIPS["v5e"], whole, jax.ShapeDtypeStruct((4096, 2048), jnp.float32))
