"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): word problems from the user's own copy of the records.

A record has `question` and `answer`, a worked solution whose last line is "#### number".
"""

import dataclasses
import os
import pathlib
import re
import warnings
from functools import cached_property

from adrl_jax.rewards.extract import MARKER, check_mode
from adrl_jax.rewards.math import reference_text, score_number
from adrl_jax.rewards.numbers import parse_number
from adrl_jax.tasks.base import Prompts, TextCodec, check_split, encoded
from adrl_jax.tasks.records import FORMATS, read_records
from adrl_jax.types import Prompt, Score

FIELDS = ("question", "answer")
INSTRUCTION = "Solve the problem step by step. End with a line that has #### and the answer as a number."


@dataclasses.dataclass(frozen=True)
class Gsm8k:
    """The task.

    Attributes:
        data: a folder with one file a split (`train.jsonl`, `test.parquet`, …), one file that serves both splits, or the name
            of a data set on the Hugging Face hub such as `openai/gsm8k`.
        config_name: configuration of a data set on the hub.
        instruction: put before the question; "" for none.
        chat: wrap the prompt in the tokenizer's chat template.
        mode: which answer styles count: `strict` (the "####" line) or `flexible`.
        tokenizer: set by `encode`.
    """

    data: str
    config_name: str = "main"
    instruction: str = INSTRUCTION
    chat: bool = True
    mode: str = "flexible"
    tokenizer: TextCodec | None = None

    name = "gsm8k"
    splits = ("train", "test")

    def __post_init__(self):
        check_mode(self.mode)
        if not self.data:
            raise ValueError(
                "Gsm8k.data is empty; name a folder, a .jsonl or .parquet file, or a data set on the hub such as openai/gsm8k"
            )

    def encode(self, tokenizer: TextCodec | None) -> "Gsm8k":
        return dataclasses.replace(self, tokenizer=tokenizer)

    def prompts(self, split: str) -> Prompts:
        """As in `Task`. Records whose answer has no number are left out, with a warning that lists them.

        Raises:
            ValueError: a fault in the records, with file, line and field (`read_records`).
            ImportError, ConnectionError: the hub is asked for and cannot be used.
        """
        check_split(self, split)
        encoded(self, "0")  # fails now if there is no tokenizer
        records = self._records[split] if split in self._records else self._records.setdefault(split, self._load(split))
        return Prompts(len(records), lambda i: self._prompt(i, records[i]))

    @cached_property
    def _records(self) -> dict[str, list[dict]]:
        return {}

    def _load(self, split: str) -> list[dict]:
        source = find_source(self.data, split)
        records = read_hub(self.data, self.config_name, split) if source is None else read_records(source, FIELDS)
        readable = [MARKER in str(r["answer"]) and parse_number(reference_text(r["answer"])) is not None for r in records]
        bad = [i + 1 for i, ok in enumerate(readable) if not ok]
        if bad:
            where, listed = source or self.data, ", ".join(map(str, bad[:20])) + (", …" if len(bad) > 20 else "")
            problem = (
                f"{where}: field 'answer' has no number behind {MARKER!r} in {len(bad)} of {len(records)} records: {listed}"
            )
            if len(bad) == len(records):
                raise ValueError(problem)
            warnings.warn(f"{problem}; they are left out", stacklevel=3)
        return [r for r, ok in zip(records, readable) if ok]

    def _prompt(self, index: int, record: dict) -> Prompt:
        question = "\n\n".join(part for part in (self.instruction, str(record["question"]).strip()) if part)
        text = self.tokenizer.chat([{"role": "user", "content": question}]) if self.chat else question + "\n"
        return Prompt(index, encoded(self, text), text, reference=reference_text(record["answer"]))

    def supervised_example(self, index: int) -> tuple[str, str]:
        """(prompt, worked solution) for supervised training, calculator marks left out; the training records in turn."""
        prompts = self.prompts("train")
        index %= len(prompts)
        return prompts[index].text, re.sub(r"<<[^>]*>>", "", str(self._records["train"][index]["answer"])).strip()

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """1 where the response's number equals the reference's, else 0."""
        return score_number(response_text, prompt.reference, mode=self.mode, truncated=truncated)


def find_source(data: str, split: str) -> pathlib.Path | None:
    """The file that holds `split`, or None where `data` can only be a data set on the hub.

    Raises:
        ValueError: a folder without a file for the split, or a path that does not exist.
    """
    path = pathlib.Path(os.path.expanduser(data))
    if path.is_dir():
        for suffix in FORMATS:
            if (path / f"{split}{suffix}").is_file():
                return path / f"{split}{suffix}"
        raise ValueError(f"folder {data!r} has no file for split {split!r}: {', '.join(split + s for s in FORMATS)}")
    looks_like_path = path.suffix in FORMATS or path.is_absolute() or data.startswith((".", "~")) or data.count("/") != 1
    if path.is_file() or looks_like_path:
        if not path.is_file():
            raise ValueError(
                f"data={data!r} does not exist; name a folder, a .jsonl or .parquet file, or a data set on the hub"
            )
        return path
    return None


def read_hub(name: str, config_name: str, split: str) -> list[dict]:
    """Records of a data set on the Hugging Face hub.

    Raises:
        ImportError: `datasets` is not installed.
        ConnectionError: the hub cannot be reached or does not have it.
        ValueError: a record lacks a field.
    """
    try:
        import datasets
    except ImportError as e:
        raise ImportError(
            f"data={name!r} is no file here, and reading it from the hub needs `pip install datasets`; a path to a .jsonl or "
            ".parquet file needs nothing"
        ) from e
    try:
        records = list(datasets.load_dataset(name, config_name, split=split))
    except Exception as e:  # whatever the hub's client raises, the user needs to know what was asked and what else works
        raise ConnectionError(
            f"data={name!r} (configuration {config_name!r}, split {split!r}) could not be read from the hub: "
            f"{type(e).__name__}: {e}. Without a hub, name a .jsonl or .parquet file."
        ) from e
    for row, record in enumerate(records, start=1):
        for field in FIELDS:
            if record.get(field) is None:
                raise ValueError(f"{name}, row {row}: field {field!r} is missing; the record has {', '.join(sorted(record))}")
    if not records:
        raise ValueError(f"data set {name!r} has no records in split {split!r}")
    return records
