"""Megatron's arguments: its own parser verbatim, the shape from the Hugging Face config, our flags, the user's tokens.

    python -m vime.backends.megatron_utils.arguments [--hf-checkpoint DIR] [--world-size N] [--lora JSON] [--planned] [--] TOKENS...

checks tokens for the driver, which must not import Megatron. The last line of stdout is one JSON object: plain resolved
values, and where those that are no default of Megatron's come from. With problems the exit code is 2, and they stand on
stderr, one a line and nothing else. With a folder the tokens are also checked against its config.json and by Megatron's
own `validate_args`. `--options` alone prints what options there are.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vime.backends.megatron_utils.bootstrap import Platform, import_megatron
from vime.backends.megatron_utils.convert.registry import model_ops, model_shape
from vime.backends.megatron_utils.convert.shape import ModelShape
from vime.backends.megatron_utils.convert.shape_arguments import shape_arguments
from vime.backends.megatron_utils.convert.transfer import check_hf_weights
from vime.backends.megatron_utils.flags import BOUNDS, CURES, HONOURED, NOT_YET_PREFIXES, OF_EXPERTS, VALUES
from vime.backends.megatron_utils.layer_probe import has_transformer_engine
from vime.backends.megatron_utils.layout import Layout
from vime.backends.megatron_utils.lora_peft import adapter_problems
from vime.config.fields import flag_specs
from vime.config.options import Option, describe, parse_all, store_options
from vime.config.owners import OWNERS
from vime.config.run import SECTIONS, RunConfig
from vime.config.sections import LoraConfig
from vime.errors import ConfigError, VimeError

__all__ = ["build_parser", "check_tokens", "main", "resolve", "shape_arguments"]

log = logging.getLogger(__name__)
CPU_PLATFORM = Platform(device=torch.device("cpu"), dtype=torch.float32, backend="gloo")


def build_parser() -> argparse.ArgumentParser:
    """Megatron's full parser: every flag under its own name, no abbreviations."""
    import_megatron()
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(prog="megatron", allow_abbrev=False, add_help=False))


def parse_explicit(parser: argparse.ArgumentParser, tokens: Sequence[str]) -> tuple[dict[str, Any], argparse.Namespace, list[str]]:
    """(what the tokens set, Megatron's defaults for all, a problem for each flag that is unknown, malformed or out of bounds)."""
    defaults = argparse.Namespace(**{a.dest: parser.get_default(a.dest) for a in parser._actions})
    explicit, problems = parse_all(parser, tokens)
    refused = {dest: problem for dest, value in explicit.items() if (problem := _out_of_bounds(_flag_of(parser, dest), dest, value))}
    return {dest: value for dest, value in explicit.items() if dest not in refused}, defaults, [*problems, *refused.values()]


def _out_of_bounds(flag: str, dest: str, value: Any) -> str | None:
    low, high = BOUNDS.get(dest, (-math.inf, math.inf))
    numbers = [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int | float)]
    bad = [number for number in numbers if not low <= number <= high]
    return f"{flag} must be {f'>= {low:g}' if high == math.inf else f'from {low:g} to {high:g}'}, got {bad[0]}." if bad else None


def _flag_of(parser: argparse.ArgumentParser, dest: str) -> str:
    for action in parser._actions:
        if action.dest == dest and action.option_strings:
            return action.option_strings[-1]
    return "--" + dest.replace("_", "-")


def honour_problems(parser: argparse.ArgumentParser, explicit: Mapping[str, Any], *, planned: bool = False) -> list[str]:
    """One problem for each flag that this trainer would have to ignore; `planned`: what is only not available yet is none."""
    problems = []
    for dest, value in explicit.items():
        flag = _flag_of(parser, dest)
        if dest in HONOURED:
            problems += _value_problems(flag, dest, value)
        elif dest in CURES:
            problems.append(f"{flag} has no effect in vime. {CURES[dest]}")
        elif dest.startswith(NOT_YET_PREFIXES):
            problems.append(f"{flag}: not available yet: this trainer does not build what it asks for.")
        else:
            problems.append(f"{flag} is for Megatron's own pretraining program and would have no effect here: leave it out.")
    return [problem for problem in problems if not (planned and ": not available yet: " in problem)]


