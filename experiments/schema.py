"""Typed, bounded, documented settings: one declaration a field, from which everything else is derived.

A config is a tree of frozen dataclasses whose fields are declared with `option(default, meaning, limits…)`, or
are such classes themselves. The type is the annotation: bool, int, float, str, tuple[int, ...] or tuple[str, ...]. From the declaration come
the `ml_collections` ConfigDict that files and flags edit, the check of every value, the listing that `--help` prints, and
the JSON file that is saved with a run and reloads equal.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import config_dict

T = TypeVar("T")

_TYPES = (bool, int, float, str, tuple[int, ...], tuple[str, ...])


class ConfigError(ValueError):
    """A setting that cannot be used; the message names field, value and legal choices."""


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known about one field.

    Attributes:
        path: dotted name, e.g. `learner.learning_rate`.
        type: one of the supported annotations.
        default: of that type.
        meaning: one sentence, with the unit where there is one.
        low, high: inclusive bounds (of every element, for tuples).
        above, below: exclusive bounds.
        choices: the legal values, where they can be listed.
    """

    path: str
    type: Any
    default: Any
    meaning: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()

    @property
    def type_name(self) -> str:
        return "(" + self.element.__name__ + ", …)" if self.is_tuple else self.type.__name__

    @property
    def is_tuple(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def element(self) -> type:
        return typing.get_args(self.type)[0] if self.is_tuple else self.type

    @property
    def legal(self) -> str:
        """The legal values in words, e.g. `> 0, <= 1` or `one of a, b`."""
        if self.choices:
            return ("any of " if self.is_tuple else "one of ") + ", ".join(str(c) for c in self.choices)
        bounds = ((">=", self.low), (">", self.above), ("<=", self.high), ("<", self.below))
        text = ", ".join(f"{sign} {limit}" for sign, limit in bounds if limit is not None)
        return text or {bool: "True or False", str: "text", float: "finite"}.get(self.element, "any")

    def check(self, value: Any) -> Any:
        """`value` as this field's type.

        An int is taken for a float, a list for a tuple, and a text for a tuple of texts (split at commas, since that is
        what the command line hands over). Nothing else is converted: `"1e-6"` is not a number and True is not 1.

        Raises:
            ConfigError: wrong type or out of bounds.
        """
        if not self.is_tuple:
            return self._check_one(value)
        if self.element is str and isinstance(value, str):
            value = (value,)
        if not isinstance(value, (tuple, list)):
            raise self._fault(value)
        if self.element is str:
            # What is no text stays as it is, and is refused below.
            value = [part for x in value for part in ([p.strip() for p in x.split(",")] if isinstance(x, str) else (x,))]
        return tuple(self._check_one(x, value) for x in value)

    def _check_one(self, value: Any, whole: Any = None) -> Any:
        whole = value if whole is None else whole
        if self.element is float and type(value) is int:
            value = float(value)
        if type(value) is not self.element:
            raise self._fault(whole)
        if self.element is float and not math.isfinite(value):
            raise self._fault(whole)
        if self.element in (int, float) and not (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        ):
            raise self._fault(whole)
        if self.choices and value not in self.choices:
            raise self._fault(whole)
        return value

    def _fault(self, value: Any) -> ConfigError:
        hint = ""
        if isinstance(value, str) and self.element in (int, float):
            hint = " (a number in quotes is text; write it without them)"
        return ConfigError(f"{self.path}={value!r} is not legal: must be {self.type_name}, {self.legal}{hint}")


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """A field with a `default`, its `meaning`, and limits named as in `Option`."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "limits": limits})


def section_class(field: dataclasses.Field) -> type | None:
    """The class of a field that is a group of fields: one declared `dataclasses.field(default_factory=Class)`."""
    factory = field.default_factory
    return factory if isinstance(factory, type) and dataclasses.is_dataclass(factory) else None


def options(cls: type, prefix: str = "") -> dict[str, Option]:
    """Every field of a config class by dotted path, in the order of declaration."""
    found: dict[str, Option] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = prefix + field.name
        if group := section_class(field):
            found.update(options(group, path + "."))
            continue
        if hints[field.name] not in _TYPES:
            raise TypeError(f"{path} has the unsupported type {hints[field.name]}")
        found[path] = Option(path, hints[field.name], field.default, field.metadata["meaning"], **field.metadata["limits"])
    return found


def defaults(cls: type) -> config_dict.ConfigDict:
    """A locked, type-safe ConfigDict of all defaults, for config files to edit."""
    return editable(_construct(cls, {path: opt.default for path, opt in options(cls).items()}, ""))


def editable(config: Any) -> config_dict.ConfigDict:
    """A frozen config as a locked, type-safe ConfigDict."""

    def tree(node: Any) -> dict[str, Any]:
        pairs = ((f, getattr(node, f.name)) for f in dataclasses.fields(node))
        return {f.name: tree(value) if section_class(f) else value for f, value in pairs}

    return config_dict.ConfigDict(tree(config)).lock()


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Checks every value of a (nested) mapping and freezes it into `cls`; fields that it lacks take their defaults.

    Raises:
        ConfigError: unknown field, wrong type, out of bounds.
    """
    known = options(cls)
    given = dict(_flatten(values))
    for path in given:
        if path not in known:
            raise unknown_field(path, known)
    return _construct(cls, {p: o.check(given[p]) if p in given else o.default for p, o in known.items()}, "")


def unknown_field(path: Any, known: Mapping[str, Option]) -> ConfigError:
    """The error for a field that does not exist, with the nearest names."""
    path = str(path)
    group = [p for p in known if p.startswith(path + ".")]
    if group:
        return ConfigError(f"{path} is a group of fields, not a field; it has {', '.join(group)}")
    parent, _, last = path.rpartition(".")
    by_last: dict[str, list[str]] = {}
    for p in known:
        by_last.setdefault(p.rpartition(".")[2], []).append(p)
    near = [p for name in difflib.get_close_matches(last, by_last, n=2, cutoff=0.75) for p in by_last[name]]
    siblings = [p for p in known if p.rpartition(".")[0] == parent] or list(known)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(siblings)}"
    return ConfigError(f"{path} is not a field; {hint}")


