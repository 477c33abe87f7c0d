"""Log-probs and entropies with the vocabulary split over two gloo processes against the whole softmax."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vime.backends.megatron_utils.log_probs import token_log_probs
from vime.packing.pack import KeptTokens

pytestmark = pytest.mark.integration

WIDTH = 16  # columns of one rank


def on_rank(rank: int, folder: str, vocab_sizes: list[int]) -> None:
    """Write values and gradients of this rank's slice."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for vocab_size in vocab_sizes:
        for rows, kept in ((None, None), (torch.tensor([1, 2, 6]), None), (torch.tensor([1, 2, 6]), kept_tokens(vocab_size))):
            whole, labels, weight = problem(vocab_size)
            mine = whole[:, rank * WIDTH : (rank + 1) * WIDTH].clone().requires_grad_()
            log_probs, entropy = token_log_probs(
                mine,
                labels,
                tp_group=dist.group.WORLD,
                temperature=0.8,
                vocab_size=vocab_size,
                rows=rows,
                with_entropy=True,
                entropy_grad=True,
                chunk_rows=3,
                kept=kept,
            )
            assert entropy is not None
            ((log_probs + 0.5 * entropy) * weight).sum().backward()
            results[vocab_size, rows is None, kept is not None] = (log_probs.detach(), entropy.detach(), mine.grad)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def problem(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of both ranks side by side, labels, and weights for a loss."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(7, 2 * WIDTH, generator=generator)
    logits[:, [0, WIDTH]] = -math.inf  # impossible tokens in the column that stands in for labels of the other rank
    labels = 2 * torch.randint(0, vocab_size // 2, (7,), generator=generator) + 1
    return logits, labels, torch.randn(7, generator=generator)


def kept_tokens(vocab_size: int) -> KeptTokens:
    """The label and a few more of each position, of both ranks' columns; position 2 keeps all."""
    _, labels, _ = problem(vocab_size)
    sets = [[] if at == 2 else sorted({int(label), 1, vocab_size - 1}) for at, label in enumerate(labels)]
    return KeptTokens(ids=torch.tensor([i for ids in sets for i in ids]), offsets=torch.tensor([0, *(len(ids) for ids in sets)]).cumsum(0))


def test_two_ranks_equal_the_whole_softmax(tmp_path: Path) -> None:
    vocab_sizes = [32, 27, 16, 9]  # none, a part, and all of the second rank's columns are padding
    context = mp.get_context("spawn")
    processes = [context.Process(target=on_rank, args=(rank, str(tmp_path), vocab_sizes)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for vocab_size in vocab_sizes:
        for all_rows, some_kept in ((True, False), (False, False), (False, True)):
            logits, labels, weight = problem(vocab_size)
            logits.requires_grad_()
            scaled = logits[:, :vocab_size] / 0.8
            if some_kept:
                kept = kept_tokens(vocab_size)
                out = torch.ones(7, vocab_size, dtype=torch.bool)
                for at in range(7):
                    out[at, kept.ids[kept.offsets[at] : kept.offsets[at + 1]]] = False
                out[2] = False
                scaled = scaled.masked_fill(out, -math.inf)
            log_p = torch.log_softmax(scaled, -1)
            chosen = torch.ones(7) if all_rows else torch.zeros(7).index_fill(0, torch.tensor([1, 2, 6]), 1.0)
            log_probs = log_p.gather(-1, labels[:, None]).squeeze(-1) * chosen
            entropy = -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1) * chosen
            ((log_probs + 0.5 * entropy) * weight).sum().backward()
            for rank, results in enumerate(ranks):
                got_log_probs, got_entropy, got_grad = results[vocab_size, all_rows, some_kept]
                torch.testing.assert_close(got_log_probs, log_probs.detach(), rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(got_entropy, entropy.detach(), rtol=1e-6, atol=1e-6)
                assert logits.grad is not None
                torch.testing.assert_close(got_grad, logits.grad[:, rank * WIDTH : (rank + 1) * WIDTH], rtol=1e-6, atol=1e-6)
