"""Files of flags (--config run.yaml, run.toml): the same names, without the leading dashes, read into what the command line gives.

A key is a flag's name (dashes or underscores). A table named like one of our sections holds flags of that section; the
tables "megatron", "vllm" and "router" hold flags of those owners under their own names. true and false switch a flag on
and off, null takes back what an earlier file says, a list gives several values, a mapping a JSON object. Scalars are
taken as they are written, so that what is forwarded is what the user wrote.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config.fields import FlagSpec
from vime.config.names import NameIndex
from vime.config.owners import OWNERS
from vime.config.parse import is_switch, taken_back
from vime.config.run import SECTIONS
from vime.config.split import Given, owner_of
from vime.config.suggest import with_prefix

__all__ = ["Own", "layered", "read_file"]

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class _Scalar:
    """One value as it is written, and what the file's language makes of it: text, true or false, or nothing."""

    text: str
    value: bool | str | None


_Value = _Scalar | list[_Scalar] | dict[str, Any]  # a dict is plain JSON values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One key of a file, its tables opened."""

    table: str  # "" outside of tables
    key: str
    value: _Value
    where: str  # "run.yaml:12"


class _FileError(Exception):
    """A file that cannot be read; the text says where and why."""


Own = Mapping[str, tuple[str, FlagSpec]]  # `own_flags()`: flag -> (section, spec)


def read_file(path: str, own: Own) -> tuple[list[Given], list[str]]:
    """(the flags that a file gives, problems with it)."""
    try:
        entries = list(_entries(path))
    except OSError as error:
        return [], [f"--config '{path}' cannot be read: {error.strerror}. It is looked for relative to the current directory."]
    except UnicodeDecodeError as error:
        return [], [f"--config '{path}' is no text in UTF-8 (byte {error.start})."]
    except RecursionError:
        return [], [f"{path}: something in it holds itself (an alias of YAML's), or is nested too deeply: write it out."]
    except _FileError as error:
        return [], [str(error)]
    given: list[Given] = []
    problems: list[str] = []
    seen: dict[str, str] = {}
    for entry in entries:
        try:
            one = _given(entry, own)
        except ValueError as error:
            problems.append(f"{entry.where}: {error}")
            continue
        name = _identity(one.flag, own)
        if name in seen:
            problems.append(f"{entry.where}: {one.flag} stands in {seen[name]} already: keep one.")
        seen[name] = entry.where
        given.append(one)
    return given, problems


def layered(layers: Iterable[Sequence[Given]], own: Own) -> list[Given]:
    """All that is given, later layers over earlier ones. A flag that the last of its layers sets to null is left out."""
    merged: list[Given] = []
    for layer in layers:
        names = {_identity(one.flag, own) for one in layer}
        merged = [one for one in merged if _identity(one.flag, own) not in names] + list(layer)
    return [one for one in merged if one.raw]


def _identity(flag: str, own: Own) -> str:
    """The same for all spellings of one setting: --x and --no-x of ours and of vLLM's, dashes and underscores."""
    if flag in own:
        return own[flag][1].name
    return flag.replace("_", "-").replace("--no-vllm-", "--vllm-")


def _given(entry: _Entry, own: Own) -> Given:
    """The flag of one entry. ValueError says what is wrong with it."""
    flag = _flag(entry, own)
    value = entry.value
    if isinstance(value, _Scalar) and value.value is None:
        return Given(flag=flag, values=(), raw=(), source=entry.where)
    spec = own[flag][1] if flag in own else None
    if spec is not None and is_switch(spec):
        return _switch(flag, value.value if isinstance(value, _Scalar) else value, own, entry.where)
    if spec is None and isinstance(value, _Scalar) and isinstance(value.value, bool):
        if not value.value:
            flag = _switched_off(flag, entry.key)
        return Given(flag=flag, values=(), raw=(flag,), source=entry.where)
    texts = tuple(_plain_text(text) for text in _texts(value))
    raw = (f"{flag}={texts[0]}",) if len(texts) == 1 and texts[0].startswith("-") else (flag, *texts)
    return Given(flag=flag, values=texts, raw=raw, source=entry.where)


