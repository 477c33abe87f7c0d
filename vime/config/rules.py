"""Rules between flags: what needs what, what excludes what, what has no effect. One small function per subject.

Each yields a sentence per problem, naming the flags and the cure.
"""

from __future__ import annotations

import os
import re
import string
from collections import Counter
from collections.abc import Collection, Iterator

from vime.config.algorithm_rules import algorithm_rules
from vime.config.availability import not_available, set_flags
from vime.config.effects import find_unused
from vime.config.megatron_rules import megatron_rules
from vime.config.prompt_sources import split_slice, split_sources
from vime.config.run import RunConfig
from vime.config.sections import DATA_SOURCE, ENGINE_LORA_RANKS, ROLLOUT_FUNCTION, SFT_FUNCTION
from vime.config.sources import flags_in
from vime.errors import ConfigError

__all__ = ["check_rules"]

TENSOR = "tensor_model_parallel_size"


def check_rules(config: RunConfig, *, planned: bool = False, unsure: Collection[str] = ()) -> None:
    """Raise ConfigError with every rule that `config` breaks.

    With `planned` True a run may ask for what is not available yet: planning is arithmetic. `unsure` are flags whose value
    is not known (it was wrong, and `config` holds the default): what a rule says of them is left out.
    """
    said = [problem for rule in _RULES for problem in rule(config)]
    unused = list(find_unused(config, planned=planned, unsure=unsure))
    if not planned:
        said += not_available(config, but={name for names, _ in unused for name in names})
    problems = [problem for problem in said if set(flags_in(problem)).isdisjoint(unsure)]
    problems += [sentence for _, sentence in unused]
    if problems:
        raise ConfigError(*problems)


def _placement(config: RunConfig) -> Iterator[str]:
    for name, value in config.cluster.train_env_vars.items():
        if not isinstance(value, str) or not name or "=" in name:
            yield f'--train-env-vars takes names and texts like \'{{"NCCL_DEBUG": "INFO"}}\', got {name!r}: {value!r}.'
    total = config.cluster.rollout_num_gpus
    if total == 0 and not config.debug.debug_train_only:
        yield "--rollout-num-gpus 0 starts no engine: use 1 or more, or --debug-train-only."
    per_engine = config.cluster.rollout_num_gpus_per_engine
    if total is not None and total % per_engine:
        yield f"--rollout-num-gpus {total} is no multiple of --rollout-num-gpus-per-engine {per_engine}: the rest would stand idle."
    world, model = config.actor_world_size, 1
    for name in (TENSOR, "pipeline_model_parallel_size", "context_parallel_size"):
        model *= config.megatron_size(name)
    if world % model:
        yield (
            f"--actor-num-gpus-per-node {world} cannot be divided by the model's parallel size {model} "
            "(tensor x pipeline x context): use a multiple of it."
        )
    experts = config.megatron_size("expert_model_parallel_size") * config.megatron_size("pipeline_model_parallel_size")
    experts *= config.megatron_size("expert_tensor_parallel_size" if config.megatron.get("expert_tensor_parallel_size") else TENSOR)
    if experts > 1 and world % experts:
        yield (
            f"--actor-num-gpus-per-node {world} cannot be divided by the experts' parallel size {experts} "
            "(expert tensor x expert x pipeline): use a multiple of it."
        )
    if config.training.only_train_params_name_list and config.training.freeze_params_name_list:
        yield "--only-train-params-name-list and --freeze-params-name-list both say what is trained: give one of them."
    if config.megatron_size("context_parallel_size") > 1 and config.algorithm.loss_type == "custom_loss":
        yield "--loss-type custom_loss needs the logits of whole sequences: leave --context-parallel-size out."


