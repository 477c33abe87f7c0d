"""Users' functions: found, checked before the run, and blamed with file and line."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vime.config import RunConfig
from vime.config import sections as s
from vime.errors import ConfigError, GenerationError, HookError
from vime.hooks import KINDS, accepts, check_all, hook_errors, load_hook

MODULE = "hooks_of_a_user"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module to put functions into."""
    made = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


def refusal(module: ModuleType, kind: str, target: Any) -> str:
    """The message that loading `target` as `kind` ends with."""
    module.it = target  # type: ignore[attr-defined]
    with pytest.raises(HookError) as caught:
        load_hook(f"{MODULE}.it", kind)
    return str(caught.value)


async def generate(args: Any, sample: Any, sampling_params: Any) -> Any:
    """Right."""


async def generate_eval(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:
    """Right as well."""


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """slime's form."""
    return 0.0


def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Right."""


class Source:
    """slime's form: save and load take a rollout id."""

    def __init__(self, args: Any) -> None: ...
    def get_samples(self, num_samples: int) -> Any: ...
    def add_samples(self, samples: Any) -> None: ...
    def save(self, rollout_id: Any) -> None: ...
    def load(self, rollout_id: Any = None) -> None: ...
    def __len__(self) -> int:
        return 0


class Callable:
    """An object that can be awaited when called."""

    async def __call__(self, args: Any, sample: Any) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("rollout_function_path", rollout),
        ("eval_function_path", rollout),
        ("data_source_path", Source),
        ("custom_generate_function_path", generate),
        ("custom_generate_function_path", generate_eval),
        ("custom_rm_path", reward),
        ("custom_rm_path", Callable()),
        ("custom_rm_path", functools.partial(reward, weight=2.0)),
        ("dynamic_sampling_filter_path", lambda args, group, **kw: True),
        ("rollout_sample_filter_path", lambda args, data: None),
        ("custom_reward_post_process_path", lambda args, samples: ([], [])),
        ("custom_loss_function_path", lambda args, batch, logits, sum_of_sample_mean: (0, {})),
        ("custom_megatron_init_path", lambda args: None),
        ("custom_megatron_before_log_prob_hook_path", lambda args, model, store_prefix: None),
        (
            "custom_megatron_before_train_step_hook_path",
            lambda args, rollout_id, step_id, model, optimizer, opt_param_scheduler: None,
        ),
        ("rollout_data_postprocess_path", lambda args, rollout_id, rollout_data: None),
        ("custom_model_provider_path", lambda pre_process, post_process, vp_stage=None: None),
    ],
)
def test_a_right_signature_is_accepted(module: ModuleType, kind: str, target: Any) -> None:
    module.it = target  # type: ignore[attr-defined]
    assert load_hook(f"{MODULE}.it", kind) is target


async def reward_without_args(sample: Any) -> float:
    """Wrong."""
    return 0.0


def plain_reward(args: Any, sample: Any) -> float:
    """Not awaitable."""
    return 0.0


async def async_filter(args: Any, group: Any) -> bool:
    """Would always be kept: a coroutine is true."""
    return False


def rollout_without_evaluation(args: Any, rollout_id: int, data_source: Any) -> Any:
    """Cannot be asked to evaluate."""


class SourceWithoutLoad:
    """Lacks a method."""

    def __init__(self, args: Any) -> None: ...
    def get_samples(self, num_samples: int) -> Any: ...
    def add_samples(self, samples: Any) -> None: ...
    def save(self, path: str) -> None: ...
    def __len__(self) -> int:
        return 0


