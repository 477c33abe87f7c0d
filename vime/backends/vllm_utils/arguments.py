"""Check the user's --vllm- and --router- tokens with the parsers that own them.

    python -m vime.backends.vllm_utils.arguments vllm   --max-num-seqs 64
    python -m vime.backends.vllm_utils.arguments router --policy round_robin

Tokens come without the prefix. Exit 0 when all is well; exit 2 with one problem per line on stderr, in the user's spelling.
vLLM's parser takes many seconds to import, so what it accepted once is remembered (keyed by its files) in the user's cache.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["check_router", "check_vllm", "main"]

# flags that the framework sets, and what to use instead
OWNED_VLLM = {
    "-h": None,
    "--help": None,
    "--model": "--hf-checkpoint",
    "--tokenizer": "--hf-checkpoint (the tokenizer of the model folder)",
    "--host": None,
    "--port": None,
    "--uds": None,
    "--api-key": None,
    "--served-model-name": None,
    "--tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "-tp": "--rollout-num-gpus-per-engine",
    "--max-model-len": "--rollout-max-context-len",
    "--seed": "--rollout-seed",
    "--weight-transfer-config": None,
    "--worker-extension-cls": None,
    "--enable-scale-out": None,
    "--tokens-only": None,
    "--config": "the flags themselves",
    "--headless": None,
    "--skip-tokenizer-init": None,
    "--load-format": None,
}
OWNED_ROUTER = {
    "-h": None,
    "--help": None,
    "--host": None,
    "--port": "--vllm-router-port for a router that runs already",
    "--worker-urls": None,
    "--prometheus-host": None,
    "--prometheus-port": None,
    "--mini-lb": None,
    "--service-discovery": "--vllm-router-ip for a router that runs already",
    "--vllm-pd-disaggregation": None,
    "--api-key": None,
}


class _RefusedError(Exception):
    """What a parser objects to."""


def check_vllm(tokens: Sequence[str]) -> list[str]:
    """Problems with engine tokens, in the user's spelling (--vllm-X); empty when vLLM's own parser takes them."""
    cache = _Cache()
    if (problems := _owned(tokens, OWNED_VLLM, "vllm")) or cache.accepted(tokens):
        return problems
    if cache.options and (problems := _unknown(tokens, cache.options, OWNED_VLLM, "vllm")):
        return problems
    parser = _vllm_parser()
    options = sorted(parser._option_string_actions)
    problems = _unknown(tokens, options, OWNED_VLLM, "vllm") or _parse(parser, ["--model", "model", *tokens], "vllm")
    cache.store(options, None if problems else tokens)
    return problems


def check_router(tokens: Sequence[str]) -> list[str]:
    """Problems with router tokens, in the user's spelling (--router-X); empty when vllm-router's own parser takes them."""
    from vllm_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    problems = _owned(tokens, OWNED_ROUTER, "router") or _unknown(tokens, list(parser._option_string_actions), OWNED_ROUTER, "router")
    if problems:
        return problems
    problems = _parse(parser, tokens, "router")
    if problems:
        return problems
    try:
        RouterArgs.from_cli_args(parser.parse_args(list(tokens)), use_router_prefix=False)._validate_router_args()
    except (ValueError, TypeError) as error:
        return [f"vllm-router refuses the --router- flags: {error}"]
    return []


def main(argv: Sequence[str]) -> int:
    """Command line of this module; see its docstring."""
    if not argv or argv[0] not in ("vllm", "router"):
        print("usage: python -m vime.backends.vllm_utils.arguments vllm|router TOKENS", file=sys.stderr)
        return 1
    sys.stderr.flush()
    out = os.dup(2)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # importing vLLM warns about things that are no concern of the user's
    os.close(silent)
    try:
        problems = check_vllm(argv[1:]) if argv[0] == "vllm" else check_router(argv[1:])
    finally:
        os.dup2(out, 2)
        os.close(out)
    for problem in problems:
        print(" ".join(problem.split()), file=sys.stderr)
    return 2 if problems else 0


def _vllm_parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm"))
    parser.allow_abbrev = False
    return parser


def _flags(tokens: Iterable[str]) -> list[str]:
    """The flags among the tokens, in the parsers' spelling: dashes, no "=value", no ".key" of a dotted JSON flag."""
    names = []
    for token in tokens:
        if re.match(r"--?[A-Za-z]", token):
            name = token.split("=", 1)[0].split(".", 1)[0]
            names.append(name.replace("_", "-") if name.startswith("--") else name)
    return names


