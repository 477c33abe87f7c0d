"""Cases of the layout tests that train adapters; their factors A and B are random, so that both have gradients at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vime.backends.megatron_utils.convert.registry import model_ops, model_shape
from vime.backends.megatron_utils.lora_ops import AdapterSettings, adapter_ops, target_names
from vime.backends.megatron_utils.lora_peft import write_peft

LORA_LAYOUTS = {  # processes -> model -> layouts
    2: {
        "deep": ["tp2", "sp2", "pp2 chunk1", "cp2", "dp2"],
        "qwen3_moe": ["sp2", "ep2", "sp2 ep2 etp1"],
        "deepseek_v3": ["sp2"],
        "qwen3_next": ["sp2"],
    },
    4: {"deep": ["sp2 pp2 chunk1"], "qwen3_moe": ["sp2 pp2 ep2 etp1"]},
}
ADAPTED = ("deep", "qwen3_moe", "deepseek_v3", "qwen3_next")
RANK = 4
LORA = {"lora_rank": RANK, "lora_alpha": 6.0}


def write_adapter(model: str, folder: Path, targets: tuple[str, ...] = ()) -> str:
    """A PEFT folder with random factors for the linear layers of `model`; its path."""
    shape = model_shape(model)
    ops = model_ops(shape, shape.vocab_size)
    found = adapter_ops(ops, rank=RANK, targets=targets)
    generator = torch.Generator().manual_seed(1)
    pairs = [(name, size) for one in found for op in (one.a, one.b) for name, size in zip(op.hf, op.hf_shapes, strict=True)]
    size_of = 0.05 if Path(model).name == "qwen3_next" else 0.3
    tensors = {name: size_of * torch.randn(size, generator=generator) for name, size in pairs}
    settings = AdapterSettings(rank=RANK, alpha=6.0, dropout=0.0, targets=tuple(targets or target_names(ops)))
    write_peft(folder, settings, found, tensors, base=model)
    return str(folder)


def lora_cases(models: dict[str, str], folder: Path, tokens_of: Callable[[str], list[str]]) -> dict[int, list[dict[str, Any]]]:
    """The cases by number of processes."""
    adapters = {name: write_adapter(models[name], folder / f"adapter_{name}") for name in ADAPTED}
    few = write_adapter(models["deep"], folder / "adapter_few", ("q_proj", "v_proj", "down_proj"))

    def case(name: str, model: str, tokens: list[str], **more: Any) -> dict[str, Any]:
        lora = {**LORA, "lora_load": adapters[model], **more.pop("lora", {})}
        return {"name": f"lora {name}", "model": models[model], "tokens": tokens, "gradients": True, "lora": lora, **more}

    cases = {
        size: [case(f"{model} {layout}", model, tokens_of(layout)) for model, layouts in of_models.items() for layout in layouts]
        for size, of_models in LORA_LAYOUTS.items()
    }
    cases[1] = [case(f"{model} one", model, []) for model in adapters]
    saved, moe = {"count": 2, "gradients": False}, str(folder / "lora_save_moe")
    one = str(folder / "lora_save")
    cases[4] += [
        case("two steps moe", "qwen3_moe", tokens_of("sp2 pp2 ep2 etp1"), **saved, save=moe),
        case("two steps", "deep", tokens_of("sp2 pp2 chunk1"), **saved, save=one, save_hf=str(folder / "lora_hf")),
    ]
    more = {**saved, "first": 2}
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}
    cases[2] += [
        case("two more cp2", "deep", tokens_of("cp2"), **more, load=one),
        case("two more ep2", "qwen3_moe", tokens_of("ep2"), **more, load=moe),
        case("few sp2", "deep", tokens_of("sp2"), lora={"lora_load": few}),
        case("refused tp2", "deep", tokens_of("tp2"), gradients=False, refused_save=str(folder / "lora_refused")),
        case("bf16 tp2", "deep", [*tokens_of("tp2"), "--bf16"], gradients=False),
    ]
    anew = {"lora": {"lora_load": None}, "gradients": False}
    cases[1] += [
        case("four steps", "deep", [], count=4, gradients=False),
        case("four steps moe", "qwen3_moe", [], count=4, gradients=False),
        case("few one", "deep", [], lora={"lora_load": few}),
        case("bf16", "deep", ["--bf16"], gradients=False),
        case("start", "deep", [], **anew, count=0),
        case("merged", "deep", [], lora={"lora_load": None, "lora_rank": None, "lora_alpha": None}, count=0, gradients=False),
        case("base kl", "deep", [], algorithm=kl, gradients=False),
        case("model kl", "deep", [], algorithm=kl, ref=models["deep_copy"], gradients=False),
        case("dropout", "deep", [], lora={"lora_dropout": 0.5}),
        case("dropout again", "deep", [], lora={"lora_dropout": 0.5}),
        case("rank 5", "deep", [], lora={"lora_load": None, "lora_rank": 5}, load=one),
        case("none", "deep", [], lora=dict.fromkeys(["lora_load", "lora_rank", "lora_alpha"]), load=one),
    ]
    return cases