def _adapters(config: RunConfig) -> Iterator[str]:
    if config.lora.lora_rank is None:
        return
    if config.training.only_train_params_name_list or config.training.freeze_params_name_list:
        yield (
            "--lora-rank freezes the whole model: leave --only-train-params-name-list and --freeze-params-name-list out, "
            "and say with --lora-target-modules which layers get adapters."
        )
    if config.lora.adapters_are_synced and config.lora.lora_rank > ENGINE_LORA_RANKS[-1]:
        yield f"--lora-rank {config.lora.lora_rank} with --lora-sync adapter: engines take adapters up to rank {ENGINE_LORA_RANKS[-1]}."
    if config.lora.adapters_are_synced and config.weight_update.update_weight_in_flight:
        yield "--update-weight-in-flight with --lora-sync adapter is not available: a request keeps its adapter. Use --lora-sync merged."
    if config.model.ref_update_interval is not None:
        yield "--ref-update-interval with --lora-rank is not available yet: the reference is the model without its adapters. Leave it out."


def _engines(config: RunConfig) -> Iterator[str]:
    """Engines that others started, and engines by file: each says itself how many there are."""
    addresses, file = config.engine.rollout_external_engine_addrs, config.engine.vllm_config
    sized = "rollout_num_gpus" in config.given or config.cluster.rollout_num_gpus is not None
    for address in dict.fromkeys(addresses):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            yield f"--rollout-external-engine-addrs takes host:port, got '{address}'."
        elif host not in ("127.0.0.1", "localhost"):
            yield (
                f"--rollout-external-engine-addrs {address}: weights travel through this machine's shared memory. Start the engine here "
                f"(vime engine --port {port} ...) and give 127.0.0.1:{port}."
            )
    if len(set(addresses)) < len(addresses):
        yield "--rollout-external-engine-addrs names an engine twice."
    if addresses and sized:
        yield "--rollout-num-gpus starts engines, --rollout-external-engine-addrs names some that run already: leave one out."
    if addresses and config.vllm_tokens:
        yield (
            "--vllm-... configures engines that the run starts: give it to `vime engine`, which starts those of "
            "--rollout-external-engine-addrs."
        )
    if addresses and file is not None:
        yield "--vllm-config starts engines, --rollout-external-engine-addrs names some that run already: leave one out."
    faults, every = config.fault_tolerance.use_fault_tolerance, config.weight_update.update_weights_interval
    if faults and every > 1 and config.num_engines == 1:
        yield (
            f"--use-fault-tolerance with one engine and --update-weights-interval {every}: between two syncs the trainer has gone on and "
            "cannot send a replacement the weights again, so nothing would serve. Start two engines, or leave the interval out."
        )
    policies = re.findall(r"--policy[ =](\S+)", " ".join(config.router_tokens))
    if policies[-1:] == ["power_of_two"]:
        for model in config.models:
            if model.num_engines < 2:
                yield (
                    f"--router-policy power_of_two chooses between two engines, and '{model.name}' has {model.num_engines}: start more, "
                    "or take another policy."
                )
    if file is not None and sized:
        yield "--rollout-num-gpus and --vllm-config both say how many engines there are: leave the first out."


def _batches(config: RunConfig) -> Iterator[str]:
    data = config.data
    if (data.num_rollout is None) == (data.num_epoch is None):
        yield "Give one of --num-rollout (steps) and --num-epoch (passes over the prompts)."
    rollouts = (data.rollout_batch_size or 0) * data.n_samples_per_prompt
    if data.global_batch_size is not None and data.num_steps_per_rollout is not None:
        yield "Give one of --global-batch-size and --num-steps-per-rollout: each follows from the other."
    if data.num_steps_per_rollout is not None and rollouts % data.num_steps_per_rollout:
        yield f"--num-steps-per-rollout {data.num_steps_per_rollout} does not divide the {rollouts} rollouts of a step."
    if data.global_batch_size is not None and rollouts % data.global_batch_size:
        yield f"--global-batch-size {data.global_batch_size} does not divide the {rollouts} rollouts of a step (prompts x samples)."
    if data.use_dynamic_batch_size != (data.max_tokens_per_gpu is not None):
        yield "--use-dynamic-batch-size and --max-tokens-per-gpu go together: the budget has no effect alone, and packing needs one."
    if config.training.log_probs_chunk_size == 0:
        yield "--log-probs-chunk-size 0 is no number of rows: use 1 or more, or -1 to let the memory of a piece decide."
    over = config.rollout.over_sampling_batch_size
    if over is not None and data.rollout_batch_size is not None and over < data.rollout_batch_size:
        yield f"--over-sampling-batch-size {over} must be at least --rollout-batch-size {data.rollout_batch_size}."


