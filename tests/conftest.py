"""Test-wide set-up: CPU only, four fake devices, so that every test runs on a laptop."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax

jax.config.update("jax_num_cpu_devices", 4)
