"""`RouterServer`: vllm-router in front of the engines, as our child process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from vime.backends.vllm_utils.process import LOOPBACK, PortClaim, ServerProcess
from vime.errors import DeadlineError, EngineError

__all__ = ["DEFAULT_POLICY", "ExternalRouter", "RouterClient", "RouterServer", "router_command"]

DEFAULT_POLICY = "round_robin"
_POLICY_METRIC = re.compile(r'^vllm_router_policy_decisions_total\{policy="(\w+)"', re.MULTILINE)


def router_command(engine_urls: Sequence[str], *, port: int, metrics_port: int, router_tokens: Sequence[str]) -> list[str]:
    """The command line of the router: our settings, then the user's --router- tokens (the last one wins)."""
    flags = {
        "--host": LOOPBACK,
        "--port": str(port),
        "--prometheus-host": LOOPBACK,
        "--prometheus-port": str(metrics_port),
        "--policy": DEFAULT_POLICY,
        "--log-level": "warning",
        "--worker-startup-check-interval": "1",
        "--request-timeout-secs": "86400",  # who asks has a deadline; an engine that is paused for a weight sync is not at fault
        "--retry-max-retries": "2",
        "--health-check-interval-secs": "10",
        "--health-check-timeout-secs": "30",  # a trainer on the same cores makes an engine slow, not ill
        "--health-failure-threshold": "3",
        "--health-success-threshold": "1",
        "--cb-failure-threshold": "10",
        "--cb-timeout-duration-secs": "10",
    }
    words = [word for pair in flags.items() for word in pair]
    return [sys.executable, "-m", "vllm_router.launch_router", *words, *router_tokens, "--worker-urls", *engine_urls]


class RouterClient:
    """The administration of a vllm-router at an address."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    @property
    def url(self) -> str:
        """http://HOST:PORT."""
        return f"http://{self.host}:{self.port}"

    def workers(self) -> list[str]:
        """URLs of the engines that the router knows."""
        status, text = self._request("GET", "/list_workers", 5.0)
        if status != 200:
            raise EngineError(f"the router answered {status} to /list_workers: {text[:300]}")
        return [str(url) for url in json.loads(text)["urls"]]

    def worker_health(self, seconds: float = 30.0) -> dict[str, bool]:
        """URL of each engine that the router knows -> whether it takes that engine for healthy."""
        try:
            status, text = self._request("GET", "/workers", seconds)
        except TimeoutError as error:
            raise DeadlineError(peer=f"the router at {self.url}", phase="/workers", seconds=seconds) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the router at {self.url} cannot be reached: {error!r}") from error
        if status != 200:
            raise EngineError(f"the router at {self.url} answered {status} to /workers: {text[:300]}")
        return {str(worker["url"]): bool(worker["is_healthy"]) for worker in json.loads(text)["workers"]}

    def policy(self) -> str | None:
        """How it chooses engines, e.g. "round_robin"; None when it does not tell (before its first request, or when it is not ours)."""
        return None

    def add_worker(self, url: str, seconds: float = 60.0) -> None:
        """Route to one more engine; returns once the router has it."""
        self._change("add_worker", url, seconds)

    def remove_worker(self, url: str, seconds: float = 60.0) -> None:
        """Route no more to an engine."""
        self._change("remove_worker", url, seconds)

    def _change(self, action: str, url: str, seconds: float) -> None:
        begun = time.monotonic()
        try:
            status, text = self._request("POST", f"/{action}?url={quote(url, safe='')}", seconds)
        except TimeoutError as error:
            raise DeadlineError(peer="the router", phase=f"{action} {url}", seconds=seconds) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the router cannot be reached for {action} {url}: {error!r}") from error
        if status != 200:
            took = time.monotonic() - begun
            raise EngineError(f"the router answered {status} to {action} {url} after {took:.1f} s: {text[:300]}")

    def _request(self, method: str, target: str, seconds: float) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            connection.request(method, target)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            connection.close()


class ExternalRouter(RouterClient):
    """A router that somebody else started (--vllm-router-ip, --vllm-router-port): our engines join it and leave it again."""

    def __init__(self, host: str, port: int, engine_urls: Sequence[str]) -> None:
        """Registers the engines; EngineError when no router answers there."""
        super().__init__(host, port)
        try:
            self.workers()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineError(
                f"no vllm-router answers at {host}:{port} (--vllm-router-ip, --vllm-router-port): {error}. "
                "Start it there, or leave both flags out and the run starts its own."
            ) from error
        self._urls = list(engine_urls)
        for url in self._urls:
            self.add_worker(url)

    def poll(self) -> int | None:
        """It is not our process: None."""
        return None

    def log_tail(self, lines: int = 12) -> str:
        """Its log is elsewhere."""
        return f"The log of the router at {self.url} is with whoever started it."

    def stop(self) -> None:
        """Take our engines out of it."""
        while self._urls:
            with contextlib.suppress(EngineError, DeadlineError):
                self.remove_worker(self._urls.pop(), seconds=5.0)


class RouterServer(RouterClient):
    """The router. It begins to start when constructed, and listens on loopback alone."""

    def __init__(self, engine_urls: Sequence[str], *, log_path: Path, router_tokens: Sequence[str] = (), port: int | None = None) -> None:
        """`port`: a fixed port (default: any free one); ResourceError when it is taken."""
        self._urls = list(engine_urls)
        self._claim = PortClaim(port, what="the router")
        self._metrics_claim = PortClaim(None, what="the router's metrics")
        super().__init__(LOOPBACK, self._claim.port)
        command = router_command(self._urls, port=self.port, metrics_port=self._metrics_claim.port, router_tokens=router_tokens)
        self._process = ServerProcess("the router", command, env=dict(os.environ), log_path=Path(log_path), grace=2.0)

    @property
    def pid(self) -> int:
        """Root of the router's process tree."""
        return self._process.pid

    def wait_ready(self, seconds: float) -> None:
        """Wait until the router serves and knows all engines. EngineError when it dies, DeadlineError after `seconds`."""
        self._process.wait_ready(self._knows_all, seconds, cure="Check the --router- flags and that the engines are healthy.")
        self._claim.close()
        self._metrics_claim.close()

    def policy(self) -> str | None:
        """The policy, from the router's metrics."""
        metrics = RouterClient(self.host, self._metrics_claim.port)
        try:
            found = _POLICY_METRIC.search(metrics._request("GET", "/metrics", 30.0)[1])
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the router at {self.url} cannot be reached for its metrics: {error!r}") from error
        return found[1] if found else None

    def poll(self) -> int | None:
        """None while the router runs, else its exit status."""
        return self._process.poll()

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of the router's log."""
        return self._process.log_tail(lines)

    def stop(self) -> None:
        """End the router; a second call does nothing."""
        self._claim.close()
        self._metrics_claim.close()
        self._process.stop()

    def _knows_all(self) -> bool:
        try:
            return set(self._urls) <= set(self.workers())
        except (OSError, http.client.HTTPException, EngineError, ValueError):
            return False