def _rollout(config: RunConfig) -> Iterator[str]:
    rollout, reward, debug = config.rollout, config.reward, config.debug
    ours = rollout.rollout_function_path == ROLLOUT_FUNCTION
    if config.runs_ahead and config.cluster.colocate:
        yield (
            f"--max-weight-staleness {rollout.max_weight_staleness} generates while the trainer works, and --colocate lets them take turns "
            "on the same devices: leave one of them out."
        )
    interval = config.weight_update.update_weights_interval
    if interval > 1 and config.cluster.colocate and config.offloads_rollout and not debug.debug_rollout_only:
        yield (
            f"--update-weights-interval {interval} lets engines go on with the weights that they have, and with --colocate they forget "
            "them while the trainer works: leave it out, or give --no-offload-rollout."
        )
    if debug.debug_train_only and debug.debug_rollout_only:
        yield "--debug-train-only and --debug-rollout-only exclude each other."
    if debug.debug_train_only and ours:
        yield (
            "--debug-train-only starts no engines, but --rollout-function-path is the default that needs them: "
            f"give {SFT_FUNCTION}, or your own."
        )
    if debug.debug_train_only and (config.vllm_tokens or config.router_tokens):
        yield "--vllm-... and --router-... have no effect with --debug-train-only: there are no engines."
    if reward.rm_type is not None and reward.custom_rm_path is not None:
        yield "--rm-type and --custom-rm-path both give the reward: leave one out."
    if reward.group_rm and reward.custom_rm_path is None:
        yield "--group-rm needs --custom-rm-path: built-in rewards score one sample at a time."
    if rollout.rollout_top_p < 1 and rollout.rollout_top_k <= 0 and ours and not debug.debug_rollout_only:
        yield (
            f"--rollout-top-p {rollout.rollout_top_p:g} needs --rollout-top-k: the trainer's probabilities are over the tokens that the "
            "engine chose from, and top-k bounds how many it reports. Add --rollout-top-k 100, say, or leave --rollout-top-p out."
        )
    context = rollout.rollout_max_context_len
    if context is not None and rollout.rollout_max_prompt_len is not None and rollout.rollout_max_prompt_len >= context:
        length = rollout.rollout_max_prompt_len
        yield f"--rollout-max-prompt-len {length} leaves no room for a response in --rollout-max-context-len {context}."
    if (config.router.vllm_router_ip is None) != (config.router.vllm_router_port is None):
        yield "--vllm-router-ip and --vllm-router-port go together."
    if config.router.vllm_router_ip is not None and config.router_tokens:
        yield "--router-... configures the router that the run starts, but --vllm-router-ip names one that runs already: leave one out."


def _determinism(config: RunConfig) -> Iterator[str]:
    """Engine flags that undo what --vllm-enable-deterministic-inference sets."""
    if not config.engine.vllm_enable_deterministic_inference:
        return
    typed = {re.split(r"[=.]", token.replace("_", "-"), maxsplit=1)[0] for token in config.vllm_tokens if token.startswith("--")}
    undone = {"--enable-prefix-caching": "it needs the prefix cache off, since a resumed run finds it empty"}
    if config.cluster.device == "cpu":
        undone["--max-num-seqs"] = "it runs one sequence at a time on the CPU"
    for flag in undone.keys() & typed:
        yield f"--vllm-{flag[2:]} contradicts --vllm-enable-deterministic-inference: {undone[flag]}. Leave one of them out."


