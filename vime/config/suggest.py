"""What an unknown flag was meant to be: known under another prefix, renamed, set by the framework, or one edit away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vime.config.names import NameIndex
from vime.config.options import Option
from vime.config.owners import OWNERS
from vime.config.parse import flag_table
from vime.config.renamed import GONE, RENAMED, explained

__all__ = ["DRIVER_FLAGS", "Names", "with_prefix"]

DRIVER_FLAGS = ("--config", "--print-config", "--dry-run", "--help")  # of `vime train` itself

_PREFIXES = ("--no-vllm-", "--vllm-router-", "--vllm-", "--no-router-", "--router-", "--sglang-router-", "--sglang-", "--megatron-", "--")
_MEANT = {  # what is said -> names of other programs, or that could mean several things, without their prefix
    "the trainer's tensor parallelism is --tensor-model-parallel-size (Megatron), an engine's is --rollout-num-gpus-per-engine": (
        "tensor-parallel-size tp-size tp tensor-parallel tensor-model-parallel"
    ),
    "the trainer's seed is --seed, that of sampling and shuffling --rollout-seed": "random-seed data-seed",
    "the longest prompt plus response is --rollout-max-context-len": "max-model-len max-model-length max-seq-len max-seq-length",
    "a response's length is bounded by --rollout-max-response-len": "max-new-tokens max-completion-length max-response-length",
    "a response's is --rollout-max-response-len, that of a packed micro-batch --max-tokens-per-gpu": "max-tokens max-token-len",
    "prompts in a step are --rollout-batch-size, rollouts in an optimizer step --global-batch-size": "batch-size train-batch-size",
    "it follows from --global-batch-size and the size of a micro-batch": "gradient-accumulation-steps grad-accum-steps grad-accum",
    "it is --rollout-temperature, in evaluation --eval-temperature": "temperature",
    "it is --lr": "learning-rate actor-lr actor-learning-rate",
    "it is --n-samples-per-prompt": "n-samples num-samples num-generations group-size rollout-n",
    "it is --num-rollout, or --num-epoch over the prompts": "steps num-steps max-steps total-steps epochs num-epochs num-train-epochs",
    "it is --hf-checkpoint": "hf-model model-path model-name-or-path pretrain pretrained actor-model",
    "it is --ref-load": "ref-model ref-path reference-model",
    "it is --save": "save-dir save-path output-dir checkpoint-dir ckpt-path",
    "a run goes on from its own --save folder by itself; --load starts from another run's": "resume resume-from resume-from-checkpoint",
    "it is --prompt-data": "dataset data-file train-file train-data prompt-file",
    "it is --eps-clip, and --eps-clip-high above": "clip-eps clip-range cliprange clip-ratio epsilon",
    "it is --rm-type for a built-in reward, --custom-rm-path for your own": "reward-fn reward-function reward-func reward-model rm",
    "trainers are --actor-num-gpus-per-node, the engines' GPUs --rollout-num-gpus": "num-gpus nproc nproc-per-node gpus world-size",
}
_EXPLAINED = {name: text for text, names in _MEANT.items() for name in names.split()}


@dataclass(slots=True)
class Names:
    """Every name that a flag can have here."""

    owners: Mapping[str, Sequence[Option]]  # owner -> its options
    _said: dict[str, str] = field(init=False)  # flag as typed here -> whose it is
    _refused: dict[str, str] = field(init=False)  # option of an owner, as typed here -> why it cannot be given
    _index: NameIndex = field(init=False)

    def __post_init__(self) -> None:
        self._said = dict.fromkeys(DRIVER_FLAGS, "vime")
        for flag, (section, spec) in flag_table().items():
            self._said[flag] = f"vime, {section}" + (", not available yet" if spec.not_yet else "")
        self._refused = {}
        for owner, options in self.owners.items():
            for option in options:
                for flag in option.flags:
                    name = with_prefix(flag, owner)
                    if option.note:
                        self._refused.setdefault(name, option.note)
                    else:
                        self._said.setdefault(name, OWNERS[owner].title)
        self._index = NameIndex(self._said)

    def knows(self, flag: str) -> bool:
        """Whether anybody has a flag of that name."""
        name = flag.partition(".")[0]
        return any(known in names for names in (self._said, self._refused) for known in (name, name.replace("_", "-")))

    def explain(self, flag: str) -> str:
        """One problem: that `flag` is unknown, and what to write instead."""
        opening = f"unknown flag {flag}"
        tidy = "--" + flag.lstrip("-").replace("_", "-").lower()
        if tidy in DRIVER_FLAGS:
            return f"{opening}: {tidy} is for the command line of `vime train` alone."
        if tidy in self._said:
            return f"{opening}: names have dashes and small letters here: {self._named(tidy)}."
        if tidy in RENAMED or tidy in GONE:
            return f"{opening}: {(explained(tidy) or '').replace(tidy, 'it', 1)}"
        bodies = list(dict.fromkeys(tidy.removeprefix(prefix) for prefix in _PREFIXES if tidy.startswith(prefix)))
        for body in bodies:
            if body in _EXPLAINED:
                return f"{opening}: {_EXPLAINED[body]}."
        if elsewhere := self._elsewhere(tidy, bodies):
            return f"{opening}: {elsewhere}"
        if family := explained(tidy):
            return f"{opening}: {family}"
        if self._index.one_edit(tidy) or not (refused := NameIndex(self._refused).one_edit(tidy)):
            near = self._index.nearest(tidy)
        else:
            return f"{opening}. Nearest: {refused[0]}, which {self._refused[refused[0]]}"
        if not near:
            return f"{opening}: nobody has one like it. `vime train --help` lists vime's flags, --help=vllm and so on the others'."
        return f"{opening}. Nearest: {', '.join(self._named(name) for name in near)}."

    def _elsewhere(self, tidy: str, bodies: Sequence[str]) -> str:
        """The same name behind another prefix; "" when there is none."""
        spelled = [
            prefix + body for body in bodies for prefix in ("--", "--rollout-", "--vllm-", "--no-vllm-", "--router-", "--vllm-router-")
        ]
        candidates = [name for name in dict.fromkeys(spelled) if name != tidy]
        right = [name for name in candidates if name in self._said]
        if right:
            return f"here it is {', or '.join(self._named(name) for name in right)}."
        return next((f"that would be {name}, which {self._refused[name]}" for name in (tidy, *candidates) if name in self._refused), "")

    def _named(self, flag: str) -> str:
        return f"{flag} ({self._said[flag]})"


def with_prefix(flag: str, owner: str) -> str:
    """An owner's option as it is typed here: --max-num-seqs of vLLM is --vllm-max-num-seqs."""
    prefix = OWNERS[owner].prefix
    if flag.startswith("--no-") and owner != "megatron":
        return "--no-" + prefix.removeprefix("--") + flag.removeprefix("--no-")
    return prefix + flag.removeprefix("--")