def _plain_text(text: str) -> str:
    """`text` with surrogate pairs (JSON's way to write characters) joined. ValueError for what no command line can hold."""
    try:
        joined = text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ValueError("the value holds half a character (a lone \\u surrogate).") from None
    if "\0" in joined:
        raise ValueError("the value holds the character 0, which no command line can.")
    return joined


def _switch(flag: str, value: Any, own: Own, where: str) -> Given:
    off = taken_back(flag)
    if value is False and off not in own:
        raise ValueError(f"{flag} takes true: write {flag.removeprefix('--no-')}: true instead.")
    if not isinstance(value, bool):
        raise ValueError(f"{flag} is a switch: true or false.")
    flag = flag if value else off
    return Given(flag=flag, values=(), raw=(flag,), source=where)


def _switched_off(flag: str, key: str) -> str:
    owner = owner_of(flag, ())
    if owner == "vllm":
        return flag.replace("--no-vllm-", "--vllm-") if flag.startswith("--no-") else flag.replace("--vllm-", "--no-vllm-", 1)
    title = OWNERS[owner].title
    raise ValueError(f"{title} has no word for '{key}: false'. Leave it out, or set it to null; where there is a --no-{key}, say that.")


def _texts(value: _Value) -> tuple[str, ...]:
    if isinstance(value, _Scalar):
        return (value.text,)
    if isinstance(value, dict):
        return (json.dumps(value, default=str),)  # dates of TOML's
    if any(item.value is None for item in value):
        raise ValueError("a list of values holds no null.")
    return tuple(item.text for item in value)


def _flag(entry: _Entry, own: Own) -> str:
    """The flag that an entry's key names, as it is typed on the command line."""
    key, table = entry.key, entry.table
    if key == "<<":
        raise ValueError("'<<' (YAML's merge key) is not read: name several files after --config, later ones win.")
    if not re.fullmatch(r"[A-Za-z][\w.+-]*", key):
        raise ValueError(f"'{key}' is no flag's name: write names without the leading dashes, as in 'rollout-batch-size: 64'.")
    name, dot, rest = key.partition(".")
    flag = "--" + (name if "-" in name else name.replace("_", "-")) + dot + rest  # some of Megatron's have both
    section = own[flag][0] if flag in own else ""
    if not table and not section:
        _refuse_section(key, entry.value)
    if table in ("", section):
        return flag
    if table in OWNERS:
        return with_prefix(flag, table)
    if section:
        raise ValueError(f"{flag} is of the section '{section}', not of '{table}': move it there, or out of all tables.")
    near = ", ".join(NameIndex(name for name, (known, _) in own.items() if known == table).nearest(flag))
    raise ValueError(f"the section '{table}' has no {flag}.{f' Nearest: {near}.' if near else ''} Other owners' flags go outside of it.")


def _refuse_section(key: str, value: _Value) -> None:
    """ValueError when a key that is none of our flags is a section's name, or holds several flags and is nearly one."""
    sections = (*SECTIONS, *OWNERS)
    name = key.replace("-", "_").lower()
    if name in sections:
        raise ValueError(f"'{key}' is a section: write it '{name}', and below it the flags that it holds, each 'name: value'.")
    if isinstance(value, dict) and owner_of(f"--{key}", ()) == "megatron" and (near := NameIndex(sections).nearest(name)):
        raise ValueError(f"there is no section '{key}'. Nearest: {', '.join(near)}.")


def _entries(path: str) -> Iterator[_Entry]:
    suffix = Path(path).suffix.lower()
    if suffix == ".toml":
        return _toml(path)
    if suffix in (".yaml", ".yml", ".json"):
        return _Yaml(path).entries()
    raise _FileError(f"--config '{path}': its name must end in .yaml, .yml, .json or .toml.")


