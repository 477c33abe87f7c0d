"""`Routers`: one router in front of each model's engines, and who is behind it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from vime.backends.vllm_utils.handshake import check_router, check_workers, shake_hands
from vime.backends.vllm_utils.router import ExternalRouter, RouterServer
from vime.backends.weight_transfer.control import EngineEndpoint
from vime.config import RunConfig
from vime.config.served import ServedModel
from vime.errors import EngineError

__all__ = ["Routers"]

ROUTER_DEADLINE = 60.0


@dataclass(slots=True)
class _Routed:
    router: RouterServer | ExternalRouter
    urls: list[str]


class Routers:
    """See the module. `route` may be called while another thread uses the others."""

    def __init__(self, config: RunConfig, log_dir: Path) -> None:
        self._config, self._log_dir = config, log_dir
        self._models: dict[str, _Routed] = {}
        self._lock = threading.Lock()  # engines come and go while a rollout runs

    def open(self, model: ServedModel, endpoints: list[EngineEndpoint]) -> None:
        """Start a router in front of a model's engines, or take the one that the user named, and ask all of them what they are."""
        given, urls = self._config.router, [endpoint.url for endpoint in endpoints]
        router: RouterServer | ExternalRouter
        if model.trained and given.vllm_router_ip is not None and given.vllm_router_port is not None:
            router = ExternalRouter(given.vllm_router_ip, given.vllm_router_port, urls)
        else:
            log = self._log_dir / ("router.log" if model.trained else f"router_{len(self._models)}.log")
            router = RouterServer(urls, router_tokens=self._config.router_tokens, log_path=log)
        self._models[model.name] = _Routed(router, urls)
        if isinstance(router, RouterServer):
            router.wait_ready(ROUTER_DEADLINE)
        if model.trained:
            shake_hands(self._config, endpoints, router)
        else:
            check_router(self._config, urls, router)

    def route(self, name: str, endpoints: list[EngineEndpoint]) -> None:
        """From now on exactly these engines are behind the model's router."""
        routed, urls = self._models[name], [endpoint.url for endpoint in endpoints]
        with self._lock:
            for url in set(routed.urls) - set(urls):
                routed.router.remove_worker(url)
            for url in set(urls) - set(routed.urls):
                routed.router.add_worker(url)
            routed.urls = urls

    def check(self) -> None:
        """Requests go to this run's engines alone; EngineError when a router knows others."""
        with self._lock:
            for routed in self._models.values():
                check_workers(routed.urls, routed.router)

    def addresses(self) -> dict[str, tuple[str, int]]:
        """Model -> where its router listens."""
        return {name: (routed.router.host, routed.router.port) for name, routed in self._models.items()}

    def raise_dead(self) -> None:
        """EngineError when a router of ours has ended."""
        for routed in list(self._models.values()):
            if (code := routed.router.poll()) is not None:
                raise EngineError(f"the router died (exit {code}).\n{routed.router.log_tail()}")

    def stop(self) -> None:
        """End the routers that are ours, and leave the user's."""
        for routed in self._models.values():
            routed.router.stop()
