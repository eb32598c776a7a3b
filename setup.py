"""Packages and dependencies. Exact versions, for both supported sets of Python and JAX, are in constraints.txt."""

import pathlib
import re

from setuptools import find_namespace_packages, setup

ROOT = pathlib.Path(__file__).parent

VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "adrl_jax/__init__.py").read_text()).group(1)

CORE = [
    # Python 3.11 is served up to jax 0.10 / flax 0.12.8; jax 0.12 and later flax need 3.12.
    "jax>=0.10.2,<0.11; python_version < '3.12'",
    "flax>=0.12.8,<0.12.9; python_version < '3.12'",
    "jax>=0.12,<0.13; python_version >= '3.12'",
    "flax>=0.12.12,<0.13; python_version >= '3.12'",
    "absl-py>=2.1",
    "chex>=0.1.92",
    "gguf>=0.19",
    "jinja2>=3.1",
    "math-verify>=0.9",
    "matplotlib>=3.10",
    "ml-collections>=1.1",
    "numpy>=2.2",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "pyarrow>=20",
    "safetensors>=0.6",
    "scipy>=1.14",
    "tensorboardX>=2.6.4",
    "tokenizers>=0.22",
    "tqdm>=4.67",
]

EXTRAS = {
    "tpu": ["jax[tpu]"],
    "cuda": ["jax[cuda13]"],
    "hf": ["datasets>=4", "torch>=2.9", "transformers>=5"],
    "ray": ["ray>=2.50"],
    "wandb": ["wandb>=0.22"],
    "notebooks": ["ipykernel>=7", "nbconvert>=7.16", "notebook>=7.4"],
    # libtpu compiles kernels for TPUs on machines that have none.
    "test": ["libtpu>=0.0.40; sys_platform == 'linux'", "pytest>=9", "pytest-xdist>=3.8", "ruff>=0.17"],
}

# `kernels/` stands at the root for its readers and is imported as `adrl_kernels`, a name that no other package claims.
kernels = ["adrl_kernels"] + [f"adrl_kernels.{name}" for name in find_namespace_packages("kernels", exclude=["__pycache__*"])]

setup(
    name="adrl-jax",
    version=VERSION,
    description="Reinforcement learning for language models with adaptive, drafter-invariant speculative rollouts, in JAX",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["adrl_jax*", "experiments*"]) + kernels,
    package_dir={"adrl_kernels": "kernels"},
    install_requires=CORE,
    extras_require=EXTRAS,
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
