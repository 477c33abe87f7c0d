"""What `vime train --help[=TOPIC]` prints: our own flags by section, and the other owners' with the prefix they have here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vime.config.fields import FlagSpec, flag_specs
from vime.config.options import Option
from vime.config.owners import OWNERS, options_of
from vime.config.parse import flag_table, own_flags
from vime.config.run import SECTIONS
from vime.config.split import owner_of
from vime.config.suggest import DRIVER_FLAGS, Names, with_prefix
from vime.errors import ConfigError

__all__ = ["help_text", "topic_text", "topics"]

_DRIVER_HELP = {
    "--config": (" FILE ...", "YAML or TOML files of flags; later files win over earlier ones, flags over files."),
    "--print-config": ("", "Print every value with its source, as a file that --config takes, and start nothing."),
    "--dry-run": ("", "Say what each process will be, and whether it fits (`vime plan`), and start nothing."),
    "--help": (
        "[=TOPIC]",
        "This list; --help=TOPIC: a section, a flag (--help=--lr), or another owner's options (megatron, vllm, router).",
    ),
}


def topics() -> list[str]:
    """What --help can be asked about, besides flags."""
    return [*OWNERS, *(name for name in SECTIONS if name not in OWNERS)]


def help_text() -> str:
    """All our own flags, grouped by section, with defaults."""
    lines = [
        "usage: vime train --hf-checkpoint DIR --prompt-data FILE --rollout-batch-size N --num-rollout N [flags]",
        "",
        "Megatron's own flags are given under their own names, vLLM's as --vllm-X, vllm-router's as --router-X.",
        "",
        *(line for flag in DRIVER_FLAGS for line in (f"  {flag}{_DRIVER_HELP[flag][0]}", f"      {_DRIVER_HELP[flag][1]}")),
    ]
    for section in SECTIONS:
        lines += ["", *_section_lines(section)]
    return "\n".join(lines)


def topic_text(topic: str) -> str:
    """Help on a section, an owner or a flag. ConfigError for a topic that is none of them."""
    if topic.startswith("--"):
        return "\n".join(_flag_lines(topic))
    name = topic.replace("-", "_")
    blocks = []
    if name in SECTIONS:
        blocks.append("\n".join(_section_lines(name)))
    if name in OWNERS:
        blocks.append("\n".join(_owner_lines(name)))
    if not blocks:
        raise ConfigError(f"--help={topic}: no such topic. There are {', '.join(topics())}, and every flag, as in --help=--lr.")
    return "\n\n".join(blocks)


def _section_lines(section: str) -> list[str]:
    cls = SECTIONS[section]
    return [f"{section}: {(cls.__doc__ or '').splitlines()[0]}", *(line for spec in flag_specs(cls) for line in _own_lines(spec))]


def _own_lines(spec: FlagSpec) -> list[str]:
    kind = "" if spec.type is bool else " " + (f"{{{','.join(spec.choices)}}}" if spec.choices else spec.type.__name__.upper())
    bounds = [f"{sign} {bound:g}" for sign, bound in ((">=", spec.ge), (">", spec.gt), ("<=", spec.le)) if bound is not None]
    notes = [f"({', '.join(bounds)})"] if bounds else []
    if spec.type is not bool and spec.default not in (None, [], {}):
        notes.append(f"[{' '.join(spec.default) if isinstance(spec.default, list) else spec.default}]")
    if spec.required:
        notes.append("(required)")
    if spec.not_yet is not None:
        notes.append("(not available yet)")
    return [f"  {spec.flag}{kind}{' ...' if spec.many else ''}", "      " + " ".join([spec.doc, *notes])]


def _owner_lines(owner: str) -> list[str]:
    """An owner's options by its own groups; those that cannot be given are counted only."""
    title, prefix = OWNERS[owner].title, OWNERS[owner].prefix
    options = options_of(owner)[owner]
    allowed = [option for option in options if not option.note]
    groups: dict[str, list[Option]] = {}
    for option in allowed:
        groups.setdefault(option.group, []).append(option)
    lines = [f"{owner}: {title}'s own flags, given as {prefix}X"]
    for group, members in groups.items():
        lines += ["", f" {group}:", *(line for option in members for line in _option_lines(option, owner))]
    count = len(options) - len(allowed)
    return [*lines, "", f"{count} more cannot be given here; --help={prefix}X says why, of each."]


def _option_lines(option: Option, owner: str) -> list[str]:
    names = ", ".join(with_prefix(flag, owner) for flag in option.flags)
    text = option.help or "(no description)"
    if option.default and option.default not in option.help:
        text += f" [{option.default}]"
    note = f"      It {option.note}" if option.note.startswith("is ") else f"      Refused: {option.note}"
    return [f"  {names}{' ' + option.takes if option.takes else ''}", f"      {text}", *([note] if option.note else [])]


def _flag_lines(flag: str) -> Iterable[str]:
    if flag in _DRIVER_HELP:
        return [f"{flag}{_DRIVER_HELP[flag][0]}", f"  {_DRIVER_HELP[flag][1]}"]
    own = own_flags()
    if flag in own:
        section, spec = own[flag]
        lines = [f"{spec.flag} (vime, section {section})", *_own_lines(spec)]
        if flag not in flag_table():
            lines.append(f"{flag} takes back what a file says.")
        return [*lines, f"      {spec.not_yet}"] if spec.not_yet else lines
    owner = owner_of(flag, own)
    found = _option_of(flag, owner, options_of(owner)[owner])
    if found is not None:
        return [f"{flag} ({OWNERS[owner].title})", *_option_lines(found, owner)]
    raise ConfigError(f"--help={flag}: {Names(options_of(*OWNERS)).explain(flag)}")


def _option_of(flag: str, owner: str, options: Sequence[Option]) -> Option | None:
    return next((option for option in options if flag in [with_prefix(name, owner) for name in option.flags]), None)