def _evaluation(config: RunConfig) -> Iterator[str]:
    words = config.eval.eval_prompt_data
    if len(words) % 2:
        yield f"--eval-prompt-data takes pairs 'name path', got {len(words)} values: {' '.join(words)}"
    twice = sorted(name for name, count in Counter(words[::2]).items() if count > 1)
    if twice:
        yield f"--eval-prompt-data gives the name {' and '.join(twice)} to several files: metrics are told apart by it."
    if config.data.num_rollout == 0 and not words and config.eval.eval_config is None:
        yield "--num-rollout 0 evaluates only, and needs --eval-prompt-data name path."


def _files(config: RunConfig) -> Iterator[str]:
    save = config.checkpoint
    debug = config.debug
    for flag, template in (
        ("--save-hf", save.save_hf),
        ("--save-debug-rollout-data", debug.save_debug_rollout_data),
        ("--load-debug-rollout-data", debug.load_debug_rollout_data),
        ("--save-debug-train-data", debug.save_debug_train_data),
    ):
        if template is not None and (problem := _template_problem(template)):
            yield f"{flag} '{template}': {problem}"
    for flag, template in (
        ("--save-debug-rollout-data", debug.save_debug_rollout_data),
        ("--save-debug-train-data", debug.save_debug_train_data),
    ):
        if template is not None and "{rollout_id}" not in template:
            yield f"{flag} '{template}' names one file for all steps: put {{rollout_id}} into it."
    if debug.load_debug_rollout_data is not None and (debug.save_debug_rollout_data or debug.debug_rollout_only or debug.debug_train_only):
        yield (
            "--load-debug-rollout-data excludes --save-debug-rollout-data, --debug-rollout-only and --debug-train-only: it takes samples "
            "from files, and starts trainers only."
        )
    for spec in set_flags(config):
        path = getattr(config.args, spec.name) if spec.path == "folder" else None
        if path is not None and not os.path.isdir(path):
            yield f"{spec.flag} '{path}' is not a folder. Give a local folder (nothing is downloaded)."
    if config.model.hf_checkpoint is None:
        yield "--hf-checkpoint is required: the Hugging Face model folder to start from."
    if config.data.prompt_data is None and config.data.data_source_path == DATA_SOURCE and config.data.num_rollout != 0:
        yield "--prompt-data is required: the file with the prompts (.jsonl, .parquet, or a dataset's folder)."
    try:
        prompts = [source.path for source in split_sources(config.data.prompt_data)] if config.data.prompt_data else []
        prompts += [split_slice(spec)[0] for spec in config.eval.eval_prompt_data[1::2]]
    except ConfigError as error:
        yield from error.problems
        return
    for name in prompts:
        if not os.path.exists(name):
            yield f"prompt file '{name}' does not exist. Check the path; it is read relative to {os.getcwd()}."
        elif os.path.getsize(name) == 0:
            yield f"prompt file '{name}' is empty. It needs one JSON object per line."


def _capsules(config: RunConfig) -> Iterator[str]:
    steps, last = config.debug.capsule_steps, config.data.num_rollout
    if steps and config.capsule_folder is None:
        yield "--capsule-steps needs a place for the capsules: add --save, or --capsule-dir."
    if last is not None and (never := [step for step in steps if step >= last]):
        yield f"--capsule-steps {never[0]} is never reached with --num-rollout {last}: steps are counted from 0."
    if steps and config.model.keep_old_actor:
        yield "--capsule-steps and --keep-old-actor exclude each other: a capsule holds the weights that are trained, not those before."


def _template_problem(template: str) -> str | None:
    """What keeps `template` from being filled in with a rollout_id."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        if names <= {"rollout_id"}:
            template.format(rollout_id=0)
            return None
    except (ValueError, KeyError, IndexError) as error:
        return f"its braces cannot be read ({error}). Only {{rollout_id}} can be filled in; a brace of the name itself is doubled."
    return "only {rollout_id} can be filled in."


_RULES = (
    _placement,
    _adapters,
    _engines,
    _batches,
    algorithm_rules,
    megatron_rules,
    _rollout,
    _determinism,
    _evaluation,
    _files,
    _capsules,
)
