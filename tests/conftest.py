"""Test-wide set-up: CPU only, four fake devices, so that every test runs on a laptop."""

import gc
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Thousands of tiny programs are compiled and most run once: LLVM's dear passes cost a third of the suite's time and gain nothing.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)

sys.path.append(os.path.dirname(__file__))  # oracles that several folders share

_MAPS = pathlib.Path("/proc/self/maps")
_MANY_MAPS = 20_000  # Linux allows a process 65,530 mappings by default


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_let_go():
    """Each compiled program takes some memory mappings; a worker that kept those of all modules would run out and crash."""
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()
