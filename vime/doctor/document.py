"""The part of docs/install.md that is made from the matrix:  python -m vime.doctor.document   (in the repository's folder)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vime.doctor.matrix import DRIVER, GLIBC, MATRIX, PAIRS, PYTHON

__all__ = ["PAGE", "matrix_tables", "with_matrix"]

PAGE = Path("docs") / "install.md"
BEGIN, END = "<!-- made by python -m vime.doctor.document -->", "<!-- end of what is made -->"


def matrix_tables() -> str:
    """The matrix as Markdown: packages, then pairs of vLLM and torch."""
    return "\n".join([*_packages(), "", *_pairs()])


def with_matrix(page: str) -> str:
    """`page` with what stands between the two marks made anew; ValueError when a mark is missing."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{matrix_tables()}\n{END}{tail}"


def _packages() -> Iterator[str]:
    yield "| package | range | tested | for |"
    yield "|---|---|---|---|"
    yield f"| Python | {PYTHON} | 3.12 | |"
    yield f"| glibc | >={GLIBC} | | the lock's wheels |"
    yield f"| NVIDIA driver | >={DRIVER} | | CUDA 13, which torch's wheels bring; no GPU is needed |"
    for package in MATRIX:
        name = (
            package.name if package.name.lower() == package.distributions[0] else f"{package.name} ({' or '.join(package.distributions)})"
        )
        role = package.why if package.needed else f"{package.why} (can be left out)"
        yield f"| {name} | {package.supported} | {', '.join(package.tested)} | {role} |"


def _pairs() -> Iterator[str]:
    yield "vLLM's kernels are compiled against one torch; on a GPU take a pair of this table:"
    yield ""
    yield "| vLLM | " + " | ".join(PAIRS) + " |"
    yield "|---" * (len(PAIRS) + 1) + "|"
    yield "| torch | " + " | ".join(PAIRS.values()) + " |"


def main() -> None:
    """Write the page anew."""
    PAGE.write_text(with_matrix(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
