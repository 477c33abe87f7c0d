"""What becomes of Megatron's flags: its own parser says what they are, and the trainer's tables what they do here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vime.config.options import parse_all
from vime.migrate.values import Value

__all__ = ["MegatronFlags"]

_SHAPE = "the model's shape comes from config.json in --hf-checkpoint."
_SHAPE_OF_EXPERTS = frozenset(  # mixtures of experts and latent attention; the trainer's table has the rest
    "num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk "
    "moe_router_score_function moe_router_enable_expert_bias moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_scaling_factor multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
    "rotary_scaling_factor mscale mscale_all_dim attention_output_gate spec".split()
)


class MegatronFlags:
    """Megatron's parser. Making one imports Megatron, which takes seconds; ImportError when it is not installed."""

    def __init__(self) -> None:
        from vime.backends.megatron_utils.arguments import build_parser

        self._parser = build_parser()
        self._actions = {option: action for action in self._parser._actions for option in action.option_strings}

    def knows(self, flag: str) -> bool:
        """Whether Megatron has this flag."""
        return flag in self._actions

    def judge(self, flag: str, values: Sequence[Value]) -> tuple[str, str]:
        """(kind of note, why) for a flag that Megatron has; kind "kept" when the trainer honours it."""
        from vime.backends.megatron_utils.arguments import honour_problems
        from vime.backends.megatron_utils.flags import SHAPE

        dest = self._actions[flag].dest
        if dest in SHAPE or dest in _SHAPE_OF_EXPERTS:
            return "dropped", _SHAPE
        explicit, problems = self.values(flag, values)
        if problems:
            return "could not", " ".join(problems)
        problems = honour_problems(self._parser, explicit)
        if not problems:
            return "kept", ""
        kind = "not yet" if any("not available" in problem for problem in problems) else "dropped"
        problems = [re.sub(rf"^{flag}(?: \S+)?(?::| is)? not available(?: yet)?:? ", "", problem) for problem in problems]
        return kind, " ".join(re.sub(rf"^{flag} (is|has) ", r"it \1 ", problem) for problem in problems)

    def values(self, flag: str, values: Sequence[Value]) -> tuple[dict[str, Any], list[str]]:
        """(what the flag sets, what the parser objects to); a value that only the shell knows counts as none."""
        texts = [value.usual for value in values]
        if None in texts:
            return {self._actions[flag].dest: None}, []
        return parse_all(self._parser, [flag, *(text for text in texts if text is not None)])
