"""Check the user's --vllm- and --router- tokens with the parsers that own them.

    python -m vime.backends.vllm_utils.arguments vllm   --max-num-seqs 64
    python -m vime.backends.vllm_utils.arguments router --policy round_robin

Tokens come without the prefix. Exit 0 when all is well; exit 2 with one problem per line on stderr, in the user's spelling.
`--options` alone prints what options there are, as JSON. vLLM's parser takes many seconds to import, so what it accepted
once is remembered (keyed by its files) in the user's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from vime.config import options as parsing
from vime.config.options import Option, cache_folder, describe, groups, parse_all, store_options
from vime.config.owners import OWNERS

__all__ = ["OVERRIDABLE_ROUTER", "OVERRIDABLE_VLLM", "OWNED_ROUTER", "OWNED_VLLM", "check_router", "check_vllm", "main"]

_HTTP = "nothing: engines listen on loopback, in plain HTTP"

# flags that the framework sets, or that would break what it builds on, and what to use instead
OWNED_VLLM = {
    "--model": "--hf-checkpoint",
    "--tokenizer": "--hf-checkpoint (the tokenizer of the model folder)",
    "--host": _HTTP,
    "--port": "nothing: a free port is found",
    "--uds": _HTTP,
    "--grpc": _HTTP,
    "--grpc-port": _HTTP,
    "--root-path": _HTTP,
    "--ssl-keyfile": _HTTP,
    "--ssl-certfile": _HTTP,
    "--ssl-ca-certs": _HTTP,
    "--ssl-cert-reqs": _HTTP,
    "--ssl-ciphers": _HTTP,
    "--enable-ssl-refresh": _HTTP,
    "--api-key": "nothing: the engines' control paths have a secret of the run's own",
    "--served-model-name": "nothing: it is vime in every run",
    "--tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "--api-server-count": "nothing: one server an engine, which the weight sync talks to",
    "--max-model-len": "--rollout-max-context-len",
    "--dtype": "nothing: engines compute in what the trainer does, float32 on the CPU and bfloat16 on GPUs",
    "--seed": "--rollout-seed",
    "--logprobs-mode": "nothing: the trainer needs log-probs of the distribution that is sampled from",
    "--generation-config": "--rollout-temperature, --rollout-top-p, --rollout-top-k",
    "--override-generation-config": "--rollout-temperature, --rollout-top-p, --rollout-top-k",
    "--weight-transfer-config": "--update-weight-buffer-size",
    "--worker-cls": "nothing: the weight sync brings its own",
    "--worker-extension-cls": "nothing: the weight sync brings its own",
    "--enable-scale-out": "nothing: it is always on",
    "--enable-sleep-mode": "--offload-rollout",
    "--tokens-only": "nothing: the engines are asked with token ids",
    "--config": "vime's own --config, whose table 'vllm' holds engine flags",
    "--headless": "nothing: an engine without its server cannot be asked",
    "--skip-tokenizer-init": "nothing: stop strings need the tokenizer",
    "--load-format": "nothing: engines start from --hf-checkpoint",
    "--help": "vime train --help=vllm",
    **dict.fromkeys(("--enable-lora", "--max-lora-rank", "--max-loras", "--max-cpu-loras", "--lora-modules"), "--lora-sync adapter"),
}
NOT_YET_VLLM = frozenset(  # an engine is one tensor-parallel group on one host so far
    "--pipeline-parallel-size --prefill-context-parallel-size --decode-context-parallel-size --data-parallel-size --data-parallel- "
    "size-local --data-parallel-rank --data-parallel-start-rank --data-parallel-address --data-parallel-rpc-port --data-parallel- "
    "supervisor-port --data-parallel-backend --data-parallel-hybrid-lb --data-parallel-external-lb --data-parallel-multi-port- "
    "external-lb --distributed-executor-backend --nnodes --node-rank --master-addr --master-port".split()
)
OVERRIDABLE_VLLM = frozenset(  # set by us, too, as a default: the user's word comes later on the command line and wins
    "--middleware --uvicorn-log-level --kv-cache-memory-bytes --enforce-eager --enable-prefix-caching --max-num-seqs "
    "--gpu-memory-utilization".split()
)
OWNED_ROUTER = {
    "--host": "nothing: the router listens on loopback",
    "--port": "--vllm-router-port for a router that runs already",
    "--worker-urls": "nothing: the router is given the run's engines",
    "--prometheus-host": "nothing: it listens on loopback",
    "--prometheus-port": "nothing: a free port is found",
    "--mini-lb": "nothing: engines are not split into prefill and decode",
    "--service-discovery": "--vllm-router-ip for a router that runs already",
    "--vllm-pd-disaggregation": "nothing: engines are not split into prefill and decode",
    "--api-key": "nothing: the router listens on loopback",
    "--help": "vime train --help=router",
}
OVERRIDABLE_ROUTER = frozenset(
    "--policy --log-level --worker-startup-check-interval --request-timeout-secs --retry-max-retries --health-check-interval-secs "
    "--health-check-timeout-secs --health-failure-threshold --health-success-threshold --cb-failure-threshold "
    "--cb-timeout-duration-secs".split()
)


def check_vllm(tokens: Sequence[str]) -> list[str]:
    """Problems with engine tokens, in the user's spelling (--vllm-X); empty when vLLM's own parser takes them."""
    cache = _Cache()
    problems, rest = _owned(tokens, _vllm_refusals(), "vllm")
    if cache.accepted(rest):
        return problems
    values, refused = parse_all(_vllm_parser(), rest, underscores=True)
    refused = _spelled([*refused, *_out_of_bounds(values)], "vllm")
    if not refused:
        cache.store(rest)
    return problems + refused


def check_router(tokens: Sequence[str]) -> list[str]:
    """Problems with router tokens, in the user's spelling (--router-X); empty when vllm-router's own parser takes them."""
    from vllm_router.router_args import RouterArgs

    problems, rest = _owned(tokens, _refusals(OWNED_ROUTER), "router")
    parser = _router_parser()
    problems += _spelled(parse_all(parser, rest)[1], "router")
    if problems:
        return problems
    try:
        RouterArgs.from_cli_args(_router_parser().parse_args(rest), use_router_prefix=False)._validate_router_args()
    except (ValueError, TypeError) as error:
        return [f"vllm-router refuses the --router- flags: {error}"]
    return [problem for words in groups(rest) for problem in _unbuildable(words)]


def _unbuildable(words: Sequence[str]) -> list[str]:
    """What the router's compiled part says to one flag: it has the bounds. Nothing is started."""
    from vllm_router.router import Router
    from vllm_router.router_args import RouterArgs

    try:
        Router.from_args(RouterArgs.from_cli_args(_router_parser().parse_args(list(words)), use_router_prefix=False))
    except (OverflowError, ValueError, TypeError) as error:
        return [f"{' '.join([_ours(words[0], 'router'), *words[1:]])}: vllm-router refuses it: {error}."]
    return []


