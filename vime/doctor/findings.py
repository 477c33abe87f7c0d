"""What the doctor finds: one finding a thing looked at, with the one cure where something is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Finding", "State", "as_json", "as_text", "is_well", "ok", "verdict", "warning", "wrong"]


class State(StrEnum):
    """ok; warning: a run works, or may; wrong: a run fails; skipped: could not be looked at because of another finding."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at."""

    part: str  # machine, packages, GPU, self-test
    name: str
    state: State
    found: str
    expected: str = ""
    cure: str = ""  # one command or one sentence
    seconds: float | None = None  # what looking took


def ok(part: str, name: str, found: str, **more: Any) -> Finding:
    """All well."""
    return Finding(part=part, name=name, state=State.OK, found=found, **more)


def warning(part: str, name: str, found: str, *, expected: str, cure: str, **more: Any) -> Finding:
    """A run works, or may."""
    return Finding(part=part, name=name, state=State.WARNING, found=found, expected=expected, cure=cure, **more)


def wrong(part: str, name: str, found: str, *, expected: str, cure: str, **more: Any) -> Finding:
    """A run fails."""
    return Finding(part=part, name=name, state=State.WRONG, found=found, expected=expected, cure=cure, **more)


def as_text(findings: Sequence[Finding]) -> Iterable[str]:
    """Lines for a terminal, grouped by part in the order of the findings."""
    width = max((len(finding.name) for finding in findings), default=0)
    part = ""
    for finding in findings:
        if finding.part != part:
            part = finding.part
            yield f"\n{part}"
        took = f" ({finding.seconds:.1f} s)" if finding.seconds is not None else ""
        yield f"  {finding.state:<8}{finding.name:<{width}}  {finding.found}{took}"
        if finding.state in (State.WARNING, State.WRONG):
            yield f"  {'':<8}{'':<{width}}  expected: {finding.expected}"
            yield f"  {'':<8}{'':<{width}}  cure: {finding.cure}"


def as_json(findings: Sequence[Finding], seconds: float) -> str:
    """The same for programs: {"well": bool, "seconds": float, "findings": [...]}."""
    listed = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({"well": is_well(findings), "seconds": round(seconds, 1), "findings": listed}, indent=1)


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing is wrong."""
    return all(finding.state is not State.WRONG for finding in findings)


def verdict(findings: Sequence[Finding], seconds: float) -> str:
    """The last line."""
    number = {state: sum(finding.state is state for finding in findings) for state in State}
    told = ", ".join(f"{count} {state}" for state, count in number.items() if count)
    return f"{'all well' if is_well(findings) else 'something is wrong'}: {told} ({seconds:.0f} s)"
