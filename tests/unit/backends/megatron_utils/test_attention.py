"""Packed attention equals attention over each sequence alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.backends.megatron_utils.attention import packed_attention_cpu, packed_attention_cuda
from vime.backends.megatron_utils.packed_params import AttentionPlan, Rectangle, attention_plan

SCALE = 0.3


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T scale + causal mask) v of one sequence, written out. q [T, H, D], k and v [T, G, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    scores = scores.masked_fill(torch.ones(len(q), len(q), device=q.device).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_packed_attention_equals_each_sequence_alone(lengths: list[int]) -> None:
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    tensors = [torch.randn(total, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(total, 4, 8, generator=generator)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    out = packed_attention_cpu(*tensors, attention_plan(cu_seqlens), scale=SCALE)
    grads = torch.autograd.grad((out * weight).sum(), tensors)
    expected = torch.cat([plain(*parts) for parts in zip(*(x.split(lengths) for x in tensors), strict=True)])
    expected_grads = torch.autograd.grad((expected * weight).sum(), tensors)
    assert torch.allclose(out, expected, atol=1e-5)
    for got, want in zip(grads, expected_grads, strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def check_shared(groups: list[tuple[int, list[int]]], heads: int = 2) -> AttentionPlan:
    """Groups of (prompt, responses): attention with shared prompts equals attention over copies, forwards and backwards."""
    source, lengths, count = [], [], 0
    for prompt, responses in groups:
        shared = list(range(count, count + prompt))
        count += prompt
        for response in responses:
            source += shared + list(range(count, count + response))
            lengths.append(prompt + response)
            count += response
    index = torch.tensor(source)
    generator = torch.Generator().manual_seed(count)
    tensors = [torch.randn(count, n, 8, generator=generator, dtype=torch.float64, requires_grad=True) for n in (2 * heads, heads, heads)]
    weight = torch.randn(count, 2 * heads, 8, generator=generator, dtype=torch.float64)
    plan = attention_plan(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), index)
    out = packed_attention_cpu(*tensors, plan, scale=SCALE)
    copies = torch.cat([plain(*parts) for parts in zip(*(x[index].split(lengths) for x in tensors), strict=True)])
    assert torch.allclose(out[index], copies, atol=1e-12)
    first = torch.tensor([source.index(i) for i in range(count)])
    grads = torch.autograd.grad((out * weight).sum(), tensors)
    expected = torch.autograd.grad((copies[first] * weight).sum(), tensors)
    for got, want in zip(grads, expected, strict=True):
        assert torch.allclose(got, want, atol=1e-12)
    return plan


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1, max_size=5), st.integers(1, 3)
)
def test_shared_tokens_equal_copies_of_them(groups: list[tuple[int, list[int]]], heads: int) -> None:
    check_shared(groups, heads)


def test_a_group_is_one_tree_where_that_means_fewer_pairs() -> None:
    plan = check_shared([(16, [2, 3, 2, 2]), (17, [1, 2, 2, 2])])
    assert [(shape.rows, shape.longest) for shape in plan.shapes] == [(2, 25)]
    assert plan.shared_slots is None


def test_long_responses_stay_rows_of_their_own() -> None:
    plan = check_shared([(3, [90, 80])])
    assert [(shape.rows, shape.longest, shape.mask) for shape in plan.shapes] == [(2, 93, None)]
    assert plan.shared_slots is not None


def test_long_trees() -> None:
    plan = check_shared([(100, [20, 30, 5]), (110, [1])])
    assert {(shape.longest, shape.mask is None) for shape in plan.shapes} == {(155, False), (111, True)}


@pytest.mark.parametrize("lengths", [[5] * 50, [1, 2, 3, 100], [7], list(range(1, 60))])
def test_the_plan_wastes_little(lengths: list[int]) -> None:
    plan = attention_plan(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    assert sum(shape.rows for shape in plan.shapes) == len(lengths)
    assert len(plan.slot_to_token) <= 1.25 * sum(lengths)
    assert torch.equal(plan.slot_to_token[plan.token_to_slot], torch.arange(sum(lengths)))


def test_many_equal_sequences_are_one_rectangle() -> None:
    plan = attention_plan(torch.arange(0, 26 * 513, 26, dtype=torch.int32))
    assert plan.shapes == (Rectangle(rows=512, longest=26),)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flash_attention_equals_each_sequence_alone() -> None:
    lengths = [5, 17, 130, 64, 1]
    generator = torch.Generator("cuda").manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    tensors = [torch.randn(sum(lengths), heads, 64, **kind, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(sum(lengths), 4, 64, device="cuda", generator=generator)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    out = packed_attention_cuda(*tensors, cu_seqlens, max(lengths), scale=SCALE)
    expected = torch.cat([plain(*(x.float() for x in parts)) for parts in zip(*(x.split(lengths) for x in tensors), strict=True)])
    assert (out.float() - expected).abs().max() < 0.02  # bfloat16
    grads, expected_grads = (torch.autograd.grad((x * weight).sum(), tensors, retain_graph=True) for x in (out.float(), expected))
    for got, want in zip(grads, expected_grads, strict=True):
        assert (got - want).abs().max() / want.abs().max() < 0.02