def _out_of_bounds(values: Mapping[str, Any]) -> Iterator[str]:
    """A problem for each value outside of the bounds that vLLM's configuration states; its parser does not look at them."""
    from pydantic import TypeAdapter, ValidationError

    bounded = _vllm_bounds() if values else {}
    for dest in bounded.keys() & {name for name, value in values.items() if value is not None}:
        try:
            TypeAdapter(bounded[dest]).validate_python(values[dest])
        except ValidationError as error:
            reason = error.errors()[0]["msg"].replace("Input should", "it should")
            yield f"--{dest.replace('_', '-')} {values[dest]}: vLLM refuses it: {reason}."


def _vllm_bounds() -> dict[str, Any]:
    """Destination -> annotated type, of the fields of vLLM's configuration classes that have bounds."""
    import vllm.config

    classes = (getattr(vllm.config, name) for name in vllm.config.__all__)
    fields = [item for cls in classes for item in getattr(cls, "__pydantic_fields__", {}).items()]
    return {name: Annotated[field.annotation, field] for name, field in reversed(fields) if field.metadata}


def main(argv: Sequence[str]) -> int:
    """Command line of this module; see its docstring."""
    if not argv or argv[0] not in ("vllm", "router"):
        print("usage: python -m vime.backends.vllm_utils.arguments vllm|router TOKENS", file=sys.stderr)
        return 1
    problems: list[str] = []
    answer: dict[str, Any] = {}
    with _silence():
        if list(argv[1:]) == ["--options"]:
            answer["options"] = [asdict(option) for option in _list_options(argv[0])]
        else:
            problems = check_vllm(argv[1:]) if argv[0] == "vllm" else check_router(argv[1:])
    for problem in problems:
        print(" ".join(problem.split()), file=sys.stderr)
    print(json.dumps(answer))
    return 2 if problems else 0


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Importing vLLM warns about things that are no concern of the user's, on both outputs, from C as well."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.close(silent)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(kept, 1):
            os.dup2(copy, number)
            os.close(copy)


