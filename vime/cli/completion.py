"""`vime completion bash|zsh`: prints a completion script for the shell.

The script is a fixed list: commands, all flags (ours, Megatron's, vLLM's, the router's) and the values of those that
take one of a few words. Print it again after an update.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from vime.config.help import topics
from vime.config.owners import OWNERS, options_of
from vime.config.parse import flag_table
from vime.config.suggest import DRIVER_FLAGS, with_prefix
from vime.errors import ConfigError

__all__ = ["main"]

_TRAINING = ("train", "plan", "replay")  # commands that take the flags of a run
_WORD = re.compile(r"[\w.:+-]+")

_BASH = """\
# Completion of vime for bash: eval "$(vime completion bash)" in ~/.bashrc
_vime() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    COMPREPLY=()
    if [[ $cur == "=" ]]; then prev="$prev=" cur=""
    elif [[ $prev == "=" ]]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}="; fi
    if (( COMP_CWORD == 1 )); then COMPREPLY=($(compgen -W "{commands}" -- "$cur")); return; fi
    case "${{COMP_WORDS[1]}}" in
        {training}) ;;
        completion) COMPREPLY=($(compgen -W "bash zsh" -- "$cur")); return ;;
        *) return ;;
    esac
    case "$prev" in
{values}
    esac
    local more=""
    if [[ ${{COMP_WORDS[1]}} == plan ]]; then more="{plan} "; fi
    if [[ $cur == -* ]]; then COMPREPLY=($(compgen -W "$more{flags}" -- "$cur")); fi
}}
complete -o default -F _vime vime
"""
_BASH_VALUE = '        {flag}|{flag}=) COMPREPLY=($(compgen -W "{words}" -- "$cur")); return ;;'

_ZSH = """\
#compdef vime
# Completion of vime for zsh: eval "$(vime completion zsh)" in ~/.zshrc, after compinit
_vime() {{
    if (( CURRENT == 2 )); then compadd -- {commands}; return; fi
    case $words[2] in
        {training}) ;;
        completion) compadd -- bash zsh; return ;;
        *) _files; return ;;
    esac
    if [[ $words[CURRENT] == --help=* ]]; then compadd -P --help= -- {topics}; return; fi
    case $words[CURRENT-1] in
{values}
    esac
    if [[ $words[CURRENT] != -* ]]; then _files; return; fi
    if [[ $words[2] == plan ]]; then compadd -- {plan}; fi
    compadd -- {flags}
}}
compdef _vime vime
"""
_ZSH_VALUE = "        {flag}) compadd -- {words}; return ;;"


def main(argv: Sequence[str]) -> int:
    """Print the script of the shell that `argv` names. ConfigError for another one."""
    if list(argv) not in (["bash"], ["zsh"]):
        raise ConfigError(f"vime completion takes the shell, bash or zsh; got '{' '.join(argv)}'.")
    print(script(argv[0]), end="")
    return 0


def script(shell: str) -> str:
    """The completion script for "bash" or "zsh"."""
    from vime.cli.main import COMMANDS  # the table names this module
    from vime.cli.plan import OPTIONS

    flags, values = _flags()
    template, line = (_BASH, _BASH_VALUE) if shell == "bash" else (_ZSH, _ZSH_VALUE)
    if shell == "bash":
        values["--help"] = topics()  # bash splits words at "="
    return template.format(
        commands=" ".join([*COMMANDS, "version"]),
        training="|".join(_TRAINING),
        values="\n".join(line.format(flag=flag, words=" ".join(shlex.quote(word) for word in words)) for flag, words in values.items()),
        flags=" ".join(flags),
        plan=" ".join([*OPTIONS, "--json"]),
        topics=" ".join(topics()),
    )


def _flags() -> tuple[list[str], dict[str, list[str]]]:
    """(all flags that can be given, the words that some of them take). Owners that cannot be asked are left out."""
    flags = list(DRIVER_FLAGS)
    values: dict[str, list[str]] = {}
    for flag, (_, spec) in flag_table().items():
        if spec.not_yet is None:
            flags.append(flag)
            if spec.choices:
                values[flag] = [choice for choice in spec.choices if choice not in spec.choices_not_yet]
    for owner in OWNERS:
        try:
            options = options_of(owner)[owner]
        except ConfigError:
            continue
        for option in options:
            names = [with_prefix(name, owner) for name in option.flags if not option.note]
            flags += [name for name in names if name not in flags]
            words = option.takes.removesuffix(" ...").strip("{}").split(",") if option.takes.startswith("{") else []
            if words and all(_WORD.fullmatch(word) for word in words):
                values |= {name: words for name in names if name not in values}
    return flags, values