def _value_problems(flag: str, dest: str, value: Any) -> list[str]:
    """Of a flag that is honoured for some values only."""
    names = [getattr(word, "name", word) for word in (value if isinstance(value, list) else [value])]  # some are enumerations
    for name in names:
        if dest in VALUES and name not in VALUES[dest][0]:
            values, why = VALUES[dest]
            return [f"{flag} {name}: not available (only {', '.join(values)}). {why}"]
    if dest in ("moe_grouped_gemm", "moe_permute_fusion") and value and not has_transformer_engine():
        return [f"{flag}: not available without Transformer Engine and a GPU. Leave it out: experts are computed one after the other."]
    if dest == "transformer_impl":
        there = "transformer_engine" if has_transformer_engine() else "local"
        if value != there:
            return [
                f"{flag} {value}: this machine's choice is {there} (Transformer Engine is used where it is installed). Leave the flag out."
            ]
    return []


def contradictions(parser: argparse.ArgumentParser, explicit: Mapping[str, Any], implied: Mapping[str, Any], source: str) -> list[str]:
    """Problems where a token of the user says something else than `source` does."""
    return [
        f"{_flag_of(parser, dest)} {explicit[dest]} contradicts {source}, which says {value}. Leave the flag out."
        for dest, value in implied.items()
        if dest in explicit and explicit[dest] != value
    ]


def own_arguments(config: RunConfig) -> dict[str, tuple[Any, str]]:
    """Megatron destination -> (value, our flag) for the fields of our sections that are Megatron's as well."""
    return {
        spec.megatron.removeprefix("--").replace("-", "_"): (getattr(getattr(config, section), spec.name), spec.flag)
        for section, cls in SECTIONS.items()
        for spec in flag_specs(cls)
        if spec.megatron is not None
    }


def overlay(where: Platform) -> dict[str, Any]:
    """What the platform decides, whatever Megatron's defaults say."""
    engine = has_transformer_engine()
    out: dict[str, Any] = {
        "bf16": where.dtype == torch.bfloat16,
        "fp16": False,
        "transformer_impl": "transformer_engine" if engine else "local",
        "hidden_dropout": 0.0,
        "use_distributed_optimizer": True,
        "accumulate_allreduce_grads_in_fp32": where.dtype == torch.bfloat16,
        "moe_token_dispatcher_type": "alltoall",
        "gradient_accumulation_fusion": importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None and not where.is_cpu,
    }
    if not engine:
        out |= {"apply_rope_fusion": False, "no_persist_layer_norm": True, "masked_softmax_fusion": False}
    if where.is_cpu:
        out |= {"bias_gelu_fusion": False, "bias_swiglu_fusion": False, "bias_dropout_fusion": False}
    return out


def resolve(config: RunConfig, shape: ModelShape, where: Platform, *, world_size: int, rank: int = 0) -> argparse.Namespace:
    """All of Megatron's arguments for this run, checked. Raises ConfigError with all problems found."""
    parser = build_parser()
    explicit, args, problems = parse_explicit(parser, config.megatron_tokens)
    problems += honour_problems(parser, explicit)
    own = own_arguments(config)
    for dest, (value, flag) in own.items():
        problems += contradictions(parser, explicit, {dest: value}, f"our flag {flag}")
    resolved = _with_shape(parser, explicit, args, shape, problems)
    if problems:
        raise ConfigError(*problems)
    platform_values = {key: value for key, value in overlay(where).items() if key not in explicit}
    log.info("decided by the platform (%s, %s): %s", where.device, where.dtype, platform_values)
    resolved |= platform_values | {dest: value for dest, (value, _) in own.items()}
    resolved.setdefault("attention_dropout", shape.attention_dropout)
    vars(args).update(resolved | explicit)
    args.prediction_layers = shape.prediction.layers if shape.predicts and shape.prediction is not None else 0
    return _validated(args, world_size=world_size, rank=rank)


def _with_shape(
    parser: argparse.ArgumentParser, explicit: Mapping[str, Any], defaults: argparse.Namespace, shape: ModelShape, problems: list[str]
) -> dict[str, Any]:
    """The shape's arguments; contradictions with the tokens are added to `problems`."""
    try:
        implied = shape_arguments(
            shape,
            tensor_parallel=explicit.get("tensor_model_parallel_size", 1),
            divisible_by=explicit.get("make_vocab_size_divisible_by", defaults.make_vocab_size_divisible_by),
        )
    except ConfigError as error:
        problems += error.problems
        return {}
    problems += contradictions(parser, explicit, implied, shape.path)
    if shape.experts is not None and explicit.get("tensor_model_parallel_size", 1) > 1 and not explicit.get("sequence_parallel"):
        problems.append("--tensor-model-parallel-size with experts needs --sequence-parallel: each token is routed on one rank.")
    if shape.experts is None:
        unread = [_flag_of(parser, dest) for dest in explicit if dest in OF_EXPERTS]
        problems += [f"{flag} has no effect: {shape.path} is of a model without experts. Leave it out." for flag in unread]
    return implied