class SourceWithBadMethod(Source):
    """get_samples takes nothing."""

    def get_samples(self) -> Any: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("kind", "target", "found", "right"),
    [
        ("custom_rm_path", reward_without_args, "async def reward_without_args(sample)", "async def fn(args, sample)"),
        ("custom_rm_path", plain_reward, "must be a coroutine function", "async def fn(args, sample)"),
        ("custom_generate_function_path", reward, "async def reward(args, sample, **kwargs)", "fn(args, sample, sampling_params)"),
        ("dynamic_sampling_filter_path", async_filter, "must be a plain function", "def fn(args, group)"),
        ("rollout_function_path", rollout_without_evaluation, "(args, rollout_id, data_source)", "evaluation=False"),
        ("custom_loss_function_path", plain_reward, "cannot be called with these", "fn(args, batch, logits, sum_of_sample_mean)"),
        ("data_source_path", SourceWithoutLoad, "has no method 'load'", "load(path)"),
        ("data_source_path", SourceWithBadMethod, "cannot be called as get_samples(num_samples)", "class cls(args)"),
        ("data_source_path", rollout, "not a class", "class cls(args)"),
        ("custom_rm_path", 5, "is a value of type int, which cannot be called", "async def fn"),
    ],
)
def test_a_wrong_signature_is_refused_with_the_flag_the_path_what_was_found_and_what_is_right(
    module: ModuleType, kind: str, target: Any, found: str, right: str
) -> None:
    message = refusal(module, kind, target)
    assert message.startswith(f"{KINDS[kind].flag} {MODULE}.it: ")
    assert found in message
    assert right in message


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("justaname", "justaname: not of the form package.module.name"),
        ("my/rewards.py", "it is a file's path, not of the form package.module.name"),
        ("vime.rolout.vllm_rollout.generate", "no module 'vime.rolout' (nearest: 'rollout'). It is looked for in the current folder"),
        ("vime.rollout.vllm_rolout.generate", "no module 'vime.rollout.vllm_rolout' (nearest: 'vllm_rollout')"),
        ("vime.rollout.vllm_rollout.generat", "has no 'generat' (nearest: 'generate')."),
        ("vime.errors.inner.fn", "no module 'vime.errors.inner' ('vime.errors' is a module, not a package)"),
        ("surely_not_installed_anywhere.fn", "no module 'surely_not_installed_anywhere'"),
    ],
)
def test_a_path_that_leads_nowhere_says_which_part_failed(path: str, said: str) -> None:
    with pytest.raises(HookError) as caught:
        load_hook(path, "custom_generate_function_path")
    assert said in str(caught.value)


def test_a_module_that_fails_to_import_is_blamed_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_hooks.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "needy_hooks.py").write_text("import not_there_at_all\n")
    with pytest.raises(HookError, match=r"ZeroDivisionError: division by zero at .*broken_hooks\.py:2 \(y = x / 0\)"):
        load_hook("broken_hooks.fn", "custom_rm_path")
    with pytest.raises(HookError, match="module 'needy_hooks' imports 'not_there_at_all', which is not installed"):
        load_hook("needy_hooks.fn", "custom_rm_path")


def test_all_hooks_of_a_configuration_are_checked_at_once(module: ModuleType) -> None:
    module.bad = reward_without_args  # type: ignore[attr-defined]
    config = RunConfig(
        reward=s.RewardConfig(custom_rm_path=f"{MODULE}.bad"),
        rollout=s.RolloutConfig(custom_generate_function_path=f"{MODULE}.absent"),
    )
    with pytest.raises(ConfigError) as caught:
        check_all(config)
    assert len(caught.value.problems) == 2
    assert "--custom-generate-function-path" in caught.value.problems[0]
    assert "--custom-rm-path" in caught.value.problems[1]


def test_the_defaults_pass_and_nothing_heavy_is_imported() -> None:
    code = "import sys; from vime.config import RunConfig; from vime.hooks import check_all; check_all(RunConfig())"
    code += "; print('torch' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_what_a_hook_raises_is_blamed_on_the_innermost_line_of_the_users_file() -> None:
    def inner() -> None:
        int("x")

    with (
        pytest.raises(HookError, match=r"--flag a\.b raised ValueError: .*test_hooks\.py:\d+ \(int\(\"x\"\)\)"),
        hook_errors("--flag", "a.b", inner),
    ):
        inner()


def test_our_own_errors_pass_through_hooks() -> None:
    with pytest.raises(GenerationError, match="sandbox"), hook_errors("--flag", "a.b", reward):
        raise GenerationError("sandbox lost")


def test_optional_parameters_are_noticed() -> None:
    assert accepts(generate_eval, "evaluation")
    assert accepts(reward, "evaluation")
    assert not accepts(generate, "evaluation")
