"""Compiled kernels and torch's own against the formulas on the CPU in float64."""

from __future__ import annotations

import pytest
import torch

from vime.backends.megatron_utils.adam import FusedLayoutAdam
from vime.backends.megatron_utils.attention import packed_attention_cpu, packed_attention_cuda
from vime.backends.megatron_utils.fused import rotate, swiglu
from vime.backends.megatron_utils.linear import _Accumulated
from vime.backends.megatron_utils.log_probs import token_log_probs
from vime.backends.megatron_utils.packed_params import attention_plan
from vime.backends.megatron_utils.triton_kernels import rms_norm


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double().cpu() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(("rows", "columns", "valid"), [(7, 1000, 1000), (300, 151936, 151800)])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_log_probs_entropies_and_their_gradient(rows: int, columns: int, valid: int, entropy_grad: bool) -> None:
    """The kernel's logits are bfloat16 as the reference's are; what differs is float32 sums (1e-6) and the gradient's rounding (2^-9)."""
    torch.manual_seed(rows)
    logits = (3 * torch.randn(rows, columns)).to(torch.bfloat16)
    labels = torch.randint(0, valid, (rows,))
    found, wanted = logits.cuda().requires_grad_(), logits.double().requires_grad_()
    weights = torch.randn(2, rows)
    outs = []
    for x, device in ((found, "cuda"), (wanted, "cpu")):
        p, h = token_log_probs(x, labels.to(device), temperature=0.7, vocab_size=valid, with_entropy=True, entropy_grad=entropy_grad)
        assert h is not None
        total = (p * weights[0].to(p)).sum() + ((h * weights[1].to(p)).sum() if entropy_grad else 0.0)
        total.backward()
        outs.append((p, h))
    assert relative(outs[0][0].detach(), outs[1][0].detach()) < 1e-5
    assert relative(outs[0][1].detach(), outs[1][1].detach()) < 1e-5
    assert found.grad is not None
    assert wanted.grad is not None
    assert found.grad.dtype == torch.bfloat16
    assert relative(found.grad, wanted.grad) < 4e-3
    assert float(found.grad[:, valid:].abs().sum()) == 0.0


def test_rotary_embedding() -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(50, 4, 64), torch.rand(50, 1, 32) * 6
    cos, sin = torch.cat([angles, angles], -1).cos(), angles.sin()
    ours = x.to(torch.bfloat16).cuda().requires_grad_()
    theirs = x.to(torch.bfloat16).double().requires_grad_()
    out, wanted = rotate(ours, cos.cuda(), sin.cuda()), rotate(theirs, cos.double(), sin.double())
    assert out.dtype == torch.bfloat16
    assert relative(out.detach(), wanted.detach()) < 4e-3
    back = torch.randn_like(x)
    out.backward(back.to(torch.bfloat16).cuda())
    wanted.backward(back.to(torch.bfloat16).double())
    assert ours.grad is not None
    assert theirs.grad is not None
    assert relative(ours.grad, theirs.grad) < 4e-3


@pytest.mark.parametrize("shape", [(700, 256), (33, 1, 5, 128), (50, 1, 2560)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    """Of a slice of a wider tensor, too, as a layer's keys are."""
    torch.manual_seed(0)
    wide = torch.randn(*shape[:-1], shape[-1] + 64).to(torch.bfloat16)
    x, weight, back = wide[..., 32:-32], torch.rand(shape[-1]).add(0.5).to(torch.bfloat16), torch.randn(shape).to(torch.bfloat16)
    ours = [wide.cuda()[..., 32:-32].requires_grad_(), weight.cuda().requires_grad_()]
    theirs = [t.double().requires_grad_() for t in (x, weight)]
    out = rms_norm(ours[0], ours[1], 1e-6)
    wanted = torch.nn.functional.rms_norm(theirs[0], shape[-1:], theirs[1], 1e-6)
    out.backward(back.cuda())
    wanted.backward(back.double())
    assert relative(out.detach(), wanted.detach()) < 4e-3
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert relative(mine.grad, its.grad) < 4e-3


def test_swiglu() -> None:
    torch.manual_seed(0)
    x, back = torch.randn(77, 1, 600).to(torch.bfloat16), torch.randn(77, 1, 300).to(torch.bfloat16)
    ours, theirs = x.cuda().requires_grad_(), x.double().requires_grad_()
    out, wanted = swiglu(ours), swiglu(theirs)
    out.backward(back.cuda())
    wanted.backward(back.double())
    assert relative(out.detach(), wanted.detach()) < 4e-3
    assert ours.grad is not None
    assert theirs.grad is not None
    assert relative(ours.grad, theirs.grad) < 4e-3


def test_a_linear_layer_adds_its_weights_gradient_up_in_float32() -> None:
    """Two backward passes into one buffer; nothing is rounded to bfloat16 on the way."""
    torch.manual_seed(0)
    x, back = torch.randn(2, 64, 1, 96).to(torch.bfloat16), torch.randn(2, 64, 1, 40).to(torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(40, 96).to(torch.bfloat16).cuda())
    weight.main_grad = torch.zeros(40, 96, device="cuda")  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    grads = []
    for i in range(2):
        given = x[i].cuda().requires_grad_()
        _Accumulated.apply(given, weight).backward(back[i].cuda())
        grads.append(given.grad)
    wanted = sum(back[i].flatten(0, 1).double().t() @ x[i].flatten(0, 1).double() for i in range(2))
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert relative(weight.main_grad, wanted) < 1e-5  # type: ignore[attr-defined, arg-type]
    assert relative(grads[0], back[0].double() @ weight.detach().double().cpu()) < 4e-3  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [[1, 2, 130], [300, 64, 17, 1, 511]])
def test_attention_of_packed_sequences(lengths: list[int]) -> None:
    """bfloat16 in and out, softmax in float32: 1 % of the output's norm."""
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, 64).to(torch.bfloat16) for heads in (8, 2, 2))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ours = [x.cuda().requires_grad_() for x in (q, k, v)]
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    out = packed_attention_cuda(*ours, starts.cuda(), max(lengths), scale=0.125)
    wanted = packed_attention_cpu(*theirs, attention_plan(starts), scale=0.125)
    back = torch.randn(total, 8, 64).to(torch.bfloat16)
    out.backward(back.cuda())
    wanted.backward(back.double())
    assert relative(out.detach(), wanted.detach()) < 1e-2
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert relative(mine.grad, its.grad) < 1e-2


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(decay: float, decoupled: bool) -> None:
    torch.manual_seed(0)
    start = [torch.randn(1000), torch.randn(7)]
    both = [[x.to(device, dtype).requires_grad_() for x in start] for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64))]
    made = [FusedLayoutAdam(params, lr=1e-2, weight_decay=decay, adam_w_mode=decoupled) for params in both]
    for step in range(3):
        grads = [torch.randn(x.shape, generator=torch.Generator().manual_seed(step)) for x in start]
        for params, optimizer in zip(both, made, strict=True):
            for p, g in zip(params, grads, strict=True):
                p.grad = g.to(p)
            optimizer.step()
    for mine, its in zip(*both, strict=True):
        assert relative(mine.detach(), its.detach()) < 1e-6
    assert set(made[0].state[both[0][0]]) == set(made[1].state[both[1][0]])