def _vllm_parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    newer = importlib.util.find_spec("vllm.entrypoints.launchers") is not None
    arguments = importlib.import_module("vllm.entrypoints.launchers.cli_args" if newer else "vllm.entrypoints.openai.cli_args")
    parser: argparse.ArgumentParser = arguments.make_arg_parser(FlexibleArgumentParser(prog="vllm"))
    return parser


def _router_parser() -> argparse.ArgumentParser:
    from vllm_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return parser


def _list_options(owner: str) -> list[Option]:
    """The options of a parser; they are remembered."""
    if owner == "vllm":
        sys.argv = ["vllm", "--help"]  # vLLM reads its options' descriptions only then, for that takes seconds
        options = describe(_vllm_parser(), _vllm_refusals())
    else:
        options = describe(_router_parser(), _refusals(OWNED_ROUTER))
    store_options(owner, OWNERS[owner].key(), options)
    return options


def _refusals(owned: Mapping[str, str]) -> dict[str, str]:
    """Option -> why it cannot be given, and the cure."""
    return {
        flag: "is set by vime itself: "
        + (f"leave it out ({instead.removeprefix('nothing: ')})." if instead.startswith("nothing") else f"use {instead}.")
        for flag, instead in owned.items()
    }


def _vllm_refusals() -> dict[str, str]:
    why = "is not available yet: an engine is one tensor-parallel group on one host. Start more engines with --rollout-num-gpus."
    return _refusals(OWNED_VLLM) | dict.fromkeys(NOT_YET_VLLM, why)


def _owned(tokens: Sequence[str], refused: Mapping[str, str], owner: str) -> tuple[list[str], list[str]]:
    """(a problem for each flag that is refused, the other tokens)."""
    problems: dict[str, None] = {}
    rest: list[str] = []
    ours = False
    for token in tokens:
        if token.startswith("--"):
            name = re.split(r"[=.]", token, maxsplit=1)[0].replace("_", "-")
            positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
            ours = name in refused or positive in refused
            if ours:
                problems[f"{_ours(name, owner)} {refused.get(name) or refused[positive]}"] = None
        if not ours:
            rest.append(token)
    return list(problems), rest


def _ours(flag: str, owner: str) -> str:
    """An option of the owner as the user spells it here."""
    return re.sub(r"^--(no-)?", rf"--\1{owner}-", flag)


def _spelled(problems: Iterable[str], owner: str) -> list[str]:
    """The parser's words with the flags in the user's spelling."""
    return [re.sub(r"(?<![\w-])--[A-Za-z][\w.-]*\b", lambda match: _ours(match.group(), owner), problem) for problem in problems]


class _Cache:
    """Digests of the token lists that vLLM's parser accepted; valid for one state of its files and ours."""

    _KEPT = 64  # accepted token lists remembered

    def __init__(self) -> None:
        self._path = cache_folder() / "vllm_accepted.json"
        self._key = self._fingerprint()
        self._accepted: list[str] = []
        try:
            data = json.loads(self._path.read_text())
            if data["key"] == self._key:
                self._accepted = list(data["accepted"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # no cache, or a torn one: the parser itself is asked

    def accepted(self, tokens: Sequence[str]) -> bool:
        """Whether vLLM's parser took exactly these tokens before."""
        return not tokens or self._digest(tokens) in self._accepted

    def store(self, tokens: Sequence[str]) -> None:
        """Remember tokens that were accepted. A cache that cannot be written is no error."""
        text = json.dumps({"key": self._key, "accepted": [*self._accepted, self._digest(tokens)][-self._KEPT :]})
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
        paths = [*(root / name for name in files), *(Path(module) for module in (__file__, parsing.__file__))]
        stats = [(str(path), path.stat()) for path in paths if path.exists()]
        return json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