def _ours(flag: str, owner: str) -> str:
    return f"--{owner}-{flag.lstrip('-')}"


def _owned(tokens: Sequence[str], owned: dict[str, str | None], owner: str) -> list[str]:
    problems = []
    for flag in dict.fromkeys(_flags(tokens)):
        if flag in owned:
            instead = owned[flag]
            cure = f"use {instead}" if instead else "leave it out"
            problems.append(f"{_ours(flag, owner)} is set by vime itself: {cure}.")
    return problems


def _unknown(tokens: Sequence[str], options: Sequence[str], owned: Iterable[str], owner: str) -> list[str]:
    known = set(options)
    problems = []
    for flag in dict.fromkeys(_flags(tokens)):
        if flag in known:
            continue
        near = difflib.get_close_matches(flag, sorted(known - set(owned)), n=3, cutoff=0.6)
        hint = f" Nearest: {', '.join(_ours(name, owner) for name in near)}." if near else ""
        whose = "vLLM" if owner == "vllm" else "vllm-router"
        problems.append(f"unknown flag {_ours(flag, owner)}: {whose} has no {flag}.{hint}")
    return problems


def _parse(parser: argparse.ArgumentParser, tokens: Sequence[str], owner: str) -> list[str]:
    """What the parser says to the tokens."""

    def refuse(message: str) -> NoReturn:
        raise _RefusedError(message)

    parser.error = refuse  # type: ignore[method-assign]
    try:
        parser.parse_args(list(tokens))
    except (_RefusedError, ValueError, TypeError) as error:
        return [re.sub(r"(?<![\w-])--(?=[a-z])", f"--{owner}-", str(error))]
    return []


class _Cache:
    """Flags that vLLM's parser has, and digests of the token lists that it accepted; valid for one state of its files."""

    _KEPT = 64  # accepted token lists remembered

    def __init__(self) -> None:
        self._path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vime" / "vllm_flags.json"
        self._key = self._fingerprint()
        self.options: list[str] = []
        self._accepted: list[str] = []
        try:
            data = json.loads(self._path.read_text())
            if data["key"] == self._key:
                self.options, self._accepted = list(data["options"]), list(data["accepted"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # no cache, or a torn one: the parser itself is asked

    def accepted(self, tokens: Sequence[str]) -> bool:
        """Whether vLLM's parser took exactly these tokens before."""
        return self._digest(tokens) in self._accepted

    def store(self, options: list[str], tokens: Sequence[str] | None) -> None:
        """Remember the options, and the tokens when they were accepted. A cache that cannot be written is no error."""
        accepted = self._accepted + ([self._digest(tokens)] if tokens is not None else [])
        text = json.dumps({"key": self._key, "options": options, "accepted": accepted[-self._KEPT :]})
        draft = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text)
            draft.replace(self._path)
        except OSError:
            return

    @staticmethod
    def _digest(tokens: Sequence[str]) -> str:
        return hashlib.sha256("\0".join(tokens).encode()).hexdigest()

    @staticmethod
    def _fingerprint() -> str:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("the module vllm is not installed: run `make setup`")
        root = Path(spec.origin).parent
        files = ["_version.py", "engine/arg_utils.py", "entrypoints/launchers/cli_args.py", "utils/argparse_utils.py"]
        stats = [(name, os.stat(root / name)) for name in files if (root / name).exists()]
        return json.dumps([str(root), *[[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
