"""Users' functions: what each kind must look like, loading them by path, and errors that point into their code.

The Protocols below are the one statement of each hook's signature: checking and messages are derived from them. This
module imports no torch; a user's module may.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from vime.errors import ConfigError, HookError, VimeError

if TYPE_CHECKING:
    from vime.config.run import RunConfig

__all__ = ["KINDS", "HookKind", "accepts", "check_all", "hook_errors", "hook_failed", "load_hook", "user_errors"]


class RolloutFunction(Protocol):
    """Generates one rollout step, or evaluates."""

    def __call__(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any: ...


class GenerateFunction(Protocol):
    """Generates one sample; may return a list of samples that share a rollout_id. May also take `evaluation`."""

    async def __call__(self, args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any: ...


class RewardFunction(Protocol):
    """Scores one sample (float or dict); with --group-rm the second argument is a list and so is the result."""

    async def __call__(self, args: Any, sample: Any) -> Any: ...


class DynamicFilter(Protocol):
    """Keeps or drops a finished group."""

    def __call__(self, args: Any, group: list[Any]) -> Any: ...


class BufferFilter(Protocol):
    """Takes up to num_samples groups out of the list `buffer` and returns them; what else it takes out is dropped."""

    def __call__(self, args: Any, rollout_id: int | None, buffer: list[Any], num_samples: int) -> list[Any]: ...


class SampleFilter(Protocol):
    """Sets `remove_sample` on samples that shall not enter the loss."""

    def __call__(self, args: Any, groups: list[Any]) -> None: ...


class SampleHook(Protocol):
    """Sees each sample before its reward; may return another in its place. A coroutine function is awaited."""

    def __call__(self, args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> Any: ...


class AllSamplesProcess(Protocol):
    """Sees all groups that were finished in a step, those that a filter dropped too."""

    def __call__(self, args: Any, all_samples: list[Any], data_source: Any) -> None: ...


class ConvertSamples(Protocol):
    """Returns slime's training data: a dict of lists."""

    def __call__(self, args: Any, samples: list[Any]) -> dict[str, Any]: ...


class RolloutLog(Protocol):
    """Returns True when the step's own rollout metrics are not to be logged."""

    def __call__(self, rollout_id: int, args: Any, samples: list[Any], extra_metrics: dict[str, float], rollout_time: float) -> bool: ...


class EvalLog(Protocol):
    """Returns True when the evaluation's own metrics are not to be logged."""

    def __call__(self, rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, float]) -> bool: ...


class RewardPostProcess(Protocol):
    """Returns (raw_rewards, rewards), one number per sample each."""

    def __call__(self, args: Any, samples: list[Any]) -> tuple[list[float], list[float]]: ...


class CustomLoss(Protocol):
    """Returns (loss, metrics)."""

    def __call__(self, args: Any, batch: Any, logits: Any, sum_of_sample_mean: Callable[..., Any]) -> Any: ...


class CustomAdvantages(Protocol):
    """Sets "advantages" and "returns" in slime's rollout_data."""

    def __call__(self, args: Any, rollout_data: dict[str, Any]) -> None: ...


class CustomTis(Protocol):
    """Weighs the policy loss; all arguments by name. Returns (pg_loss, masks, metrics)."""

    def __call__(
        self, *, args: Any, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, loss_masks: Any, total_lengths: Any,
        response_lengths: Any,
    ) -> Any: ...  # fmt: skip


class PgLossReducer(Protocol):
    """Returns a function from the policy loss of all response tokens to its sum over the samples' means."""

    def __call__(self, total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool) -> Any: ...


class MegatronInit(Protocol):
    """Runs on each trainer process once Megatron's process groups are there, before the model is built."""

    def __call__(self, args: Any) -> None: ...


