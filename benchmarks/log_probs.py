"""What the log-probs of tokens cost beyond their logits: ours, a chunk of rows at a time, against the whole softmax at once.

    python -m benchmarks.log_probs [--tokens 1024] [--vocab 151936] [--dtype bfloat16|float32] [--rounds 3]

Both compute log-probs and entropy of the same logits and the gradient of a loss of both, in turns in one process; memory
is the growth of the process's peak during a fresh process's first pass, without the logits and their gradient. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import describe_machine
from vime.backends.megatron_utils.log_probs import token_log_probs

Function = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def whole(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, on a float32 copy of all logits."""
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def ours(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's function."""
    log_probs, entropy = token_log_probs(logits, labels, with_entropy=True, entropy_grad=True)
    assert entropy is not None
    return log_probs, entropy


WAYS: dict[str, Function] = {"whole": whole, "vime": ours}


def problem(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels."""
    torch.manual_seed(0)
    logits = torch.empty(options.tokens, options.vocab, dtype=getattr(torch, options.dtype))
    for row in logits:  # one at a time: the peak before the pass must be that of the logits alone
        row.copy_(torch.randn(options.vocab).mul_(3))
    return logits.requires_grad_(), torch.randint(0, options.vocab, (options.tokens,))


def one_pass(function: Function, logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Seconds of forward and backward."""
    logits.grad = None
    begun = time.perf_counter()
    log_probs, entropy = function(logits, labels)
    (log_probs.mean() + 0.01 * entropy.mean()).backward()
    return time.perf_counter() - begun


def peak_growth(options: argparse.Namespace, way: str) -> float:
    """MiB, in this process, which has computed nothing else."""
    logits, labels = problem(options)
    small = logits[:8].detach().requires_grad_()
    one_pass(WAYS[way], small, labels[:8])  # what libraries allocate once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one_pass(WAYS[way], logits, labels)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return grown - logits.numel() * logits.element_size() / 2**20  # the gradient is in both


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", choices=sorted(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak_growth(options, options.peak))
        return
    sizes = ["--tokens", str(options.tokens), "--vocab", str(options.vocab), "--dtype", options.dtype]
    out: dict[str, Any] = {"tokens": options.tokens, "vocab": options.vocab, "dtype": options.dtype}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.log_probs", *sizes, "--peak", way]
        out[f"{way}_peak_mib"] = round(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout), 1)
    logits, labels = problem(options)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, function in WAYS.items():
            seconds[way].append(one_pass(function, logits, labels))
    out |= {f"{way}_s": [round(value, 3) for value in values] for way, values in seconds.items()}
    out["logits_mib"] = round(logits.numel() * logits.element_size() / 2**20, 1)
    out["threads"] = torch.get_num_threads()
    print(json.dumps(out | {"machine": describe_machine()}, indent=1))


if __name__ == "__main__":
    main()