class _Yaml:
    """A YAML file, read as it is written: its scalars are not converted."""

    def __init__(self, path: str) -> None:
        import yaml  # only runs with a file need it

        self._path, self._yaml = path, yaml
        self._loader = yaml.SafeLoader("")

    def entries(self) -> Iterator[_Entry]:
        """The keys of the file, its tables opened."""
        try:
            text = Path(self._path).read_text(encoding="utf-8-sig")
            if self._path.endswith(".json"):
                text = text.replace("\t", " ")  # JSON takes tabs between values, and has none inside of them
            root = self._yaml.compose(text, Loader=self._yaml.SafeLoader)
        except self._yaml.YAMLError as error:
            raise _FileError(f"{self._path} is no YAML: {' '.join(str(error).split())}") from None
        if root is None:
            return
        if not isinstance(root, self._yaml.MappingNode):
            raise _FileError(f"{self._place(root)}: a file of flags holds 'name: value' lines.")
        for key, node in self._pairs(root):
            if key.value in (*SECTIONS, *OWNERS) and node.tag.endswith(":null"):
                continue  # a section all of whose flags are comments
            if key.value in (*SECTIONS, *OWNERS) and isinstance(node, self._yaml.MappingNode):
                for name, inner in self._pairs(node):
                    yield _Entry(table=key.value, key=name.value, value=self._value(inner), where=self._place(name))
            else:
                yield _Entry(table="", key=key.value, value=self._value(node), where=self._place(key))

    def _place(self, node: Any) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"

    def _pairs(self, node: Any) -> Iterator[tuple[Any, Any]]:
        for key, value in node.value:
            if not isinstance(key, self._yaml.ScalarNode):
                raise _FileError(f"{self._place(key)}: a key must be a flag's name.")
            yield key, value

    def _value(self, node: Any) -> _Value:
        if isinstance(node, self._yaml.ScalarNode):
            return self._scalar(node)
        if isinstance(node, self._yaml.MappingNode):
            return dict(self._plain(node))
        if all(isinstance(item, self._yaml.ScalarNode) for item in node.value):
            return [self._scalar(item) for item in node.value]
        return [_Scalar(json.dumps(self._plain(item)), "") for item in node.value]

    def _scalar(self, node: Any) -> _Scalar:
        kind = node.tag.rpartition(":")[2]
        if kind != "str" and node.tag != self._loader.resolve(self._yaml.ScalarNode, node.value, (node.style is None, False)):
            raise _FileError(f"{self._place(node)}: tags like !!{kind} are not read: write the value alone.")
        if kind == "null":
            return _Scalar(node.value, None)
        return _Scalar(node.value, self._loader.construct_yaml_bool(node) if kind == "bool" else node.value)

    def _plain(self, node: Any) -> Any:
        """JSON values; 1e-5 is a number here, as in JSON."""
        if isinstance(node, self._yaml.MappingNode):
            keys = [key for key, _ in self._pairs(node)]
            if twice := [key for key in keys if [other.value for other in keys].count(key.value) > 1]:
                raise _FileError(f"{self._place(twice[-1])}: '{twice[-1].value}' stands in this mapping twice: keep one.")
            return {key.value: self._plain(value) for key, value in self._pairs(node)}
        if isinstance(node, self._yaml.SequenceNode):
            return [self._plain(item) for item in node.value]
        if node.style is None and _NUMBER.fullmatch(node.value):
            return int(node.value) if re.fullmatch(r"-?(0|[1-9]\d*)", node.value) else float(node.value)
        return self._scalar(node).value


def _toml(path: str) -> Iterator[_Entry]:
    text = Path(path).read_text(encoding="utf-8-sig")
    try:
        data = tomllib.loads(text, parse_float=_Number)
    except tomllib.TOMLDecodeError as error:
        raise _FileError(f"{path} is no TOML: {error}") from None

    def place(key: str) -> str:
        lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=""", line)]
        return f"{path}:{lines[0]}" if len(lines) == 1 else f"{path} ({key})"

    for key, value in data.items():
        if key in (*SECTIONS, *OWNERS) and isinstance(value, dict):
            for name, each in value.items():
                yield _Entry(table=key, key=name, value=_toml_value(each), where=place(name))
        else:
            yield _Entry(table="", key=key, value=_toml_value(value), where=place(key))


class _Number(float):
    """A TOML number that remembers how it was written."""

    text: str

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        number.text = text
        return number


def _toml_value(value: Any) -> _Value:
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        return [_toml_scalar(item) for item in value]
    return _toml_scalar(value)


def _toml_scalar(value: Any) -> _Scalar:
    if isinstance(value, bool):
        return _Scalar(str(value).lower(), value)
    if isinstance(value, dict | list):
        return _Scalar(json.dumps(value, default=str), "")
    text = value.text if isinstance(value, _Number) else str(value)
    return _Scalar(text, text)
