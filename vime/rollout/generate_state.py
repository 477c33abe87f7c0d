"""What the functions of one rollout share: tokenizer, connection to the engines, sampling parameters, hooks.

Passed explicitly inside vime. Plug-ins written for slime call `GenerateState(args)` in their own functions: within a
rollout that gives the rollout's own state (found through the task's context, not a process-wide variable); anywhere else
a new one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from vime.config.sections import POLICY_ADAPTER
from vime.errors import ConfigError
from vime.hooks import accepts, load_hook
from vime.rollout.engine_access import EngineAccess
from vime.rollout.engine_client import EngineClient
from vime.rollout.resources import RolloutResources
from vime.rollout.rm_hub.scoring import REWARD_RESOURCES
from vime.utils.http_utils import HttpScope, RequestLimit, RetryPolicy, use_scope

__all__ = ["GenerateState"]

# A weak reference: kept connections remember the context that they were opened in, and must not keep a run's parts alive by it.
_CURRENT: ContextVar[weakref.ref[GenerateState] | None] = ContextVar("vime_generate_state", default=None)


def _current() -> GenerateState | None:
    reference = _CURRENT.get()
    return reference() if reference is not None else None


class GenerateState:
    """State of one rollout. `tokenizer`, `semaphore`, `sampling_params` and `args` are there for plug-ins."""

    args: Any
    resources: RolloutResources
    semaphore: RequestLimit  # requests in flight; held by `generate` and `post` while a request runs, by nobody else
    client: EngineClient
    sampling_params: dict[str, Any]  # slime's names
    rollout_id: int | None  # the step that is generated for, where that is known

    def __new__(cls, args: Any, resources: RolloutResources | None = None) -> GenerateState:
        """The state of the rollout that runs in this task, when it has the same `args`; else a new one."""
        current = _current()
        if resources is None and current is not None and current.args is args:
            return current
        self = super().__new__(cls)
        self._setup(args, resources or RolloutResources(args.hf_checkpoint))
        return self

    def _setup(self, args: Any, resources: RolloutResources) -> None:
        self.args = args
        self.resources = resources
        self.rollout_id = None
        self.semaphore = RequestLimit(args.vllm_server_concurrency * max(1, args.num_engines))
        self.client = EngineClient(
            HttpScope(
                base_url=router_url(args),
                limit=self.semaphore,
                policy=RetryPolicy(
                    timeout=args.rollout_request_timeout,
                    retries=args.rollout_request_retries,
                    patience=args.vllm_start_deadline if args.use_fault_tolerance else 0.0,  # the only engine may be being replaced
                ),
            ),
            model=POLICY_ADAPTER if args.lora_rank is not None and args.lora_sync == "adapter" else None,
        )
        self.sampling_params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": list(args.rollout_stop),
            "stop_token_ids": list(args.rollout_stop_token_ids),
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "routed_experts": args.use_rollout_routing_replay,
            "kept_tokens": args.rollout_top_k > 0,  # the trainer's probabilities are over what the engine chose from
        }

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.resources.tokenizer

    @property
    def aborted(self) -> bool:
        """Whether the step has what it needs: nothing more is sent, and what is unfinished becomes ABORTED."""
        return self.client.scope.stopped

    @aborted.setter
    def aborted(self, value: bool) -> None:
        self.client.scope.stopped = value

    @property
    def engines(self) -> EngineAccess:
        """The run's engines; without effect where the run has none of its own."""
        return getattr(self.args, "engine_access", None) or EngineAccess()

    def sample_hooks(self) -> list[tuple[str, Any]]:
        """(path, function) of each --rollout-sample-hook-path, in their order."""
        found = []
        for path in self.args.rollout_sample_hook_path:
            key = (path, "rollout_sample_hook_path")
            if key not in self.resources.hooks:
                self.resources.hooks[key] = load_hook(*key)
            found.append((path, self.resources.hooks[key]))
        return found

    def generate_hook(self, path: str) -> tuple[Any, bool]:
        """The custom generate function at `path`, and whether it takes `evaluation`."""
        key = (path, "custom_generate_function_path")
        if key not in self.resources.hooks:
            function = load_hook(*key)
            self.resources.hooks[key] = (function, accepts(function, "evaluation"))
        found: tuple[Any, bool] = self.resources.hooks[key]
        return found

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[GenerateState]:
        """Within this, the state is the one that plug-ins find; connections of its own are closed at the end."""
        token = _CURRENT.set(weakref.ref(self))
        resources = REWARD_RESOURCES.set(weakref.ref(self.resources))
        self.client.scope.lent = self.resources.session()
        try:
            with use_scope(self.client.scope):
                yield self
        finally:
            REWARD_RESOURCES.reset(resources)
            _CURRENT.reset(token)
            await self.client.scope.close()

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[GenerateState]:
        """The same when the rollout runs already; else connections last for this block only."""
        if _current() is self:
            yield self
        else:
            async with self.running():
                yield self


def router_url(args: Any) -> str:
    """http://ip:port of the router in front of the engines."""
    if not args.vllm_router_ip or not args.vllm_router_port:
        raise ConfigError(
            "This rollout needs engines, but no router is running for it. Drop --debug-train-only, or give --vllm-router-ip/-port."
        )
    return f"http://{args.vllm_router_ip}:{args.vllm_router_port}"