class ModelProvider(Protocol):
    """Builds one rank's share of the model, or one chunk of it with an interleaved pipeline."""

    def __call__(self, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any: ...


class BeforeLogProb(Protocol):
    """Runs before a log-prob pass; store_prefix is "" for the policy, "ref_" or "teacher_"."""

    def __call__(self, args: Any, model: list[Any], store_prefix: str) -> None: ...


class BeforeTrainStep(Protocol):
    """Runs before an optimizer step, with the gradients at zero."""

    def __call__(
        self, args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
    ) -> None: ...  # fmt: skip


class RolloutDataPostprocess(Protocol):
    """May change the per-token values of slime's rollout_data, and silence tokens, before training on it."""

    def __call__(self, args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None: ...


class DataSourceClass(Protocol):
    """A class made as cls(args), with the methods of `vime.rollout.data_source.DataSource`."""

    def __call__(self, args: Any) -> Any: ...


class _DataSourceMethods(Protocol):
    def get_samples(self, num_samples: int) -> Any: ...
    def add_samples(self, samples: list[Any]) -> None: ...
    def save(self, path: str) -> None: ...
    def load(self, path: str) -> None: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HookKind:
    """One kind of hook."""

    flag: str
    protocol: type
    methods: type | None = None  # for classes
    maybe_async: bool = False  # plain and coroutine functions are both taken

    @property
    def is_async(self) -> bool:
        """Whether the function must be a coroutine function."""
        return inspect.iscoroutinefunction(self.protocol.__call__)

    @property
    def expected(self) -> str:
        """The right signature, as a user would write it."""
        names = _parameters(self.protocol.__call__)
        if self.methods is not None:
            methods = ", ".join(_written(name, getattr(self.methods, name)) for name in _method_names(self.methods))
            return f"class cls({names}) with {methods}"
        return f"{'async def' if self.is_async else 'def'} fn({names})"


KINDS: Mapping[str, HookKind] = MappingProxyType(
    {
        "rollout_function_path": HookKind(flag="--rollout-function-path", protocol=RolloutFunction),
        "eval_function_path": HookKind(flag="--eval-function-path", protocol=RolloutFunction),
        "data_source_path": HookKind(flag="--data-source-path", protocol=DataSourceClass, methods=_DataSourceMethods),
        "custom_generate_function_path": HookKind(flag="--custom-generate-function-path", protocol=GenerateFunction),
        "dynamic_sampling_filter_path": HookKind(flag="--dynamic-sampling-filter-path", protocol=DynamicFilter),
        "buffer_filter_path": HookKind(flag="--buffer-filter-path", protocol=BufferFilter),
        "rollout_sample_filter_path": HookKind(flag="--rollout-sample-filter-path", protocol=SampleFilter),
        "rollout_sample_hook_path": HookKind(flag="--rollout-sample-hook-path", protocol=SampleHook, maybe_async=True),
        "rollout_all_samples_process_path": HookKind(flag="--rollout-all-samples-process-path", protocol=AllSamplesProcess),
        "custom_convert_samples_to_train_data_path": HookKind(flag="--custom-convert-samples-to-train-data-path", protocol=ConvertSamples),
        "custom_rollout_log_function_path": HookKind(flag="--custom-rollout-log-function-path", protocol=RolloutLog),
        "custom_eval_rollout_log_function_path": HookKind(flag="--custom-eval-rollout-log-function-path", protocol=EvalLog),
        "custom_rm_path": HookKind(flag="--custom-rm-path", protocol=RewardFunction),
        "custom_reward_post_process_path": HookKind(flag="--custom-reward-post-process-path", protocol=RewardPostProcess),
        "custom_loss_function_path": HookKind(flag="--custom-loss-function-path", protocol=CustomLoss),
        "custom_advantage_function_path": HookKind(flag="--custom-advantage-function-path", protocol=CustomAdvantages),
        "custom_tis_function_path": HookKind(flag="--custom-tis-function-path", protocol=CustomTis),
        "custom_pg_loss_reducer_function_path": HookKind(flag="--custom-pg-loss-reducer-function-path", protocol=PgLossReducer),
        "custom_model_provider_path": HookKind(flag="--custom-model-provider-path", protocol=ModelProvider),
        "custom_megatron_init_path": HookKind(flag="--custom-megatron-init-path", protocol=MegatronInit),
        "custom_megatron_before_log_prob_hook_path": HookKind(flag="--custom-megatron-before-log-prob-hook-path", protocol=BeforeLogProb),
        "custom_megatron_before_train_step_hook_path": HookKind(
            flag="--custom-megatron-before-train-step-hook-path", protocol=BeforeTrainStep
        ),
        "rollout_data_postprocess_path": HookKind(flag="--rollout-data-postprocess-path", protocol=RolloutDataPostprocess),
    }
)


def load_hook(path: str, kind: str, flag: str | None = None) -> Any:
    """Import `path` ("package.module.name") and check that it can be called as hooks of this kind are.

    Args:
        path: dotted path of a function, a class or a callable object.
        kind: a key of `KINDS`: the name of the configuration field.
        flag: how messages call the place that named the path; default: the kind's flag.

    Raises:
        HookError: not importable (says which part, and the nearest names), or of another signature (shows both).
    """
    spec = KINDS[kind]
    flag = flag or spec.flag
    target = _locate(path, flag)
    problem = _mismatch(target, spec)
    if problem:
        raise HookError(f"{flag} {path}: {problem}. Found: {_found(target)}. Right: {spec.expected}.")
    return target


def check_all(config: RunConfig) -> None:
    """Load and check every hook that the configuration names, before anything is started.

    Raises:
        ConfigError: with one problem per faulty hook.
    """
    args = config.args
    problems = []
    for name, spec in KINDS.items():
        given = getattr(args, name) or []
        for path in given if isinstance(given, list) else [given]:
            try:
                load_hook(path, name, spec.flag)
            except HookError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError(*problems)


def accepts(function: Any, parameter: str) -> bool:
    """Whether `function` can be given `parameter` by name."""
    signature = _signature(function)
    if signature is None:
        return False
    kinds = {p.name: p.kind for p in signature.parameters.values()}
    return parameter in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()


@contextlib.contextmanager
def hook_errors(flag: str, path: str, function: Any) -> Iterator[None]:
    """Run a user's function in this: what it raises becomes a HookError; our own errors pass through."""
    try:
        yield
    except VimeError:
        raise
    except Exception as error:
        raise hook_failed(flag, path, function, error) from error


def user_errors(flag: str, path: str, function: Any) -> contextlib.AbstractContextManager[None]:
    """`hook_errors` where `path` may also name a part of vime, whose faults are not the user's: those stay as they are."""
    return contextlib.nullcontext() if path.startswith("vime.") else hook_errors(flag, path, function)


def hook_failed(flag: str, path: str, function: Any, error: BaseException) -> HookError:
    """A HookError with the last line of the traceback and the file:line in the user's code."""
    frames = list(traceback.extract_tb(error.__traceback__))
    with contextlib.suppress(TypeError):
        source = inspect.getsourcefile(inspect.unwrap(function if callable(function) else type(function)))
        frames = [frame for frame in frames if frame.filename == source] or frames
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    last_line = traceback.format_exception_only(error)[-1].strip()
    cure = "Mend the function, or let it raise vime.errors.GenerationError for a sample that cannot be had."
    return HookError(f"{flag} {path} raised {last_line}{where}. {cure}")


def _locate(path: str, flag: str) -> Any:
    module_name, _, attribute = path.rpartition(".")
    if not module_name or not attribute or "/" in path:
        what = "it is a file's path, " if "/" in path else ""
        raise HookError(f"{flag} {path}: {what}not of the form package.module.name.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if missing != module_name and not module_name.startswith(missing + "."):
            raise HookError(f"{flag} {path}: module '{module_name}' imports '{missing}', which is not installed.") from error
        cure = "It is looked for in the current folder and on PYTHONPATH."
        raise HookError(f"{flag} {path}: there is no module '{missing}'{_near_module(missing)}. {cure}") from error
    except Exception as error:
        raise hook_failed(flag, path, None, error) from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("__")]
        raise HookError(f"{flag} {path}: module '{module_name}' has no '{attribute}'{_nearest(attribute, names)}.")
    return getattr(module, attribute)


def _near_module(missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    try:
        package: ModuleType | None = importlib.import_module(parent) if parent else None
    except Exception:  # noqa: BLE001 - only a hint is lost
        return ""
    search = getattr(package, "__path__", None) if package is not None else sys.path
    if search is None:
        return f" ('{parent}' is a module, not a package)"
    return _nearest(last, [module.name for module in pkgutil.iter_modules(search)])


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.75)
    return f" (nearest: {', '.join(repr(n) for n in near)})" if near else ""


def _mismatch(target: Any, spec: HookKind) -> str:
    """What is wrong with `target`; empty when nothing is."""
    if not callable(target):
        return f"it is a value of type {type(target).__name__}, which cannot be called"
    if spec.methods is not None and not inspect.isclass(target):
        return "it is not a class"
    if not _can_be_called_as(target, spec.protocol.__call__):
        return "it cannot be called with these arguments"
    if spec.methods is not None:
        for name in _method_names(spec.methods):
            method = getattr(target, name, None)
            if not callable(method):
                return f"it has no method '{name}'"
            if not _can_be_called_as(method, getattr(spec.methods, name), bound=True):
                return f"its method '{name}' cannot be called as {_written(name, getattr(spec.methods, name))}"
        return ""
    is_async = _is_async(target)
    if spec.maybe_async or is_async == spec.is_async:
        return ""
    if spec.is_async:
        return "it must be a coroutine function (async def), for it is awaited"
    return "it must be a plain function (def), for it is not awaited"


def _is_async(target: Any) -> bool:
    plain = inspect.unwrap(target)
    return any(
        inspect.iscoroutinefunction(candidate)
        for candidate in (target, plain, getattr(type(target), "__call__", None))  # noqa: B004
    )


def _can_be_called_as(target: Any, template: Callable[..., Any], bound: bool = False) -> bool:
    """Whether a call with the template's parameters (its own `self` left out) binds to `target`'s signature."""
    signature = _signature(target)
    if signature is None:
        return True  # built-in without a signature: cannot be known
    parameters = list(inspect.signature(template).parameters.values())[1:]
    by_name = [p for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty]
    positional = [object() for p in parameters if p not in by_name]
    keywords = {p.name: p.default for p in by_name}
    if bound:
        positional.insert(0, object())
    try:
        signature.bind(*positional, **keywords)
    except TypeError:
        return False
    return True


def _signature(target: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def _parameters(function: Callable[..., Any]) -> str:
    """The parameters of a Protocol's method, without self and annotations."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    first = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    return ", ".join(shown if first is None else [*shown[:first], "*", *shown[first:]])


def _written(name: str, function: Callable[..., Any]) -> str:
    return f"{name}({_parameters(function)})"


def _method_names(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and (not name.startswith("_") or name == "__len__")]


def _found(target: Any) -> str:
    signature = _signature(target)
    name = getattr(target, "__name__", type(target).__name__)
    shown = f"({', '.join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())})" if signature else ""
    kind = (
        "class"
        if inspect.isclass(target)
        else "async def"
        if callable(target) and _is_async(target)
        else "def"
        if callable(target)
        else "value"
    )
    return f"{kind} {name}{shown}"