def as_dict(config: Any) -> dict[str, Any]:
    """Nested plain dict of a frozen config, tuples as lists: what is written as JSON."""
    return {
        f.name: as_dict(value) if section_class(f) else list(value) if isinstance(value, tuple) else value
        for f, value in ((f, getattr(config, f.name)) for f in dataclasses.fields(config))
    }


def differences(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """(path, old value, new value) of every field in which two configs of one class differ."""
    a, b = dict(_flatten(as_dict(old))), dict(_flatten(as_dict(new)))
    return [(path, a[path], b[path]) for path in a if a[path] != b[path]]


def listing(cls: type, flag: str = "config") -> str:
    """All fields with type, legal values, default and meaning, one group after the other."""
    lines: list[str] = []
    group = None
    for path, opt in options(cls).items():
        if path.rpartition(".")[0] != group:
            group = path.rpartition(".")[0]
            lines.append("")
            if group:
                lines.append(f"{group}: {(_section_class(cls, group).__doc__ or '').strip().splitlines()[0]}")
        lines.append(f"  --{flag}.{path}={format_value(opt.default)}")
        lines.append(f"      {opt.type_name}, {opt.legal}. {opt.meaning}")
    return "\n".join(lines).strip("\n")


def format_value(value: Any) -> str:
    """A value as one would write it after `=` on the command line."""
    if isinstance(value, tuple):
        return ",".join(str(x) for x in value)
    return repr(value) if value == "" else str(value)


def _section_class(cls: type, path: str) -> type:
    for name in path.split("."):
        cls = next(section_class(f) for f in dataclasses.fields(cls) if f.name == name)
    return cls


def _flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(f"{prefix}{key!r} is not a field: names are text")
        value = values[key]
        if isinstance(value, (Mapping, config_dict.ConfigDict)):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _construct(cls: type[T], flat: Mapping[str, Any], prefix: str) -> T:
    kwargs = {}
    for field in dataclasses.fields(cls):
        path = prefix + field.name
        group = section_class(field)
        kwargs[field.name] = _construct(group, flat, path + ".") if group else flat[path]
    return cls(**kwargs)


def require(condition: bool, path: str, value: Any, rule: str) -> None:
    """Raises ConfigError in the usual form unless a cross-field rule holds."""
    if not condition:
        raise ConfigError(f"{path}={value!r} is not legal: {rule}")
