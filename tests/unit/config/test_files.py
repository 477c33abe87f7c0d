"""Files of flags: the same names, layered, each mistake named with file and line, and --print-config that reads back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as given_values
from hypothesis import settings
from hypothesis import strategies as st

from vime.config import SECTIONS, RunConfig
from vime.config.files import layered, read_file
from vime.config.names import NameIndex
from vime.config.owners import OWNERS
from vime.config.parse import own_flags, parse_own
from vime.config.show import shown
from vime.config.sources import sources_of, with_sources
from vime.config.split import Given, by_owner, read_tokens

OWN = own_flags()


def tokens_of(path: Path, text: str) -> list[str]:
    """The command line that says the same as a file."""
    path.write_text(text)
    given, problems = read_file(str(path), OWN)
    assert problems == []
    return [word for one in layered([given], OWN) for word in one.raw]


def problems_of(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return read_file(str(path), OWN)[1]


YAML = """\
rollout_batch_size: 64          # underscores or dashes
lr: 1e-6
use-kl-loss: true
no-overlap: null
wandb-group: no
rollout-stop: ["a b", "true"]
apply-chat-template-kwargs: {thinking: false, t: 1e-3, n: 3, s: "1"}
tensor-model-parallel-size: 2
override-opt_param-scheduler: true
algorithm:
  disable-grpo-std-normalization: true
  eps_clip: 0.3
vllm:
  max-num-seqs: 8
  enforce-eager: false
  no-enable-prefix-caching: true
  compilation-config: {mode: 3}
vllm-gpu-memory-utilization: .5
router:
  policy: random
  vllm-router-port: 3
  log-level: info
megatron:
  recompute-modules: [core_attn, mlp]
  min-lr: -1
"""


def test_a_yaml_file_says_what_a_command_line_says(tmp_path: Path) -> None:
    assert tokens_of(tmp_path / "run.yaml", YAML) == [
        *("--rollout-batch-size", "64", "--lr", "1e-6", "--use-kl-loss", "--wandb-group", "no", "--rollout-stop", "a b", "true"),
        *("--apply-chat-template-kwargs", '{"thinking": false, "t": 0.001, "n": 3, "s": "1"}', "--tensor-model-parallel-size", "2"),
        *("--override-opt_param-scheduler", "--disable-grpo-std-normalization", "--eps-clip", "0.3"),
        *("--vllm-max-num-seqs", "8", "--no-vllm-enforce-eager", "--no-vllm-enable-prefix-caching"),
        *("--vllm-compilation-config", '{"mode": 3}', "--vllm-gpu-memory-utilization", ".5"),
        *("--router-policy", "random", "--vllm-router-port", "3", "--router-log-level", "info"),
        *("--recompute-modules", "core_attn", "mlp", "--min-lr=-1"),
    ]


def test_a_toml_file_says_the_same(tmp_path: Path) -> None:
    text = """\
