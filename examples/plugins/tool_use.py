"""A calculator in the middle of a response.

The model writes `<calc>12*7</calc>`, the function answers ` = 84 ` and the model goes on. The answer's tokens are in the
sample's tokens, where the trainer conditions on them, and out of its loss: mask 0.

    vime train ... --custom-generate-function-path examples.plugins.tool_use.generate_with_tool
"""

from __future__ import annotations

import ast
import operator
import re
import time
from typing import Any

from vime.rollout.vllm_rollout import GenerateState, generate
from vime.utils.types import Sample

MAX_CALLS = 4
CALL = r"<calc>(.*?)</calc>"  # a row's metadata may hold another one under "tool_pattern"
OPERATORS: dict[type[ast.operator], Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    """The value of an integer expression with + - *, or why there is none. Nothing is executed."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return int(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError

    try:
        return str(value(ast.parse(expression[:64].strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error"


async def generate_with_tool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate up to the end of a call, append its result, go on; at most MAX_CALLS calls.

    With --partial-rollout a response may be cut off anywhere and given in again: what was called, and up to where, is in the metadata.
    """
    state = GenerateState(args)
    pattern = re.compile(sample.metadata.get("tool_pattern", CALL))
    params = {**sampling_params, "stop": [*sampling_params.get("stop", []), *sample.metadata.get("tool_stop", ["</calc>"])]}
    if not sample.response:
        sample.metadata |= {"calls": 0, "searched": 0}
    while sample.metadata["calls"] < MAX_CALLS:
        sample = await generate(args, sample, dict(params))
        call = pattern.search(sample.response, sample.metadata["searched"])
        if call is None or sample.status is not Sample.Status.COMPLETED:
            return sample
        begun = time.monotonic()
        observation = f" = {calculate(call.group(1))} "
        sample.non_generation_time += time.monotonic() - begun
        tokens = state.tokenizer.encode(observation, add_special_tokens=False)
        sample.append_response_tokens(args, tokens=tokens, trainable=False, text=observation)
        sample.metadata["calls"] += 1
        sample.metadata["searched"] = len(sample.response)
    return await generate(args, sample, dict(sampling_params))
