#!/bin/sh
# The kernels on a GPU, start to end in under 8 minutes: sh experiments/bench/kernels_gpu.sh [FILE.json]
# Needs an NVIDIA Hopper GPU and `pip install -e .[cuda]` in the Python that PYTHON names (default .venv/bin/python).
set -eu
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-.venv/bin/python}"
OUT="${1:-kernels_gpu.json}"
# KERNELS=xla SIZE=tiny rehearses the script on any machine.
KERNELS="${KERNELS:-pallas_gpu}"
SIZE="${SIZE:-1.5b}"
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.85 JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-.cache/jax}"

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv || true  # none at a rehearsal
if [ "$KERNELS" = pallas_gpu ]; then
  "$PYTHON" -c 'import jax; assert jax.default_backend() == "gpu", jax.devices(); print(jax.__version__, jax.devices())'
fi
date -u
# Figures of XLA first, so that a fault of a kernel leaves something to set it against.
FAILED=0
timeout 190 "$PYTHON" -m experiments.bench.kernels_gpu --size="$SIZE" --kernels=xla --json="${OUT%.json}.xla.json" || FAILED=$?
timeout 250 "$PYTHON" -m experiments.bench.kernels_gpu --size="$SIZE" --kernels="$KERNELS" --json="$OUT" || FAILED=$?
date -u
exit "$FAILED"
