"""`vime doctor` where not even a temporary folder can be made; the whole command is tested in tests/integration/doctor."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest

from vime.cli import doctor
from vime.doctor.findings import ok


def test_without_a_temporary_folder_the_packages_are_still_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(prefix: str) -> NoReturn:
        raise OSError(28, "No space left on device")

    def imported(package: Any, *, imports: bool = True) -> Any:
        return ok("packages", package.name, "imports" if imports else "has a version"), {"devices": [], "gloo": True}

    monkeypatch.setattr(doctor.tempfile, "mkdtemp", full)
    monkeypatch.setattr(doctor, "check_package", imported)
    assert doctor.main(["--json", "--quick"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["vLLM"]["found"] == "imports"
    assert findings["temporary folder"]["state"] == "wrong"
    assert "No space left" in findings["temporary folder"]["found"]


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--quik"])
    assert caught.value.code == 2
    assert "--quik" in capsys.readouterr().err
