"""What is read from a script is what bash makes of it, and what is written is what bash hands to vime."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from examples.quickstart.make_assets import AssetSpec, make_assets
from tests.rules.source import ROOT
from vime.cli import migrate
from vime.migrate.convert import convert
from vime.migrate.script import read_script
from vime.migrate.values import Value
from vime.migrate.write import run_sh
from vime.utils.arguments import parse_args

pytestmark = pytest.mark.integration

EXAMPLES = ("slime_grpo.sh", "vime_tools.sh")
ENVIRONMENT = {"DATA": "/data dir", "WANDB_KEY": 'k"$', "MASTER_ADDR": "10.0.0.1", "NUM_GPUS": "2"}
RECORDER = """#!{python}
import json, os, sys
if "train" in " ".join(sys.argv[1:]):
    with open({out!r}, "w") as file:
        json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, file)
"""
SNIPPETS = {
    "arrays": 'A=(--x 1 # one\n \'a b\' "c $DATA")\nA+=(--y "${DATA}/z")\npython3 train.py "${A[@]}" --end',
    "splitting": 'F=\'--a 1  --b\'\nF+=" --c"\npython3 train.py $F "$F" --d=$MASTER_ADDR',
    "defaults": 'N=${N:-4}; M=\npython3 train.py $N ${M:-5} ${M-6} ${K:-"a b"} "${K:-${N}0}" ${L:=7} $L',
    "quotes": 'python3 train.py \'a"b\' "a\'b" "\\$x \\\\ \\`" $\'t\\tn\' a\\ b \'\' --j=\'{"k": "v w"}\' "one \\\ntwo"',
    "numbers": 'N=7; M=2\npython3 train.py $((N / M)) $((-N / M)) $((-N % M)) $((N*(M+1)-1)) $(seq 1 3 9) "$(seq 2)"',
    "lines": "python3 train.py \\\n  --a \\\n  --b 1 \\\n  > /dev/null 2>&1",
    "heredoc": "cat <<'END' > /dev/null\npython3 train.py --wrong \"\nEND\nX=1\npython3 train.py --x $X",
    "blocks": "f() { X=2; }\nif false; then X=3; fi\nfor i in 1 2; do Y=$i; done\ncase a in b) X=4 ;; esac\nZ=5\npython3 train.py $Z",
    "prefix": 'A=1 B="$DATA" python3 -u train.py --x',
    "folder": 'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\npython3 train.py $HERE $(dirname "$0")/x',
}


def run_bash(script: Path, folder: Path, programs: tuple[str, ...], arguments: tuple[str, ...] = ()) -> dict[str, object]:
    """Run a script with recorders in the place of `programs`; no other program than a few harmless ones can be found by it."""
    out, tools = folder / "out.json", folder / "bin"
    tools.mkdir(exist_ok=True)
    for name in programs:
        (tools / name).write_text(RECORDER.format(python=sys.executable, out=str(out)))
        (tools / name).chmod(0o755)
    for name in ("ssh", "sleep", "nvidia-smi", "pkill"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    for name in ("cat", "dirname", "grep", "seq", "tee", "wc"):
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name) or name)
    bash = shutil.which("bash")
    assert bash is not None
    env = {"PATH": str(tools), **ENVIRONMENT}
    done = subprocess.run([bash, str(script), *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert out.exists(), f"nothing was started: {done.stderr}"
    return dict(json.loads(out.read_text()))


def filled_in(value: Value, values: Mapping[str, str]) -> str:
    """A value as bash sees it with these variables."""
    return "".join(
        piece if isinstance(piece, str) else values.get(piece.name) or (filled_in(piece.default, values) if piece.default else "")
        for piece in value.pieces
        if isinstance(piece, str) or hasattr(piece, "name")
    )


@pytest.mark.parametrize("name", [*EXAMPLES, *SNIPPETS])
def test_the_reader_sees_what_bash_passes_on(name: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / "migration" / name
    if name in SNIPPETS:
        path = tmp_path / f"{name}.sh"
        path.write_text(SNIPPETS[name])
    recorded = run_bash(path, tmp_path, ("python3", "ray"))
    argv = [str(word) for word in recorded["argv"]]  # type: ignore[attr-defined]
    script = read_script(str(path))
    assert script.launch is not None
    read = [filled_in(item.value, ENVIRONMENT) for item in script.launch.items]
    assert [word for word in read if word] == [word for word in argv[argv.index("train.py") + 1 :] if word]
    seen = next((json.loads(word.partition("=")[2])["env_vars"] for word in argv if word.startswith("--runtime-env-json=")), None)
    if seen is None:
        seen = recorded["env"]
    launched = {name: filled_in(item.value, {**ENVIRONMENT, "NVLS": "0"}) for name, item in script.launch.environment.items()}
    assert launched == {name: seen[name] for name in launched}  # type: ignore[index]


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_written_passes_our_flags_on(name: str, tmp_path: Path) -> None:
    command, _ = convert(read_script(str(ROOT / "examples" / "migration" / name)), megatron=None, device="cuda")
    script = tmp_path / "run.sh"
    script.write_text(run_sh(command))
    recorded = run_bash(script, tmp_path, ("vime",), ("--more", "a b") if command.passes_arguments else ())
    expected = ["train"]
    for flag in command.flags:
        expected += [flag.name, *(filled_in(value, ENVIRONMENT) for value in flag.values)]
    assert recorded["argv"] == expected + (["--more", "a b"] if command.passes_arguments else [])
    env = dict(recorded["env"])  # type: ignore[call-overload]
    assert {name: env.get(name) for name in command.environment} == {
        name: filled_in(item.value, ENVIRONMENT) for name, item in command.environment.items()
    }


def test_a_variable_that_is_missing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, _ = convert(read_script(str(ROOT / "examples" / "migration" / "vime_tools.sh")), megatron=None, device="cuda")
    script = tmp_path / "run.sh"
    script.write_text(run_sh(command))
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, str(script)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "DATA" in done.stderr


def test_the_result_is_accepted_by_every_owners_parser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assets = make_assets(tmp_path, AssetSpec(max_positions=32768))
    old = tmp_path / "old.sh"
    text = (ROOT / "examples" / "migration" / "slime_grpo.sh").read_text()
    for theirs, ours in (
        ("/data/Qwen3-4B_torch_dist", f"{assets['model']}_torch_dist"),
        ("/data/Qwen3-4B\n", f"{assets['model']}\n"),
        ("/data/math/train.jsonl", str(assets["train"])),
        ("/data/math/test.jsonl", str(assets["heldout"])),
        ("/data/runs", str(tmp_path / "runs")),
        ("--actor-num-gpus-per-node 8", "--actor-num-gpus-per-node 2"),
        ("${HERE}", str(ROOT / "examples" / "migration")),
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    old.write_text(text)
    new = tmp_path / "run.yaml"
    assert migrate.main([str(old), "--output", str(new), "--available-only", "--check"]) == 0
    shown = capsys.readouterr().out
    assert "would say" not in shown, shown
    assert "Could not" not in shown, shown
    config = parse_args(["--config", str(new)])
    assert config.rollout.rollout_temperature == 0.9
    assert config.megatron["adam_beta2"] == 0.98
    assert config.vllm_tokens == ("--gpu-memory-utilization", "0.7", "--max-num-seqs", "256")
