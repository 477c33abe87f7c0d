"""A launch script is read without being run: what its launch hands to train.py, and what could not be followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.errors import ConfigError
from vime.migrate.script import Script, read_script

LAUNCH = "python3 train.py"


def read(folder: Path, text: str) -> Script:
    """The script with this text."""
    path = folder / "run.sh"
    path.write_text(text, encoding="utf-8")
    return read_script(str(path))


def shown(script: Script) -> list[str]:
    """What the launch hands to train.py."""
    assert script.launch is not None
    return [item.value.shown for item in script.launch.items]


def notes(script: Script, kind: str) -> list[tuple[str, str]]:
    """(place, what) of the notes of one kind."""
    return [(note.place, note.what) for note in script.notes if note.kind == kind]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=(--x 1 --y)\nA+=(--z 'a b')\n{} ${{A[@]}}", ["--x", "1", "--y", "--z", "a b"]),
        ('A=(--x 1)\nB=(${{A[@]}} --y)\n{} "${{B[@]}}"', ["--x", "1", "--y"]),
        ('N=8\n{} --n $N --m "${{N}}0"', ["--n", "8", "--m", "80"]),
        ('F="--a 1   --b"\n{} $F "$F"', ["--a", "1", "--b", "--a 1   --b"]),
        ('F="--a"\nF="$F --b"\nF+=" --c"\n{} $F', ["--a", "--b", "--c"]),
        ("{} --n ${{N:-4}}", ["--n", "${N:-4}"]),
        ("N=${{N:-4}}\n{} --n $N", ["--n", "${N:-4}"]),
        ('N=2\n{} --n ${{N:-4}} --m "${{M:-${{N}}}}"', ["--n", "2", "--m", "${M:-2}"]),
        ("N=\n{} --n ${{N:-4}}", ["--n", "4"]),
        ('{} --p $BASE/model --q "${{BASE}}/data"', ["--p", "${BASE}/model", "--q", "${BASE}/data"]),
        ("N=3; M=2\n{} $((N * (M + 1) / 2)) $((-7 / 2)) $((7 % 4)) $(( ${{N}} - $M ))", ["4", "-3", "3", "1"]),
        ("{} --s $(seq 3) $(seq 2 4) $(seq 8 -4 0)", ["--s", "1", "2", "3", "2", "3", "4", "8", "4", "0"]),
        ("A=()\n{} ${{A[@]}} --x", ["--x"]),
        ("{} --x \\\n  --y 1 \\\n  --z", ["--x", "--y", "1", "--z"]),
        ("{} --x '${{N}}'", ["--x", "${N}"]),
        ("{} --x 2>&1 | tee log.txt", ["--x"]),
        ("{} --x > log 2> err &", ["--x"]),
        ("{} --x 1 > log", ["--x", "1"]),
        ("cd /repo && {} --x", ["--x"]),
        ("set -e; export A=1; {} --x", ["--x"]),
        ("if ! grep -q x f; then echo no; elif $LONG; then echo; fi\n{} --x", ["--x"]),
        ("if [ -n x ]; then echo no; fi\n{} --x", ["--x"]),
        ("for ((i=0; i<3; i++)); do\n  echo $i\ndone\n{} --x", ["--x"]),
        ("case $1 in\n  a|b) echo a ;;\n  *) echo other ;;\nesac\n{} --x", ["--x"]),
        ("usage() {{\n  echo usage\n}}\n{} --x", ["--x"]),
        ("( echo sub )\n{{ echo group; }}\n{} --x", ["--x"]),
        ("if (( 1 < 2 )) && [[ a =~ (b|c) ]]; then echo; fi\n{} --x", ["--x"]),
        ('declare -a A=(--x 1)\nlocal N=2\n{} "${{A[@]}}" $N', ["--x", "1", "2"]),
    ],
)
def test_the_words_of_the_launch_are_those_of_bash(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert shown(read(tmp_path, text.format(LAUNCH))) == expected


def test_words_know_the_line_and_the_array_that_they_come_from(tmp_path: Path) -> None:
    script = read(tmp_path, "A=(\n  --x 1\n)\npython train.py ${A[@]} \\\n  --y")
    assert script.launch is not None
    assert [(item.value.exact, item.place, item.group) for item in script.launch.items] == [
        ("--x", "line 2", "A"),
        ("1", "line 2", "A"),
        ("--y", "line 5", None),
    ]


@pytest.mark.parametrize(
    "launch",
    [
        "ray job submit --address=http://x:8265 -- python3 train.py --x",
        "ray job submit --address http://x:8265 --no-wait -- python3 -u /opt/slime/train.py --x",
        "nohup python train.py --x",
        "exec uv run train.py --x",
        "env A=1 python train.py --x",
        "A=1 B=2 python3 train_async.py --x",
    ],
)
def test_a_launch_is_found_behind_whatever_starts_it(tmp_path: Path, launch: str) -> None:
    assert shown(read(tmp_path, launch)) == ["--x"]


def test_the_environment_comes_from_exports_the_runtime_json_and_assignments_before_the_command(tmp_path: Path) -> None:
    text = """export A=1
