"""Which model is trained, which others stand beside it, and how its weights travel and are kept."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.fields import opt

__all__ = ["ENGINE_LORA_RANKS", "POLICY_ADAPTER", "CheckpointConfig", "LoraConfig", "ModelConfig", "WeightUpdateConfig"]

POLICY_ADAPTER = "policy"  # with --lora-sync adapter: the adapter's name, which requests for the policy give as their model
ENGINE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank takes
SYNC = "each sync sends all weights through shared memory on one host. Leave it out."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained, and which frozen ones stand beside it."""

    hf_checkpoint: str | None = opt(None, "Hugging Face model folder: configuration, tokenizer and start weights.", type=str, path="folder")
    ref_load: str | None = opt(
        None,
        "Hugging Face folder of the frozen reference model (needed by KL terms); with --lora-rank the default is the model itself.",
        type=str,
        path="folder",
    )
    ref_update_interval: int | None = opt(
        None,
        "Copy the policy to the reference every N rollout steps.",
        type=int,
        ge=1,
    )
    keep_old_actor: bool = opt(
        False,
        "Keep the weights that generated, so that the old log-probs are theirs when data is older than the policy.",
    )
    opd_teacher_url: str | None = opt(None, "vLLM server of the teacher of on-policy distillation: http://host:port.", type=str)
    opd_teacher_load: str | None = opt(
        None,
        "Hugging Face folder of the teacher of on-policy distillation.",
        type=str,
        path="folder",
    )
    custom_model_provider_path: str | None = opt(
        None,
        "Builds the Megatron model instead of ours: fn(pre_process, post_process, vp_stage=None) -> model.",
        type=str,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Training adapters instead of all weights."""

    lora_rank: int | None = opt(None, "Rank of the adapters; given, only adapters are trained.", type=int, ge=1)
    lora_alpha: float | None = opt(
        None, "Scale of the adapters, times 1 / rank; default: twice the rank, or what --lora-load says.", type=float, gt=0
    )
    lora_dropout: float = opt(0.0, "Share of an adapter's inputs dropped in training.", ge=0, le=0.95)
    lora_target_modules: list[str] = opt(
        [], "Hugging Face names of the layers with adapters; default: all linear layers, or those of --lora-load.", many=True, type=str
    )
    lora_load: str | None = opt(None, "PEFT folder that the adapters start from.", type=str, path="folder")
    lora_sync: str = opt(
        "merged",
        "How engines get them: merged into the weights, or as adapters.",
        choices=("merged", "adapter"),
    )

    @property
    def adapters_are_synced(self) -> bool:
        """Engines hold the model without adapters, and get those alone."""
        return self.lora_rank is not None and self.lora_sync == "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateConfig:
    """How the trainer's weights reach the engines, and the proof that they did."""

    update_weight_buffer_size: int = opt(512 * 1024**2, "Bytes of one flat bucket.", ge=1024)
    weight_proof_tolerance: float | None = opt(
        None, "Largest |log-prob of trainer - engine| on the probe prompt; default 1e-4 in float32, 0.1 in bfloat16.", type=float, gt=0
    )
    update_weight_deadline: float = opt(300.0, "Seconds one weight sync may take before the run ends with an error.", gt=0)
    update_weight_mode: str = opt("full", "All weights, or only what changed.", choices=("full", "delta"), not_yet=SYNC)
    update_weight_transport: str | None = opt(
        None,
        "Shared memory, CUDA IPC, NCCL or a shared folder; default: by where trainer and engines run.",
        type=str,
        choices=("shm", "ipc", "nccl", "disk"),
        choices_not_yet=("ipc", "nccl", "disk"),
    )
    update_weight_disk_dir: str | None = opt(None, "Shared folder of --update-weight-transport disk.", type=str, path="new", not_yet=SYNC)
    update_weight_disk_keep_files: bool = opt(False, "Leave the versions in that folder.", not_yet=SYNC)
    update_weight_local_checkpoint_dir: str | None = opt(
        None, "Folder on each engine's host to which versions are copied first.", type=str, path="new", not_yet=SYNC
    )
    update_weight_delta_encoding: str = opt(
        "overwrite",
        "How a change is written; xor may be applied once only. slime's default is xor.",
        choices=("xor", "overwrite"),
        not_yet=SYNC,
    )
    custom_update_weight_post_write_path: str | None = opt(
        None, "Called when a version is in the folder, before engines read it: fn(args, version_dir, engines).", type=str, not_yet=SYNC
    )
    update_weights_interval: int = opt(1, "Sync every N rollout steps, and before an evaluation or a commit.", ge=1)
    update_weight_in_flight: bool = opt(
        False, "Sync while requests are in flight: they pause, keep their tokens and go on with the new weights."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = opt(
        None, "Run folder: checkpoints, metrics, logs. A run whose folder holds a commit resumes from it.", type=str, path="new"
    )
    load: str | None = opt(None, "Folder of another run to start from; default: --save, when it holds a commit.", type=str, path="folder")
    ckpt_step: int | None = opt(
        None, "Of --load take the commit of this step (iter_0000041 is --ckpt-step 41); default: the newest.", type=int, ge=0
    )
    no_load_optim: bool = opt(False, "Of --load take the weights alone; Adam's moments begin at zero.")
    save_interval: int | None = opt(
        None, "Commit every N rollout steps; the last step is always committed when --save is given.", type=int, ge=1
    )
    async_save: bool = opt(
        False, "Write the trainer's state in the background, from a copy in host memory; it is a commit once all of it is on disk."
    )
    save_hf: str | None = opt(None, "Also write a Hugging Face folder at each commit; {rollout_id} is filled in.", type=str, path="new")
    keep_checkpoints: int = opt(2, "Commits kept; older ones are removed after a newer one is complete.", ge=1)
