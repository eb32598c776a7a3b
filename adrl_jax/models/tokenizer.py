"""Text to token ids and back: one interface over tokenizer.json files, GGUF metadata and plain alphabets."""

import abc
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordLevel

from adrl_jax.models import bpe, chat
from adrl_jax.models.gguf_file import GgufFile
from adrl_jax.models.safetensors_file import read_json

_PROBE = "The 3 quick-brown foxes don't\n\tjump over 12,345 lazy dogs: naïve café — 日本語 🙂  #### 42 </s>"


class Tokenizer(abc.ABC):
    """What every tokenizer offers.

    Attributes:
        name: for messages and logs.
        eos_ids: every id that ends a response, the main one first.
        pad_id: fills unused places; may equal an end id, so it never marks anything.
        bos_id: None where there is none.
        chat_template: jinja source, or None.
    """

    name: str
    eos_ids: tuple[int, ...]
    pad_id: int
    bos_id: int | None
    chat_template: str | None

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Highest id plus one. Added tokens count, holes too: tables are sized by this."""

    @abc.abstractmethod
    def encode(self, text: str, add_bos: bool = False) -> np.ndarray:
        """Ids of `text`, int32 `[T]`. Special tokens spelled out in the text become their ids."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Text of `ids`. ValueError where an id is not the tokenizer's."""

    @abc.abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """Every token's spelling -> id, special tokens included."""

    @abc.abstractmethod
    def token(self, i: int) -> str:
        """The spelling of one id."""

    @abc.abstractmethod
    def save(self, folder: str | os.PathLike) -> None:
        """Writes tokenizer.json and its companions, for `from_file` and `transformers`."""

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation under the model's own template.

        Raises:
            ValueError: there is no template, or it fails.
        """
        if self.chat_template is None:
            raise ValueError(f"tokenizer {self.name!r} has no chat template")
        return chat.render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens(),
        )

    def special_tokens(self) -> dict[str, str]:
        """Spellings of the begin, (main) end and pad tokens, under the names that templates and configs use."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0], "pad_token": self.pad_id}
        return {key: self.token(i) for key, i in ids.items() if i is not None}

    def fingerprint(self) -> str:
        """16 hex digits that agree where vocabulary and segmentation agree (judged by a probe text)."""
        digest = hashlib.sha256()
        for token, i in sorted(self.vocabulary().items(), key=lambda item: item[1]):
            digest.update(f"{i}\0{token}\0".encode())
        digest.update(self._probe_ids().tobytes())
        return digest.hexdigest()[:16]

    def _probe_ids(self) -> np.ndarray:
        return self.encode(_PROBE)

    def _check_ids(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        ids = [int(i) for i in np.asarray(ids).reshape(-1)]
        for i in ids:
            if not 0 <= i < self.size:
                raise ValueError(f"token id {i} is outside tokenizer {self.name!r} of size {self.size}")
        return ids


def _check_special(name: str, size: int, eos_ids: Sequence[int], **others: int | None) -> None:
    if not eos_ids:
        raise ValueError(f"tokenizer {name!r} names no end token")
    for field, value in [*(("eos_ids", i) for i in eos_ids), *others.items()]:
        if value is not None and not 0 <= value < size:
            raise ValueError(f"{field}: token id {value} is outside tokenizer {name!r} of size {size}")


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Raises:
        ValueError: no end token, or a special id past the highest token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        eos_ids: Sequence[int],
        pad_id: int | None = None,
        bos_id: int | None = None,
        chat_template: str | None = None,
    ):
        self._backend = backend
        self._size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.name = name
        _check_special(name, self._size, eos_ids, pad_id=pad_id, bos_id=bos_id)
        self.eos_ids = tuple(int(i) for i in eos_ids)
        self.pad_id = self.eos_ids[0] if pad_id is None else int(pad_id)
        self.bos_id = bos_id
        self.chat_template = chat_template

    @property
    def size(self) -> int:
        return self._size

    def encode(self, text: str, add_bos: bool = False) -> np.ndarray:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if add_bos:
            if self.bos_id is None:
                raise ValueError(f"add_bos=True but tokenizer {self.name!r} has no begin token")
            ids = [self.bos_id, *ids]
        return np.array(ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        return self._backend.decode(self._check_ids(ids), skip_special_tokens=skip_special)

    def vocabulary(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def token(self, i: int) -> str:
        return self._backend.id_to_token(*self._check_ids([i]))

    def save(self, folder: str | os.PathLike) -> None:
        _save(self, self._backend, pathlib.Path(folder))


class CharTokenizer(Tokenizer):
    """One id a character, for procedural tasks: 0 pads, 1 ends, 2 begins, then the alphabet in its order.

    The spellings `<pad>`, `<eos>` and `<bos>` in a text (a chat template's, say) become those ids.

    Raises:
        ValueError: an empty alphabet or a character that occurs twice; at `encode`, a character that is not in it.
    """

    SPECIAL = ("<pad>", "<eos>", "<bos>")

    def __init__(self, alphabet: str, name: str = "characters", chat_template: str | None = None):
        if not alphabet:
            raise ValueError("alphabet='' is empty")
        if len(set(alphabet)) != len(alphabet):
            twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
            raise ValueError(f"alphabet names characters twice: {twice}")
        self.name = name
        self.pad_id, eos, self.bos_id = 0, 1, 2
        self.eos_ids = (eos,)
        self.chat_template = chat_template
        self._tokens = [*self.SPECIAL, *alphabet]
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        self._split = re.compile("|".join(self.SPECIAL) + "|.", re.DOTALL).findall

    @property
    def size(self) -> int:
        return len(self._tokens)

    def encode(self, text: str, add_bos: bool = False) -> np.ndarray:
        try:
            ids = [self._ids[token] for token in self._split(text)]
        except KeyError as error:
            raise ValueError(f"character {error.args[0]!r} is not in the alphabet of tokenizer {self.name!r}") from None
        return np.array([self.bos_id, *ids] if add_bos else ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        first = len(self.SPECIAL) if skip_special else 0
        return "".join(self._tokens[i] for i in self._check_ids(ids) if i >= first)

    def vocabulary(self) -> dict[str, int]:
        return dict(self._ids)

    def token(self, i: int) -> str:
        return self._tokens[self._check_ids([i])[0]]

    def _probe_ids(self) -> np.ndarray:
        return np.array([self._ids.get(token, self.pad_id) for token in self._split(_PROBE)], np.int32)

    def save(self, folder: str | os.PathLike) -> None:
        backend = tokenizers.Tokenizer(WordLevel(self.vocabulary(), unk_token=self.SPECIAL[0]))
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in self.SPECIAL])
        _save(self, backend, pathlib.Path(folder))


def check_same(first: Tokenizer, second: Tokenizer) -> None:
    """Raises ValueError, naming both, where two models that must share token ids (policy and drafter) do not."""
    if first.fingerprint() != second.fingerprint():
        raise ValueError(
            f"tokenizers {first.name!r} (size {first.size}) and {second.name!r} (size {second.size}) give different ids"
        )


def from_file(path: str | os.PathLike) -> FastTokenizer:
    """Reads a Hugging Face tokenizer.

    End tokens are those of `generation_config.json` where it names any, else those of `config.json`, else the
    `eos_token` of `tokenizer_config.json`.

    Args:
        path: a folder with `tokenizer.json` (and, where present, the other three), or that file.

    Raises:
        FileNotFoundError: no `tokenizer.json`.
        ValueError: a damaged file, or a special id that the tokenizer does not have.
    """
    path = pathlib.Path(path)
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: absent")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file}: damaged or not a tokenizer: {error}") from error
    backend.no_padding()
    backend.no_truncation()

    def companion(name: str) -> dict[str, Any]:
        return read_json(folder / name) if (folder / name).is_file() else {}

    raw, model, generation = (companion(n) for n in ("tokenizer_config.json", "config.json", "generation_config.json"))

    def token_id(key: str) -> int | None:
        token = raw.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            return None
        found = backend.token_to_id(token)
        if found is None:
            raise ValueError(f"{folder / 'tokenizer_config.json'}: {key}={token!r} is not a token of {file}")
        return found

    def first(key: str) -> Any:
        for source in (generation, model, model.get("text_config", {})):
            if source.get(key) is not None:
                return source[key]
        return token_id(key.removesuffix("_id"))

    eos = first("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    template = folder / "chat_template.jinja"
    return FastTokenizer(
        backend,
        name=str(path),
        eos_ids=eos,
        pad_id=first("pad_token_id"),
        bos_id=first("bos_token_id"),
        chat_template=template.read_text("utf-8") if template.is_file() else _default_template(raw.get("chat_template")),
    )


def _default_template(raw: Any) -> str | None:
    """Folders may hold one template or a list of named ones."""
    if isinstance(raw, list):
        return {item["name"]: item["template"] for item in raw}.get("default")
    return raw


def from_gguf(file: GgufFile) -> FastTokenizer:
    """Rebuilds the tokenizer that a GGUF file describes. End tokens: end of text, of turn and of message, where named.

    Raises:
        ValueError: no tokenizer, or of an unsupported kind.
    """
    meta = file.metadata
    kind = meta.get("tokenizer.ggml.model")
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(f"{file.path}: holds no tokenizer")
    types = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if kind == "gpt2":
        backend = bpe.byte_level(tokens, types, meta["tokenizer.ggml.merges"], meta.get("tokenizer.ggml.pre", "gpt-2"))
    elif kind == "llama":
        backend = bpe.from_scores(
            tokens, meta["tokenizer.ggml.scores"], types, add_space_prefix=meta.get("tokenizer.ggml.add_space_prefix", True)
        )
    else:
        raise ValueError(f"{file.path}: tokenizer.ggml.model={kind!r} is not supported; choose gpt2 or llama")
    ends = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return FastTokenizer(
        backend,
        name=meta.get("general.name", pathlib.Path(file.path).stem),
        eos_ids=list(dict.fromkeys(i for i in ends if i is not None)),
        pad_id=meta.get("tokenizer.ggml.padding_token_id"),
        bos_id=meta.get("tokenizer.ggml.bos_token_id"),
        chat_template=meta.get("tokenizer.chat_template"),
    )


def _save(tokenizer: Tokenizer, backend: tokenizers.Tokenizer, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    raw: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    raw |= tokenizer.special_tokens()
    if tokenizer.chat_template is not None:
        raw["chat_template"] = tokenizer.chat_template
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
    for name, value in (("tokenizer_config.json", raw), ("generation_config.json", generation)):
        with open(folder / name, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, ensure_ascii=False)
