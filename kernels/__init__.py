"""Accelerator kernels, imported as `adrl_kernels`: one folder an operation, each with its plain `jax.numpy` reference."""
