"""Context-parallel shards: every token is computed once, and each chunk sees exactly what precedes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vime.backends.megatron_utils.attention import shard_attention
from vime.backends.megatron_utils.context_shard import ContextShard, context_shard
from vime.backends.megatron_utils.packed_params import packed_params, shard_params
from vime.packing.pack import PackedBatch, pack
from vime.types import StepPlan, TrainSample

LENGTHS = (9, 1, 4, 13)


def packed() -> PackedBatch:
    samples = []
    for number, length in enumerate(LENGTHS):
        response = length - 1
        values = {"tokens": 100 * number + np.arange(length), "response_length": response, "loss_mask": np.ones(response, np.float32)}
        ids = {"sample_id": number, "group_id": number, "rollout_id": number}
        samples.append(TrainSample(**values, **ids, reward=0.0, raw_reward=0.0, rollout_mask_sum=float(response)))
    return pack(samples, StepPlan(micro_batches=((0, 1, 2, 3),), num_rollouts=4, num_tokens=23.0))


def shards(size: int, multiple_of: int = 1) -> list[ContextShard]:
    return [context_shard(packed(), rank=rank, size=size, multiple_of=multiple_of) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("multiple_of", [1, 2, 3, 4])
def test_the_ranks_have_every_token_once_and_as_many_as_one_another(size: int, multiple_of: int) -> None:
    batch, parts = packed(), shards(size, multiple_of)
    assert len({len(part.at) for part in parts}) == 1
    assert len(parts[0].at) % multiple_of == 0
    at = torch.cat([part.at for part in parts])
    real = at[at < batch.num_tokens]
    assert sorted(real.tolist()) == list(range(batch.num_tokens))
    tokens, positions = (torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "position_ids"))
    assert torch.equal(tokens[at < batch.num_tokens], batch.tokens[real])
    assert torch.equal(positions[at < batch.num_tokens], batch.position_ids[real])
    assert not tokens[at == batch.num_tokens].any()


@pytest.mark.parametrize("size", [2, 3])
def test_a_chunk_sees_the_keys_of_its_sequence_up_to_its_end(size: int) -> None:
    parts = shards(size)
    positions = torch.cat([part.position_ids for part in parts])
    for part in parts:
        for queries, keys in zip(part.position_ids.split(part.query_sizes), part.keys.split(part.key_sizes), strict=True):
            assert positions[keys].tolist() == list(range(int(queries[-1]) + 1))


def test_wanted_rows_are_those_of_the_rank_and_never_none() -> None:
    batch, parts = packed(), shards(2)
    wanted = torch.tensor([3, 10, 25])
    found = [part.at[part.rows(wanted)] for part in parts]
    assert sorted(torch.cat(found).tolist()) == [3, 10, 25]
    alone = [part.rows(torch.tensor([0])) for part in parts]
    assert [len(rows) for rows in alone] == [1, 1]
    assert parts[0].at[alone[0]].tolist() == [0]
    assert batch.num_tokens == sum(LENGTHS)


def test_attention_of_the_ranks_together_is_that_of_the_whole() -> None:
    batch, size = packed(), 2
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch.num_tokens, heads, 8) for heads in (4, 2, 2))
    parts = shards(size)

    def of(x: torch.Tensor, part: ContextShard) -> torch.Tensor:
        return torch.cat([x, torch.zeros(1, *x.shape[1:])])[part.at]

    keys, values = (torch.cat([of(x, part) for part in parts]) for x in (k, v))
    out = torch.zeros(batch.num_tokens + 1, 4, 8)
    for part in parts:
        out[part.at] = shard_attention(of(q, part), keys, values, part, scale=0.3)
    for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        row = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*row, is_causal=True, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(out[a:b], expected[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("thd", [False, True])
def test_several_sequences_never_look_like_one_to_megatrons_rotary_embedding(thd: bool) -> None:
    """It takes positions as absolute over the pack where the longest sequence is as long as the pack."""
    batch = packed()
    whole, part = packed_params(batch, thd=thd), shard_params(shards(2)[0], thd=thd)
    assert whole.max_seqlen_q < int(whole.cu_seqlens_q[-1])
    assert part.max_seqlen_q < int(part.cu_seqlens_q[-1])
