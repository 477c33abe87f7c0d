"""Flags of slime and Vime become ours, or are dropped or left to a person with a reason; nothing gets lost on the way."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.rules.source import ROOT
from vime.config.parse import flag_table
from vime.config.renamed import CHANGED, GONE, RENAMED
from vime.migrate.convert import convert
from vime.migrate.expand import Item
from vime.migrate.flags import translate
from vime.migrate.megatron import MegatronFlags
from vime.migrate.notes import KINDS, Note
from vime.migrate.script import read_script
from vime.migrate.tables import DIFFERS
from vime.migrate.values import literal
from vime.migrate.write import Command

BASE = "--hf-checkpoint /m --prompt-data /p.jsonl --rm-type math --num-rollout 2 --rollout-batch-size 8 --n-samples-per-prompt 2"
THEIRS = (ROOT / "tests" / "rules" / "slime_flags.txt").read_text(encoding="utf-8").split()
OWN = flag_table()


def migrate(
    folder: Path, flags: str, megatron: MegatronFlags | None, *, before: str = "", device: str = "cpu", program: str = "train.py"
) -> tuple[Command, list[Note]]:
    """What becomes of a script with BASE and these flags."""
    path = folder / "run.sh"
    path.write_text(f'{before}\nA=({BASE} {flags})\npython3 {program} "${{A[@]}}"\n', encoding="utf-8")
    return convert(read_script(str(path)), megatron=megatron, device=device)


def added(command: Command) -> list[str]:
    """Our flags beyond BASE and what is always added."""
    base = {*shlex.split(BASE), "--actor-num-gpus-per-node"}
    return [flag.shown for flag in command.flags if flag.name not in base]


def reasons(notes: list[Note], kind: str) -> dict[str, str]:
    """what -> why, of one kind."""
    return {note.what: note.why for note in notes if note.kind == kind}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--sglang-mem-fraction-static 0.7", ["--vllm-gpu-memory-utilization 0.7"]),
        ("--sglang-disable-radix-cache", ["--no-vllm-enable-prefix-caching"]),
        ("--sglang-attention-backend fa3", ["--vllm-attention-backend FLASH_ATTN"]),
        ("--sglang-context-length 4096", ["--rollout-max-context-len 4096"]),
        ("--sglang-server-concurrency 64", ["--vllm-server-concurrency 64"]),
        ("--sglang-router-ip 1.2.3.4 --sglang-router-port 3000", ["--vllm-router-ip 1.2.3.4", "--vllm-router-port 3000"]),
        ("--vllm-router-policy consistent_hash", ["--router-policy consistent_hash"]),
        ("--router-policy consistent_hashing", ["--router-policy consistent_hash"]),
        ("--vllm-max-model-len 4096", ["--rollout-max-context-len 4096"]),
        ("--vllm-seed 3", ["--rollout-seed 3"]),
        ("--sglang-ep-size 8", ["--vllm-enable-expert-parallel"]),
        (
            "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            ["--dynamic-sampling-filter-path vime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"],
        ),
        (
            "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout",
            ["--rollout-function-path vime.rollout.vllm_rollout.generate_rollout"],
        ),
    ],
)
def test_what_is_spelled_otherwise_is_changed_and_told(tmp_path: Path, megatron: MegatronFlags, theirs: str, ours: list[str]) -> None:
    command, notes = migrate(tmp_path, theirs, megatron)
    assert added(command) == ours
    assert [note.new for note in notes if note.kind == "changed"] == ours
    assert not reasons(notes, "could not")


@pytest.mark.parametrize(
    "flags",
    [
        "--label-key label --apply-chat-template --rollout-stop-token-ids 1 2 --rollout-temperature 0.8",
        "--vllm-max-num-seqs 64 --no-vllm-enable-prefix-caching --router-policy round_robin",
        "--lr 1e-5 --adam-beta2 0.98 --tensor-model-parallel-size 1 --attention-dropout 0.0 --optimizer adam",
        "--apply-chat-template-kwargs '{\"a\": false}' --custom-generate-function-path mine.module.fn",
        "--use-dynamic-batch-size --max-tokens-per-gpu 100 --global-batch-size 16",
        "--eval-interval 5 --eval-prompt-data a /a.jsonl b /b.jsonl --eval-temperature 0",
    ],
)
def test_what_is_the_same_here_is_kept_as_it_is(tmp_path: Path, megatron: MegatronFlags, flags: str) -> None:
    command, notes = migrate(tmp_path, flags, megatron)
    assert " ".join(added(command)) == flags.replace("'", "")
    assert not [note for note in notes if note.kind in ("changed", "dropped", "could not")]


@pytest.mark.parametrize(
    ("flags", "what", "why"),
    [
        ("--num-layers 4", "--num-layers 4", "config.json"),
        ("--moe-layer-freq [0,1]", "--moe-layer-freq [0,1]", "config.json"),
        ("--log-interval 1", "--log-interval 1", "no effect"),
        ("--save /s --load /s/", "--load /s/", "resumes from its last commit in --save"),
        ("--load /m", "--load /m", "weights in --hf-checkpoint"),
        ("--load /m_torch_dist", "--load /m_torch_dist", "Hugging Face folders"),
        ("--ref-load /m_torch_dist", "--ref-load /m_torch_dist", "without --use-kl-loss"),
        ("--kl-loss-coef 0.00", "--kl-loss-coef 0.00", "changes nothing"),
        ("--kl-coef 0", "--kl-coef 0", "0 changes nothing"),
        ("--sglang-schedule-policy lpm", "--sglang-schedule-policy lpm", "scheduler"),
        ("--balance-data", "--balance-data", GONE["--balance-data"]),
        ("--vllm-port 1", "--vllm-port 1", "vime sets it itself"),
        ("--sglang-ep-size 1", "--sglang-ep-size 1", "done without it"),
        ("--num-layers $(cat x)", "--num-layers $(cat x)", "config.json"),
        ("--rollout-max-response-len 1 --rollout-max-response-len 2", "--rollout-max-response-len 1", "the last one counts"),
        ("--num-epoch 1", "--num-epoch 1", "--num-rollout win"),
        ("--global-batch-size 8 --num-steps-per-rollout 2", "--num-steps-per-rollout 2", "--global-batch-size"),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 9 --micro-batch-size 1", "--micro-batch-size 1", "packed by tokens"),
        ("--max-tokens-per-gpu 9", "--max-tokens-per-gpu 9", "--use-dynamic-batch-size only"),
        ("--eval-interval 5", "--eval-interval 5", "nothing to evaluate"),
        ("--save-interval 5", "--save-interval 5", "nowhere to save"),
        ("--kl-loss-type k3", "--kl-loss-type k3", "no effect"),
        ("--sglang-context-length 9 --rollout-max-context-len 9", "--sglang-context-length 9", "given, too"),
    ],
)
def test_what_has_no_use_here_is_dropped_with_the_reason(tmp_path: Path, megatron: MegatronFlags, flags: str, what: str, why: str) -> None:
    command, notes = migrate(tmp_path, flags, megatron)
    assert why in reasons(notes, "dropped")[what]
    assert what.split()[0] not in [flag.name for flag in command.flags if flag.shown == what]
    assert not reasons(notes, "could not")


@pytest.mark.parametrize(
    ("flags", "what", "why"),
    [
        ("--load /other", "--load /other", "Hugging Face folder"),
        ("--use-kl-loss --kl-loss-coef 0.1 --ref-load /other_torch_dist", "--ref-load /other_torch_dist", "vime convert --to hf"),
        (
            "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3",
            "--sglang-speculative-algorithm EAGLE",
            '--vllm-speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\'',
        ),
        ("--sglang-moe-a2a-backend deepep", "--sglang-moe-a2a-backend deepep", "--vllm-all2all-backend"),
        ("--sglang-unheard-of 1", "--sglang-unheard-of 1", "vLLM's option of that meaning"),
        ("--rollout-bach-size 4", "--rollout-bach-size 4", "Check the spelling"),
        ("--custom-config-path c.yaml", "--custom-config-path c.yaml", GONE["--custom-config-path"]),
        ("--custom-rm-path slime.rollout.nowhere.fn", "--custom-rm-path slime.rollout.nowhere.fn", "no such function"),
        ("--rollout-seed $(date +%s)", "--rollout-seed $(date +%s)", "write the value itself"),
        ("--vllm-max-model-len 4 --rollout-max-context-len 8", "--vllm-max-model-len 4", "decide which counts"),
        ("--colocate $EXTRA", "${EXTRA}", "not known"),
        ("--global-batch-size 7", "these flags together", "--global-batch-size 7 does not divide"),
        ("--rollout-top-p 1.5", "these flags together", "--rollout-top-p must be <= 1"),
        ("--lr-decay-style no", "--lr-decay-style no", "invalid choice"),
    ],
)
def test_what_needs_a_person_is_left_to_one(tmp_path: Path, megatron: MegatronFlags, flags: str, what: str, why: str) -> None:
    _, notes = migrate(tmp_path, flags, megatron)
    assert any(note.what == what and why in note.why for note in notes if note.kind == "could not"), notes


def test_what_is_not_available_yet_stays_in_the_command_and_is_marked(tmp_path: Path, megatron: MegatronFlags) -> None:
    command, notes = migrate(tmp_path, "--colocate", megatron, device="cuda")
    pending = {flag.shown for flag in command.flags if flag.pending}
    assert pending == set(reasons(notes, "not yet"))
    assert pending <= {flag.shown for flag in command.flags}


def test_what_means_something_else_under_its_old_name_is_told(tmp_path: Path, megatron: MegatronFlags) -> None:
    _, notes = migrate(tmp_path, "--rollout-max-context-len 100 --save /s --save-interval 2", megatron)
    assert set(reasons(notes, "differs")) == {"--hf-checkpoint", "--rollout-max-context-len", "--save-interval"}
    assert set(DIFFERS) <= set(CHANGED)


@pytest.mark.parametrize(("flags", "expected"), [("", "8"), ("--actor-num-gpus-per-node 2", "2")])
def test_a_default_that_differs_is_written_out(tmp_path: Path, megatron: MegatronFlags, flags: str, expected: str) -> None:
    command, notes = migrate(tmp_path, flags, megatron)
    assert [flag.texts for flag in command.flags if flag.name == "--actor-num-gpus-per-node"] == [[expected]]
    assert bool(reasons(notes, "added")) == (flags == "")


def test_colocated_engines_get_as_many_devices_as_the_trainer(tmp_path: Path, megatron: MegatronFlags) -> None:
    command, _ = migrate(tmp_path, "--colocate --actor-num-nodes 2 --actor-num-gpus-per-node 4", megatron)
    assert [flag.texts for flag in command.flags if flag.name == "--rollout-num-gpus"] == [["8"]]


@pytest.mark.parametrize("value", ["$(nproc)", "$OUTSIDE"])
def test_what_is_not_known_is_not_held_against_the_rest(tmp_path: Path, megatron: MegatronFlags, value: str) -> None:
    _, notes = migrate(tmp_path, f"--use-dynamic-batch-size --max-tokens-per-gpu {value}", megatron)
    assert "these flags together" not in reasons(notes, "could not")


def test_one_step_ahead_is_a_bound_on_staleness(tmp_path: Path, megatron: MegatronFlags) -> None:
    command, _ = migrate(tmp_path, "", megatron, program="train_async.py")
    assert [flag.texts for flag in command.flags if flag.name == "--max-weight-staleness"] == [["1"]]


def test_a_reference_converted_from_the_model_is_the_model(tmp_path: Path, megatron: MegatronFlags) -> None:
    command, notes = migrate(tmp_path, "--use-kl-loss --kl-loss-coef 0.1 --ref-load /m_torch_dist/", megatron)
    assert "--ref-load /m" in added(command)
    assert not reasons(notes, "could not")


def test_a_flag_that_was_repeated_takes_all_its_values(tmp_path: Path, megatron: MegatronFlags) -> None:
    command, notes = migrate(tmp_path, "--rollout-sample-hook-path a.b --rollout-sample-hook-path c.d", megatron)
    assert "--rollout-sample-hook-path a.b c.d" in added(command)
    assert [note.new for note in notes if note.kind == "changed"] == ["--rollout-sample-hook-path a.b c.d"]


def test_a_key_moves_into_the_environment(tmp_path: Path, megatron: MegatronFlags) -> None:
    command, _ = migrate(tmp_path, "--use-wandb --wandb-key $KEY", megatron)
    assert command.environment["WANDB_API_KEY"].value.shown == "${KEY}"
    assert "--wandb-key" not in [flag.name for flag in command.flags]


def test_supervised_training_loses_its_engines_flags(tmp_path: Path, megatron: MegatronFlags) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python train.py --hf-checkpoint /m --ref-load /m_torch_dist --prompt-data /p.jsonl --num-epoch 3 --rollout-batch-size 8 "
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only "
        "--disable-compute-advantages-and-returns --calculate-per-token-loss --sglang-mem-fraction-static 0.5 --rollout-num-gpus 8 "
        "--actor-num-gpus-per-node 1"
    )
    command, notes = convert(read_script(str(path)), megatron=megatron, device="cpu")
    names = [flag.name for flag in command.flags]
    assert not {"--ref-load", "--vllm-gpu-memory-utilization", "--rollout-num-gpus"} & set(names)
    assert {"--loss-type", "--debug-train-only", "--calculate-per-token-loss", "--num-epoch"} <= set(names)
    assert not reasons(notes, "could not")


@pytest.mark.parametrize(
    ("export", "kept"),
    [
        ("NCCL_DEBUG=INFO", True),
        ("MASTER_ADDR=$HOST", False),
        ("SGLANG_X=1", False),
        ("PYTHONPATH=/opt/Megatron-LM:$PYTHONPATH", False),
    ],
)
def test_variables_are_carried_over_unless_vime_has_no_use_for_them(
    tmp_path: Path, megatron: MegatronFlags, export: str, kept: bool
) -> None:
    command, notes = migrate(tmp_path, "", megatron, before=f"export {export}")
    name = export.partition("=")[0]
    assert (name in command.environment) == kept
    assert (name in {what.partition("=")[0] for what in reasons(notes, "dropped")}) != kept


def test_a_search_path_loses_megatrons_folder_only(tmp_path: Path, megatron: MegatronFlags) -> None:
    command, _ = migrate(tmp_path, "", megatron, before="export PYTHONPATH=/mine:/opt/Megatron-LM/:$PYTHONPATH")
    assert command.environment["PYTHONPATH"].value.shell == '"/mine:${PYTHONPATH}"'


def test_imports_in_a_users_module_are_listed(tmp_path: Path, megatron: MegatronFlags) -> None:
    (tmp_path / "mine.py").write_text(
        "import json\nfrom slime.utils.types import Sample\nfrom slime.rollout.sglang_rollout import GenerateState, generate\n"
        "from slime.utils.nothing import x\nasync def fn(args, sample): ...\n"
    )
    _, notes = migrate(tmp_path, "--custom-generate-function-path mine.fn", megatron)
    lines = {note.place.rpartition(" ")[2]: note.why for note in notes if "mine.py" in note.place}
    assert lines["2"] == "import from vime.utils.types instead."
    assert lines["3"] == "import from vime.rollout.vllm_rollout instead."
    assert "no such module" in lines["4"]
    assert set(lines) == {"2", "3", "4"}


def test_without_megatron_its_flags_are_kept_and_reported(tmp_path: Path) -> None:
    command, notes = migrate(tmp_path, "--adam-beta2 0.9", None)
    assert "--adam-beta2 0.9" in added(command)
    assert "not installed" in reasons(notes, "could not")["--adam-beta2 0.9"]


def test_every_flag_of_theirs_gets_a_verdict(megatron: MegatronFlags) -> None:
    """It is in our command, or a note says why not; what is kept exists here."""
    silent = []
    for flag in THEIRS:
        spec = OWN.get(flag, OWN.get(RENAMED.get(flag, "")))
        switch = spec is not None and spec[1].type is bool
        items = [Item(literal(text), "line 1") for text in ([flag] if switch else [flag, "1"])]
        out = translate(items, megatron=megatron)
        names = [kept.name for kept in out.flags]
        told = [note for note in out.notes if note.what.startswith(flag) and note.kind in KINDS and note.why]
        known = all(name in OWN or megatron.knows(name) or name.startswith(("--vllm-", "--no-vllm-", "--router-")) for name in names)
        if not known or (names != [flag] and not told):
            silent.append(flag)
    assert not silent


def test_slimes_fully_asynchronous_function_is_our_own_with_a_bound(tmp_path: Path, megatron: MegatronFlags) -> None:
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    command, _ = migrate(tmp_path, f"--rollout-function-path {path}", megatron, program="train_async.py")
    given = {flag.name: flag.texts for flag in command.flags}
    assert given["--rollout-function-path"] == ["vime.rollout.vllm_rollout.generate_rollout"]
    assert given["--max-weight-staleness"] == ["1"]