def _validated(args: argparse.Namespace, *, world_size: int, rank: int) -> argparse.Namespace:
    """Megatron's own checks; what it prints goes to our log. Raises ConfigError with its message."""
    from megatron.training.arguments import validate_args

    args.rank, args.world_size = rank, world_size
    args.seq_length = -(-args.max_position_embeddings // (2 * args.context_parallel_size)) * 2 * args.context_parallel_size
    args._is_global_batch_size_explicitly_specified = False
    args.micro_batch_size = args.micro_batch_size or 1
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # validate_args asserts it with tensor parallelism
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            validate_args(args)
    except (AssertionError, ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"Megatron refuses these arguments: {re.sub(chr(10), ' ', str(error)) or 'an assertion without a message'}"
        ) from error
    finally:
        log.debug("Megatron's validate_args: %s", printed.getvalue())
    return args


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What became of the user's tokens."""

    values: dict[str, Any]  # resolved arguments that are plain values
    origins: dict[str, str]  # where a value comes from that is no default of Megatron's: "model" or "platform"
    problems: list[str]


def check_tokens(
    tokens: Sequence[str],
    *,
    hf_checkpoint: str | None = None,
    world_size: int | None = None,
    lora: LoraConfig | None = None,
    planned: bool = False,
) -> Checked:
    """Check the user's tokens, and adapters, without building anything. Without a folder only the tokens themselves are checked."""
    parser = build_parser()
    explicit, args, problems = parse_explicit(parser, tokens)
    problems += honour_problems(parser, explicit, planned=planned)
    implied: dict[str, Any] = {}
    if hf_checkpoint is not None:
        try:
            shape = model_shape(hf_checkpoint)
            ops = model_ops(shape, shape.vocab_size)
            check_hf_weights(hf_checkpoint, ops, shape)
            problems += adapter_problems(lora, ops, hf_checkpoint) if lora is not None else []
            implied = _with_shape(parser, explicit, args, shape, problems)
        except ConfigError as error:
            problems += error.problems
        except VimeError as error:
            problems.append(str(error))
    platform = {key: value for key, value in overlay(CPU_PLATFORM).items() if key not in explicit}
    vars(args).update(implied | platform | explicit)
    if hf_checkpoint is not None and not problems:
        sizes = Layout.of(args)
        split = math.lcm(sizes.model, sizes.experts)
        try:
            args = _validated(args, world_size=split if world_size is None else world_size, rank=0)
        except ConfigError as error:
            problems += error.problems
    origins = dict.fromkeys(implied, "model") | dict.fromkeys(platform, "platform")
    values = {key: value for key, value in vars(args).items() if _is_plain(value)}
    return Checked(values=values, origins={key: origin for key, origin in origins.items() if key not in explicit}, problems=problems)


def list_options() -> list[Option]:
    """Every option of Megatron's parser, with what keeps it from being given here."""
    parser = build_parser()
    notes: dict[str, str] = {}
    for action in parser._actions:
        if action.dest not in HONOURED:
            notes |= dict.fromkeys(action.option_strings, honour_problems(parser, {action.dest: None})[0])
    return describe(parser, notes)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def main(argv: Sequence[str]) -> int:
    """The command line of the module; see its docstring."""
    options = argparse.ArgumentParser(prog="vime.backends.megatron_utils.arguments", allow_abbrev=False)
    options.add_argument("--hf-checkpoint")
    options.add_argument("--world-size", type=int)
    options.add_argument("--lora", type=json.loads)
    options.add_argument("--planned", action="store_true")
    ours, tokens = (list(argv[: argv.index("--")]), list(argv[argv.index("--") + 1 :])) if "--" in argv else ([], list(argv))
    given = options.parse_args(ours)
    answer: dict[str, Any] = {}
    problems: list[str] = []
    with _silence():
        if tokens == ["--options"]:
            found = list_options()
            store_options("megatron", OWNERS["megatron"].key(), found)
            answer = {"options": [asdict(option) for option in found]}
        else:
            lora = None if given.lora is None else LoraConfig(**given.lora)
            where = {"hf_checkpoint": given.hf_checkpoint, "world_size": given.world_size}
            checked = check_tokens(tokens, **where, lora=lora, planned=given.planned)
            answer, problems = {"values": checked.values, "origins": checked.origins}, checked.problems
    for problem in problems:
        print(" ".join(problem.split()), file=sys.stderr)
    print(json.dumps(answer))
    return 2 if problems else 0


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What third parties say while they are loaded is no problem of the user's."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
