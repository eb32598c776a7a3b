"""Safetensors checkpoints, single or sharded: names, shapes, tensors, and the writer.

Tensors are read one at a time from mapped files, so loading needs no second copy of the checkpoint.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def read_json(path: str | os.PathLike) -> Any:
    """The contents of a JSON file; a damaged one is a ValueError that names it."""
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: not valid JSON: {error}") from error


class SafetensorsFiles:
    """The tensors of one checkpoint: `names()` and `read(name)`.

    Args:
        path: a `.safetensors` file, or a folder with `model.safetensors` or with shards and their index.

    Raises:
        FileNotFoundError: no weights, or a shard that the index names is absent.
        ValueError: a damaged file, or index and shards disagree (the tensors are named).
    """

    def __init__(self, path: str | os.PathLike):
        path = os.fspath(path)
        self._where: dict[str, tuple[str, tuple[int, ...], np.dtype, int, int]] = {}
        if os.path.isfile(path):
            self._add(path)
        elif os.path.isfile(os.path.join(path, INDEX)):
            self._add_shards(path)
        elif os.path.isfile(os.path.join(path, SINGLE)):
            self._add(os.path.join(path, SINGLE))
        else:
            raise FileNotFoundError(f"{path}: no weights; expected {SINGLE}, or {INDEX} with its shards, or a .gguf file")

    def _add(self, file: str) -> set[str]:
        try:
            with safetensors.safe_open(file, framework="numpy"):
                pass  # checks header, sizes and offsets against the file's length
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file}: damaged or not a safetensors file: {error}") from error
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        for name, info in header.items():
            if info["dtype"] not in _DTYPES:
                raise ValueError(
                    f"{file}: tensor {name!r} has dtype {info['dtype']}, which is not supported; choose {', '.join(_DTYPES)}"
                )
            if name in self._where:
                raise ValueError(f"tensor {name!r} is in two shards: {self._where[name][0]} and {file}")
            begin, end = info["data_offsets"]
            self._where[name] = (
                file,
                tuple(info["shape"]),
                np.dtype(_DTYPES[info["dtype"]]),
                8 + length + begin,
                end - begin,
            )
        return set(header)

    def _add_shards(self, folder: str) -> None:
        index = read_json(os.path.join(folder, INDEX)).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ValueError(f"{os.path.join(folder, INDEX)}: has no weight_map")
        for shard in sorted(set(index.values())):
            file = os.path.join(folder, shard)
            if not os.path.isfile(file):
                raise FileNotFoundError(f"{file}: the index names this shard but it is absent")
            found = self._add(file)
            listed = {name for name, where in index.items() if where == shard}
            if listed - found:
                raise ValueError(f"{file}: the index places tensors here that the shard lacks: {sorted(listed - found)}")
            if found - listed:
                raise ValueError(f"{file}: holds tensors that the index does not list here: {sorted(found - listed)}")

    def names(self) -> set[str]:
        return set(self._where)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file, in its stored dtype."""
        file, shape, dtype, offset, num_bytes = self._where[name]
        raw = np.memmap(file, np.uint8, "r", offset=offset, shape=(num_bytes,)) if num_bytes else np.empty(0, np.uint8)
        return np.asarray(raw).view(dtype).reshape(shape)


def write(folder: str, tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int) -> list[str]:
    """Writes `tensors` in Hugging Face layout and returns the file names: one file, or shards with an index.

    Every array is written in C order: safetensors 0.8 writes the memory of a transposed view as it lies, so the tensor
    would come back scrambled.
    """
    shards: list[dict[str, np.ndarray]] = [{}]
    size = total = 0
    for name, value in tensors:
        value = np.ascontiguousarray(value)
        if size and size + value.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
        total += value.nbytes
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, shard in zip(names, shards):
        safetensors.numpy.save_file(shard, os.path.join(folder, file), metadata={"format": "pt"})
    if len(shards) > 1:
        index = {name: file for file, shard in zip(names, shards) for name in shard}
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as handle:
            json.dump({"metadata": {"total_size": total}, "weight_map": index}, handle, indent=1)
    return names