rollout_batch_size = 64
lr = 1e-6
use-kl-loss = true
rollout-stop = ["a", "b"]
[vllm]
max-num-seqs = 8
enforce-eager = false
compilation-config = {mode = 3}
[algorithm]
eps-clip = 0.30
"""
    assert tokens_of(tmp_path / "run.toml", text) == [
        *("--rollout-batch-size", "64", "--lr", "1e-6", "--use-kl-loss", "--rollout-stop", "a", "b", "--vllm-max-num-seqs", "8"),
        *("--no-vllm-enforce-eager", "--vllm-compilation-config", '{"mode": 3}', "--eps-clip", "0.30"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr: 1\nLR: 2\nlr: 3\n", "3: --lr stands in {file}:1 already: keep one."),
        ("lr: 1\ntraining:\n  lr: 1\n", "3: --lr stands in {file}:1 already: keep one."),
        ("use-kl-loss: true\nno-use-kl-loss: true\n", "2: --no-use-kl-loss stands in {file}:1 already"),
        ("use-kl-loss: 1\n", "1: --use-kl-loss is a switch: true or false."),
        ("use-kl-loss: 'true'\n", "1: --use-kl-loss is a switch: true or false."),
        ("use-kl-loss: [true]\n", "1: --use-kl-loss is a switch: true or false."),
        ("use-kl-loss: {a: 1}\n", "1: --use-kl-loss is a switch: true or false."),
        ("use-kl-loss: !!bool maybe\n", "1: tags like !!bool are not read: write the value alone."),
        ("lr: !!python/object:os.system 'ls'\n", "1: tags like !!os.system are not read"),
        ("<<: {lr: 1}\n", "1: '<<' (YAML's merge key) is not read: name several files after --config"),
        ("training: 3\n", "1: 'training' is a section: write it 'training', and below it the flags"),
        ("Training:\n  lr: 1\n", "1: 'Training' is a section: write it 'training'"),
        ("vllm: true\n", "1: 'vllm' is a section"),
        ("trainning:\n  lr: 1\n", "1: there is no section 'trainning'. Nearest: training."),
        ('prompt-data: "a\\0b"\n', "1: the value holds the character 0"),
        ('prompt-data: "\\ud83d"\n', "1: the value holds half a character"),
        ("\n--lr: 1\n", "2: '--lr' is no flag's name: write names without the leading dashes"),
        ("algorithm:\n  lr: 1\n", "2: --lr is of the section 'training', not of 'algorithm'"),
        ("algorithm:\n  eps-clp: 1\n", "2: the section 'algorithm' has no --eps-clp. Nearest: --eps-clip."),
        ("sequence-parallel: false\n", "1: Megatron has no word for 'sequence-parallel: false'. Leave it out, or set it to null"),
        ("router-disable-retries: false\n", "1: vllm-router has no word for"),
        ("rollout-stop: [a, null]\n", "1: a list of values holds no null."),
        ("- lr\n", "1: a file of flags holds 'name: value' lines."),
        ("vllm-compilation-config: {mode: 1,\n  mode: 2}\n", "2: 'mode' stands in this mapping twice: keep one."),
        ("rollout-stop: &a [x, *a]\n", "something in it holds itself"),
        ("a: [\n", " is no YAML: "),
        ("? [a]\n: 1\n", "1: a key must be a flag's name."),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    problems = problems_of(file, text)
    assert said.format(file=file) in problems[0]
    assert problems[0].startswith(str(file))


def test_mistakes_in_toml_are_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert "at line 2" in problems_of(file, "lr = 1\nlr = 2\n")[0]
    assert problems_of(file, "\nuse-kl-loss = 1\n") == [f"{file}:2: --use-kl-loss is a switch: true or false."]


def test_a_section_of_comments_alone_gives_nothing(tmp_path: Path) -> None:
    assert tokens_of(tmp_path / "run.yaml", "training:\n  # lr: 1\nvllm:\nlr: 2\n") == ["--lr", "2"]


def test_json_may_be_indented_with_tabs_and_write_characters_as_pairs(tmp_path: Path) -> None:
    text = '{\n\t"lr": 1e-5,\n\t"rollout-stop": "\\ud83d\\ude00"\n}'
    assert tokens_of(tmp_path / "run.json", text) == ["--lr", "1e-5", "--rollout-stop", "\U0001f600"]


def test_dates_of_toml_are_text(tmp_path: Path) -> None:
    text = "prompt-data = 2026-01-01\napply-chat-template-kwargs = {day = 2026-01-01}\n"
    expected = ["--prompt-data", "2026-01-01", "--apply-chat-template-kwargs", '{"day": "2026-01-01"}']
    assert tokens_of(tmp_path / "run.toml", text) == expected


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in read_file(str(tmp_path / "a.yaml"), OWN)[1][0]
    assert "must end in .yaml" in read_file(str(tmp_path / "a.txt"), OWN)[1][0]
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is no text in UTF-8" in read_file(str(tmp_path / "b.yaml"), OWN)[1][0]


def given(*argv: str) -> list[Given]:
    found, problems = read_tokens(argv, NameIndex(OWN))
    assert problems == []
    return found


def test_later_files_win_over_earlier_ones_and_flags_over_files(tmp_path: Path) -> None:
    base, over = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text("lr: 1\nuse-kl-loss: true\nseed: 3\nvllm: {enforce-eager: true, max_num_seqs: 4}\nweight-decay: 0.1\n")
    over.write_text("lr: 2\nuse-kl-loss: false\nseed: null\nvllm: {enforce-eager: false}\n")
    layers = [read_file(str(base), OWN)[0], read_file(str(over), OWN)[0], given("--lr", "3", "--vllm-max-num-seqs", "9")]
    merged = layered(layers, OWN)
    assert [word for one in merged for word in one.raw] == [
        *("--weight-decay", "0.1", "--no-use-kl-loss", "--no-vllm-enforce-eager", "--lr", "3", "--vllm-max-num-seqs", "9")
    ]
    sources = sources_of(merged)
    assert (sources["--weight-decay"], sources["--use-kl-loss"], sources["--lr"]) == (f"{base}:5", f"{over}:2", "command line")


def test_a_problem_says_where_its_flags_were_given() -> None:
    sources = {"--a": "run.yaml:1", "--b": "command line", "--c": "command line"}
    assert with_sources("--a is wrong.", sources) == "--a is wrong. (run.yaml:1)"
    assert with_sources("--a and --b exclude each other.", sources).endswith(" (--a: run.yaml:1; --b: command line)")
    assert with_sources("--b and --c exclude each other.", sources) == "--b and --c exclude each other."
    assert with_sources("unknown flag --a. Nearest: --b.", sources).endswith("(run.yaml:1)")


def test_no_flag_is_called_like_a_table() -> None:
    assert not [name for name in (*SECTIONS, *OWNERS) if f"--{name.replace('_', '-')}" in OWN]


def config_of(merged: list[Given]) -> RunConfig:
    tokens = by_owner(merged, OWN)
    own = parse_own(tokens.own)
    assert own.problems == []
    return RunConfig(
        **own.sections,
        given=own.given,
        **{f"{owner}_tokens": tuple(getattr(tokens, owner)) for owner in OWNERS},
        sources={OWN[one.flag][1].name if one.flag in OWN else one.flag: one.source for one in merged},
        megatron={"weight_decay": 0.1, "num_layers": 3},
    )


def test_a_printed_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    argv = "--rollout-batch-size 4 --lr 1e-06 --use-kl-loss --no-disable-rewards-normalization --disable-grpo-std-normalization".split()
    argv += ["--rollout-stop", "a: b", "true", "x=1'2\"", "é\n", "--wandb-group", "null", "--rollout-stop-token-ids", "1", "2"]
    argv += ["--apply-chat-template-kwargs", '{"a": 1e-07, "b": "it\'s", "c": [true, null]}', "--rollout-max-response-len=77"]
    argv += "--weight-decay 0.1 --recompute-modules core_attn mlp --no-rope-fusion --min-lr=-1 --sequence-parallel".split()
    argv += ["--vllm-max-num-seqs", "8", "--no-vllm-enforce-eager", "--vllm-compilation-config", '{"mode": 3}']
    argv += ["--vllm-quantization", "none"]
    argv += ["--router-policy", "random", "--vllm-router-port", "3", "--vllm-router-ip", "127.0.0.1"]
    config = config_of(given(*argv))
    file = tmp_path / "printed.yaml"
    file.write_text(shown(config))
    again, problems = read_file(str(file), OWN)
    assert problems == []
    read = config_of(again)
    same = [f.name for f in dataclasses.fields(config) if not f.name.endswith("_tokens") and f.name != "sources"]
    assert {name: getattr(read, name) for name in same} == {name: getattr(config, name) for name in same}
    assert read.megatron_tokens == config.megatron_tokens
    assert read.router_tokens == config.router_tokens
    assert read.vllm_tokens == config.vllm_tokens


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
REQUIRED = [("--rollout-batch-size", ["4"])]


@settings(max_examples=100, deadline=None)
@given_values(words=st.lists(TEXT, min_size=1), name=TEXT, data=st.dictionaries(TEXT, TEXT | NUMBER | st.booleans()))
def test_any_text_reads_back_as_it_was(words: list[str], name: str, data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    own = parse_own([*REQUIRED, ("--rollout-stop", words), ("--wandb-group", [name]), ("--apply-chat-template-kwargs", [json.dumps(data)])])
    assert own.problems == []
    sources = dict.fromkeys(own.given, "command line")
    config = RunConfig(**own.sections, given=own.given, sources=sources, vllm_tokens=("--quantization=" + name,))
    file = tmp_path_factory.mktemp("any") / "printed.yaml"
    file.write_text(shown(config), encoding="utf-8")
    read, problems = read_file(str(file), OWN)
    assert problems == []
    again = parse_own(by_owner(read, OWN).own)
    assert again.sections == own.sections
    assert by_owner(read, OWN).vllm in (["--quantization", name], ["--quantization=" + name])


def test_a_printed_configuration_says_each_source() -> None:
    config = config_of(given("--rollout-batch-size", "4", "--weight-decay", "0.1"))
    text = shown(config)
    assert "  rollout-batch-size: 4  # command line" in text
    assert "  # lr: 1e-06  # default" in text
    assert "  weight-decay: 0.1  # command line" in text
    assert "#   num_layers: 3  # Megatron default" in text
    assert "# derived: trainer processes 1, data-parallel size 1, engines 1, samples in a rollout step 4" in text
