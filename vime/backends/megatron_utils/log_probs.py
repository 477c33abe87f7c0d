"""Log-probabilities and entropies of tokens from logits whose vocabulary is split over a tensor-parallel group.

Everything is computed in float32 (float64 for float64 logits), a chunk of rows at a time, so no second copy of the logits
in float32 ever exists; the backward pass recomputes its probabilities from the logits and two numbers a row. On a CUDA device
one kernel reads the logits once and another makes their gradient (`compiled`).

    log p(y) = z_y - lse(z)          d log p(y) / d z_j = [j = y] - p_j
    H        = -sum_j p_j log p_j    d H / d z_j        = -p_j (log p_j + H)         with z = logits / temperature

Top-k and top-p sampling draw from fewer tokens: where the engine's kept tokens are given, the sums run over those alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vime.backends.megatron_utils.compiled import log_prob_grads, log_prob_sums
from vime.packing.pack import KeptTokens

__all__ = ["put_together", "token_log_probs"]

CHUNK_ELEMENTS_CPU = 2**18  # of one float32 chunk: 1 MiB, which a core's cache holds
CHUNK_ELEMENTS = 2**26  # on other devices, where the kernels do not serve: 256 MiB, for few launches
NO_LOGIT = -1e30  # stands for -inf where 0 x -inf would be nan


def token_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    rows: torch.Tensor | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_rows: int | None = None,
    kept: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probs [T] of `labels`, entropies [T] or None), in nats, float32 (float64 for float64 logits).

    `logits` [T, V / tp] of any float dtype is this rank's slice of the vocabulary and is left as it is; `labels` [T] i64 are
    ids in the whole vocabulary. `tp_group` None = the vocabulary is whole. Columns from `vocab_size` on are padding and
    have probability 0. `rows` [N] i64 restricts the work to these positions, the others come out as 0 with no gradient; it
    must be the same on all ranks of `tp_group`. `entropy_grad` makes the entropies differentiable as the log-probs are.
    `kept` names the tokens of each of the T positions that its token was sampled from; a label must be one of them.
    Collective over `tp_group`.
    """
    group = tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None
    width = logits.shape[-1]
    start = dist.get_rank(group) * width if group is not None else 0
    valid = width if vocab_size is None else max(0, min(width, vocab_size - start))
    elements = CHUNK_ELEMENTS_CPU if logits.device.type == "cpu" else CHUNK_ELEMENTS
    chunk = chunk_rows or max(1, elements // max(width, 1))
    shard = _Shard(group, start, valid, float(temperature), rows, chunk, with_entropy, entropy_grad, kept)
    log_probs, entropy = _TokenLogProbs.apply(logits, labels, shard)
    return log_probs, entropy if with_entropy else None


def put_together(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum of `values` over the ranks of `group`, on each of them; None = `values`. For what all ranks then compute alike.

    The gradient of a rank's `values` is that of the sum as this rank has it: the same on all ranks, so none of them must add it up.
    """
    return values if group is None or dist.get_world_size(group) == 1 else _PutTogether.apply(values, group)


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        out = values.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Shard:
    """This rank's part of the vocabulary and how to walk over it."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        start: int,
        valid: int,
        temperature: float,
        rows: torch.Tensor | None,
        chunk: int,
        with_entropy: bool,
        entropy_grad: bool,
        kept: KeptTokens | None,
    ) -> None:
        self.group, self.start, self.valid, self.temperature = group, start, valid, temperature
        self.rows, self.chunk = rows, chunk
        self.with_entropy, self.entropy_grad = with_entropy, with_entropy and entropy_grad
        self.kept = kept

    def scaled(self, logits: torch.Tensor, where: slice) -> torch.Tensor:
        """A fresh float copy of one chunk of rows, without padding columns, divided by the temperature."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        source = logits[where] if self.rows is None else logits.index_select(0, self.rows[where])
        chunk = source[:, : self.valid].to(dtype, copy=self.rows is None)
        if self.temperature != 1.0:
            chunk.div_(self.temperature)
        return chunk if self.kept is None else chunk.masked_fill_(self.left_out(self.kept, where), NO_LOGIT)

    def left_out(self, kept: KeptTokens, where: slice) -> torch.Tensor:
        """[chunk, valid] bool: the columns that a row was not sampled from; none in a row without kept tokens."""
        rows = torch.arange(where.start, where.stop, device=kept.ids.device) if self.rows is None else self.rows[where]
        part = kept.of(rows)
        count = part.offsets.diff()
        row = torch.arange(len(rows), device=rows.device).repeat_interleave(count)
        column = part.ids - self.start
        here = (column >= 0) & (column < self.valid)
        out = (count > 0)[:, None].repeat(1, self.valid)
        out[row[here], column[here]] = False
        return out

    def by_kernel(self, logits: torch.Tensor) -> bool:
        """All columns of all rows are asked for, of a device with compiled kernels."""
        return logits.device.type == "cuda" and self.rows is None and self.kept is None

    def peak(self, logits: torch.Tensor) -> torch.Tensor:
        """The largest scaled logit of each row, in the dtype of `scaled`."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if self.valid and self.kept is not None:
            count = len(logits) if self.rows is None else len(self.rows)
            parts = [self.scaled(logits, where).amax(-1) for where in self.chunks(count)]
            return torch.cat(parts) if parts else logits.new_zeros(0, dtype=dtype)
        if self.valid:
            highest = logits[:, : self.valid].amax(-1).to(dtype).div_(self.temperature)
        else:
            highest = torch.full(logits.shape[:1], NO_LOGIT, dtype=dtype, device=logits.device)
        return highest if self.rows is None else highest[self.rows]

    def chunks(self, count: int) -> list[slice]:
        """Slices over `count` rows."""
        return [slice(at, min(at + self.chunk, count)) for at in range(0, count, self.chunk)]

    def local(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of each label in this rank's slice, 1 where it lies there)."""
        column = labels - self.start
        inside = (column >= 0) & (column < self.valid)
        return column.clamp(0, max(self.valid - 1, 0)), inside


class _TokenLogProbs(torch.autograd.Function):
    """See the module's docstring."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, shard: _Shard) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        chosen = labels if shard.rows is None else labels[shard.rows]
        count = len(chosen)
        peak = shard.peak(logits)
        sums = torch.zeros((3, count), dtype=dtype, device=logits.device)  # of exp, of exp x logit, the label's logit
        if shard.group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
        column, inside = shard.local(chosen)
        if shard.valid and shard.by_kernel(logits):
            sums[0], sums[1] = log_prob_sums(logits[:, : shard.valid], peak, 1.0 / shard.temperature)
            label = logits.gather(-1, column[:, None]).squeeze(-1).to(dtype) / shard.temperature - peak
            sums[2] = label.where(inside, 0.0)
        elif shard.valid:
            for where in shard.chunks(count):
                x = shard.scaled(logits, where).sub_(peak[where, None])
                sums[2, where] = x.gather(-1, column[where, None]).squeeze(-1).where(inside[where], 0.0)
                e = x.exp()
                sums[0, where] = e.sum(-1)
                if shard.with_entropy:
                    sums[1, where] = e.mul_(x.clamp_(min=NO_LOGIT)).sum(-1)
        if shard.group is not None:
            dist.all_reduce(sums, group=shard.group)
        log_norm = sums[0].log()
        log_probs = sums[2] - log_norm
        entropy = log_norm - sums[1] / sums[0]
        ctx.shard, ctx.shape = shard, labels.shape
        ctx.save_for_backward(logits, column, inside, peak + log_norm, entropy)
        out, out_entropy = _spread(log_probs, shard.rows, labels.shape), _spread(entropy, shard.rows, labels.shape)
        if not shard.entropy_grad:
            ctx.mark_non_differentiable(out_entropy)
        return out, out_entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, column, inside, lse, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        rows = shard.rows
        g = grad_log_probs if rows is None else grad_log_probs[rows]
        gh = grad_entropy if rows is None else grad_entropy[rows]
        if shard.valid and shard.by_kernel(logits):
            places = column.where(inside, -1)
            d = log_prob_grads(
                logits[:, : shard.valid], places, lse, g, entropy, gh if shard.entropy_grad else None, 1.0 / shard.temperature
            )
            return torch.nn.functional.pad(d, (0, logits.shape[-1] - shard.valid)), None, None
        grad = torch.zeros_like(logits)
        if not shard.valid:
            return grad, None, None
        for where in shard.chunks(len(column)):
            x = shard.scaled(logits, where).sub_(lse[where, None])  # log p
            p = x.exp()
            if shard.entropy_grad:
                x.clamp_(min=NO_LOGIT).add_(entropy[where, None]).mul_(gh[where, None]).add_(g[where, None])
                d = p.mul_(x).neg_()
            else:
                d = p.mul_(g[where, None]).neg_()
            d.scatter_add_(-1, column[where, None], (g[where] * inside[where])[:, None])
            if shard.temperature != 1.0:
                d.div_(shard.temperature)
            if rows is None:
                grad[where, : shard.valid] = d
            else:
                grad[:, : shard.valid].index_copy_(0, rows[where], d.to(grad.dtype))
        return grad, None, None


def _spread(values: torch.Tensor, rows: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Values of the chosen rows at their places among zeros."""
    if rows is None:
        return values.clone()
    return values.new_zeros(shape).index_copy(0, rows, values)
