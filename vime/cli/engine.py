"""`vime engine --port N <flags>`: one engine that a run elsewhere on this machine takes by --rollout-external-engine-addrs.

It is the engine that the run would start itself from the same flags, and outlives the run. The secret of its control paths is
VIME_CONTROL_SECRET of the environment, which the run must have, too.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from vime.errors import ConfigError, EngineError

__all__ = ["main"]

USAGE = """usage: VIME_CONTROL_SECRET=... vime engine --port N <flags of vime train>

Starts one engine on 127.0.0.1:N and keeps it until Ctrl-C. A run with --rollout-external-engine-addrs 127.0.0.1:N, the same flags
and the same VIME_CONTROL_SECRET sends it weights and requests, and leaves it running. --vllm-X flags belong here, not to the run."""
POLL_SECONDS = 0.5


def main(argv: Sequence[str]) -> int:
    """Run `vime engine`; exit code 0 after Ctrl-C or SIGTERM. Raises VimeError."""
    from vime.backends.vllm_utils.control_guard import SECRET_ENV
    from vime.backends.vllm_utils.server import EngineServer
    from vime.utils.arguments import parse_args

    words = list(argv)
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    port = _take_port(words)
    secret = os.environ.get(SECRET_ENV, "")
    if len(secret) < 16:
        raise ConfigError(
            f"{SECRET_ENV} must hold at least 16 characters, got {len(secret)}: whoever has it can change the engine's weights. "
            f"Set it here and for the run, e.g. export {SECRET_ENV}=$(openssl rand -hex 16)."
        )
    config = parse_args(words)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    log = Path(tempfile.mkdtemp(prefix="vime-engine-")) / "engine.log"
    engine = EngineServer(config, index=0, name=f"engine on port {port}", log_path=log, run_id="none", port=port, secret=secret)
    try:
        engine.wait_healthy(config.engine.vllm_start_deadline)
        print(f"ready: --rollout-external-engine-addrs 127.0.0.1:{port}; log in {log}", flush=True)
        while not ended.wait(POLL_SECONDS):
            if (code := engine.poll()) is not None:
                raise EngineError(f"the engine died (exit {code}).\n{engine.log_tail()}")
    finally:
        engine.stop()
    return 0


def _take_port(words: list[str]) -> int:
    """Take --port N out of the words."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--port":
            value = value if equals else next(iter(words[index + 1 : index + 2]), "")
            del words[index : index + (1 if equals else 2)]
            if value.isdigit() and 0 < int(value) < 65536:
                return int(value)
            raise ConfigError(f"--port takes a number from 1 to 65535, got '{value}'.")
    raise ConfigError("vime engine needs --port N, where the engine is to listen.")
