"""How findings are told."""

from __future__ import annotations

import json

from vime.doctor.findings import as_json, as_text, ok, verdict, warning, wrong

GOOD = ok("packages", "torch", "2.13.0", expected=">=2.11")
DOUBTFUL = warning("machine", "cores", "1", expected="two", cure="give it two cores")
BAD = wrong("machine", "shared memory", "64 MiB", expected="1 GiB", cure="mount -o remount,size=8G /dev/shm", seconds=0.25)


def test_what_is_not_well_comes_with_expectation_and_cure() -> None:
    text = "\n".join(as_text([GOOD, DOUBTFUL, BAD]))
    assert "ok      torch          2.13.0" in text
    assert ">=2.11" not in text
    assert "warning cores" in text
    assert "wrong   shared memory  64 MiB (0.2 s)" in text
    assert text.count("expected: ") == text.count("cure: ") == 2
    assert text.count("machine") == 1


def test_json_holds_the_same() -> None:
    told = json.loads(as_json([GOOD, BAD], 3.21))
    assert (told["well"], told["seconds"]) == (False, 3.2)
    assert told["findings"][1] == {
        "part": "machine", "name": "shared memory", "state": "wrong", "found": "64 MiB", "expected": "1 GiB",
        "cure": "mount -o remount,size=8G /dev/shm", "seconds": 0.25,
    }  # fmt: skip


def test_a_warning_is_no_fault() -> None:
    assert verdict([GOOD, DOUBTFUL], 2.0) == "all well: 1 ok, 1 warning (2 s)"
    assert verdict([GOOD, BAD], 2.0) == "something is wrong: 1 ok, 1 wrong (2 s)"
