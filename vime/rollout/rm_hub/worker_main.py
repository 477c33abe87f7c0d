"""A reward worker: reads one JSON request a line from standard input, answers one JSON line. Started by `workers`.

Rules that import much, use CPU or may hang on a strange answer run here, away from the event loop, where they can be
killed. Ends when its input ends, and with its parent however that ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

from vime.errors import VimeError
from vime.rollout.rm_hub.registry import find_reward

__all__ = ["main"]

PR_SET_PDEATHSIG = 1
MEMORY = 8 * 1024**3  # bytes of address space: an answer like 9**9**9 meets a MemoryError, not the machine's end


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a verifier prints must not mix with the replies
    for line in sys.stdin:
        replies.write(json.dumps(_answer(json.loads(line))) + "\n")
        replies.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        function = find_reward(request["rm_type"]).function()
        return {"reward": function(request["response"], request["label"], request["metadata"])}
    except VimeError as error:
        return {"fault": str(error)}
    except (Exception, MemoryError) as error:  # noqa: BLE001 - a verifier of another project met an answer it cannot take
        return {"failure": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