export B
B=2
C=3
JSON="{\\"env_vars\\": {\\"D\\": \\"${C}\\", \\"E\\": \\"${OUTSIDE}/x\\"}}"
ray job submit --runtime-env-json="${JSON}" -- env F=6 python3 train.py
"""
    environment = read(tmp_path, text).environment
    assert {name: item.value.shown for name, item in environment.items()} == {
        "A": "1",
        "B": "2",
        "D": "3",
        "E": "${OUTSIDE}/x",
        "F": "6",
    }


def test_a_runtime_json_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    script = read(tmp_path, "ray job submit --runtime-env-json='{oops' -- python3 train.py")
    assert notes(script, "could not") == [("line 1", "--runtime-env-json")]


def test_a_sourced_file_is_read_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text('MODEL=(\n  --layers "${LAYERS:-4}"\n)\n')
    for line in ('source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/models/m.sh"', ". models/m.sh", "source $(dirname $0)/models/m.sh"):
        script = read(tmp_path, f"LAYERS=2\n{line}\n{LAUNCH} ${{MODEL[@]}}")
        assert script.launch is not None
        assert [item.value.exact for item in script.launch.items] == ["--layers", "2"]
        assert script.launch.items[0].place == "m.sh line 2"


def test_a_sourced_file_that_is_not_there_is_reported_and_its_arrays_are_missed(tmp_path: Path) -> None:
    script = read(tmp_path, f'source "$ROOT/models/m.sh"\n{LAUNCH} ${{MODEL[@]}} --x')
    assert shown(script) == ["--x"]
    assert notes(script, "could not") == [("line 1", "source ${ROOT}/models/m.sh")]
    assert notes(script, "dropped") == [("line 2", "${MODEL[@]}")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("if [ -f x ]; then\n  N=1\nelse\n  N=2\nfi", "set inside the 'if' of lines 1-5"),
        ("for N in 1 2; do echo; done", "set by the loop of line 1"),
        ("N=$(nproc)", "computed by $(nproc) (line 1)"),
        ("printf -v N '%s' x", "computed by printf (line 1)"),
        ("read -r N < file", "computed by read (line 1)"),
        ("set_n() { N=1; }", "set inside the 'function' of line 1"),
        ("[ -z x ] && N=1", "set inside the condition of line 1"),
        ("test -f x ||\n  N=1", "set inside the condition of line 1"),
        ("N[3]=1", "set element by element (line 1)"),
        ("N=12345678\n" + "N=$N$N\n" * 17, "longer than 1000000 characters (line 18)"),
        ("N=12345678\n" + "N+=$N\n" * 17, "longer than 1000000 characters (line 18)"),
        ("N=(1 2 3)\n" + 'N=("${N[@]}" "${N[@]}")\n' * 12, "of more than 10000 words (line 13)"),
    ],
)
def test_a_variable_that_the_script_computes_is_never_guessed(tmp_path: Path, text: str, why: str) -> None:
    script = read(tmp_path, f"{text}\n{LAUNCH} --n $N")
    assert script.launch is not None
    (reference,) = script.launch.items[1].value.references
    assert (reference.name, reference.default, reference.why) == ("N", None, why)


def test_flags_that_are_added_under_a_condition_are_shown_and_left_out(tmp_path: Path) -> None:
    script = read(tmp_path, f"A=(--x)\nif $LONG; then\n  A+=(--y 1)\nfi\n{LAUNCH} ${{A[@]}}")
    assert shown(script) == ["--x"]
    assert notes(script, "could not") == [("line 3", "A+=(--y 1)")]


def test_expansions_that_are_not_read_stay_as_they_are_written(tmp_path: Path) -> None:
    script = read(tmp_path, f"N=a/b\n{LAUNCH} --a ${{N##*/}} --b ${{#N}} --c ${{N:+x}} --d $(hostname) --e $((OUTSIDE + 1))")
    assert script.launch is not None
    opaque = [text for item in script.launch.items for text in item.value.opaque]
    assert opaque == ["${N##*/}", "${#N}", "${N:+x}", "$(hostname)", "$((OUTSIDE + 1))"]


def test_commands_are_dropped_with_a_reason_or_reported(tmp_path: Path) -> None:
    lines = ["pkill -9 python", "ray stop", "sleep 3", "echo hi", "mkdir -p x", "ulimit -n 9", "pip install y"]
    loop = ["for h in a; do", "  ssh $h 'ray start'", "done"]
    script = read(tmp_path, "\n".join([*lines, *loop, LAUNCH]))
    dropped = [("line 1", "pkill"), ("line 2", "ray stop"), ("line 5", "mkdir"), ("line 6", "ulimit"), ("line 9", "ssh")]
    assert notes(script, "dropped") == dropped
    assert notes(script, "could not") == [("line 7", "pip install y")]


def test_only_the_first_launch_is_taken(tmp_path: Path) -> None:
    script = read(tmp_path, f"{LAUNCH} --x\n{LAUNCH} --y")
    assert shown(script) == ["--x"]
    assert notes(script, "could not") == [("line 2", "a second launch")]


def test_a_launch_under_a_condition_is_taken_and_reported(tmp_path: Path) -> None:
    script = read(tmp_path, f"if true; then\n  {LAUNCH} --x\nfi")
    assert shown(script) == ["--x"]
    assert notes(script, "could not") == [("line 2", "the launch")]


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("run.sh", "echo hi", "no command that runs train.py"),
        ("run.sh", "#!/usr/bin/env python3\nprint()", "no shell script"),
        ("run.py", "print()", "no shell script"),
    ],
)
def test_what_is_no_launch_script_is_refused(tmp_path: Path, name: str, text: str, what: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        read_script(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.sh"):
        read_script(str(tmp_path / "none.sh"))


def test_a_script_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        read(tmp_path, LAUNCH + ' "${A:-' * 5000 + "1" + '}"' * 5000)
