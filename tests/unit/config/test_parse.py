"""The command line: split by owner, typed, bounded, and every mistake reported at once."""

import pytest

from vime.config import RunConfig
from vime.config.parse import flag_table, help_text, nearest, parse_own
from vime.config.split import split_tokens
from vime.errors import ConfigError

REQUIRED = [("--rollout-batch-size", ["4"])]


def test_each_token_goes_to_its_owner():
    argv = (
        "--lr 1e-3 --vllm-max-num-seqs 8 --no-vllm-enable-prefix-caching --router-policy random --num-layers 4 --rollout-stop a b".split()
    )
    tokens = split_tokens(argv, flag_table().keys())
    assert tokens.own == [("--lr", ["1e-3"]), ("--rollout-stop", ["a", "b"])]
    assert tokens.vllm == ["--max-num-seqs", "8", "--no-enable-prefix-caching"]
    assert tokens.router == ["--policy", "random"]
    assert tokens.megatron == ["--num-layers", "4"]


def test_our_own_flags_with_a_foreign_prefix_stay_ours():
    tokens = split_tokens(["--vllm-router-ip", "127.0.0.1", "--vllm-server-concurrency=7"], flag_table().keys())
    assert tokens.own == [("--vllm-router-ip", ["127.0.0.1"]), ("--vllm-server-concurrency", ["7"])]
    assert tokens.vllm == []


def test_a_negative_number_is_a_value():
    assert split_tokens(["--rollout-top-k", "-1"], flag_table().keys()).own == [("--rollout-top-k", ["-1"])]


def test_a_value_without_a_flag_is_refused():
    with pytest.raises(ConfigError, match="'7' belongs to no flag"):
        split_tokens(["7", "--lr", "1"], flag_table().keys())


def test_equals_sign_and_space_mean_the_same():
    one = parse_own([*REQUIRED, *split_tokens(["--lr=0.5"], flag_table().keys()).own])
    two = parse_own([*REQUIRED, *split_tokens(["--lr", "0.5"], flag_table().keys()).own])
    assert one["training"] == two["training"]


@pytest.mark.parametrize(
    ("flag", "values", "message"),
    [
        ("--lr", ["fast"], "--lr takes a number, got 'fast'"),
        ("--lr", [], "--lr takes one value, got none"),
        ("--rollout-batch-size", ["2.5"], "--rollout-batch-size takes a whole number, got '2.5'"),
        ("--rollout-batch-size", ["0"], "--rollout-batch-size must be >= 1, got 0"),
        ("--rollout-temperature", ["0"], "--rollout-temperature must be > 0, got 0"),
        ("--rollout-top-p", ["1.5"], "--rollout-top-p must be <= 1, got 1.5"),
        ("--rollout-temperature", ["nan"], "--rollout-temperature takes a finite number, got 'nan'"),
        ("--rollout-temperature", ["inf"], "--rollout-temperature takes a finite number, got 'inf'"),
        ("--lr", ["inf"], "--lr takes a finite number, got 'inf'"),
        ("--rollout-max-context-len", ["7"], "--rollout-max-context-len must be >= 8, got 7"),
        ("--advantage-estimator", ["grp"], "Did you mean 'grpo'"),
        ("--colocate", ["true"], "--colocate takes no value, got 'true'"),
        ("--apply-chat-template-kwargs", ["{a:1}"], "takes a JSON object"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(flag, values, message):
    with pytest.raises(ConfigError) as error:
        parse_own([*([] if flag == "--rollout-batch-size" else REQUIRED), (flag, values)])
    assert message in str(error.value)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        parse_own([("--lr", ["x"]), ("--num-rollout", ["-3"])])
    assert len(error.value.problems) == 3  # and the required --rollout-batch-size is missing


def test_the_same_flag_twice_with_two_values_is_refused():
    with pytest.raises(ConfigError, match="--lr is given twice"):
        parse_own([*REQUIRED, ("--lr", ["1"]), ("--lr", ["2"])])


def test_a_negated_flag_switches_its_field_off():
    assert parse_own([*REQUIRED, ("--disable-grpo-std-normalization", [])])["algorithm"].grpo_std_normalization is False


def test_help_names_every_flag_with_its_doc():
    text = help_text()
    assert all(flag in text and spec.doc in text for flag, (_, spec) in flag_table().items())


def test_one_edit_away_finds_the_right_name():
    flags = list(flag_table())
    missed = [flag for flag in flags if flag not in nearest(flag[:-1] + "z", flags)]
    assert missed == []


def test_args_view_is_flat_and_read_only():
    args = RunConfig().runtime_args(vllm_router_port=1234)
    assert args.rollout_temperature == 1.0
    assert args.vllm_router_port == 1234
    with pytest.raises(AttributeError, match="read-only"):
        args.lr = 3
    with pytest.raises(AttributeError, match="args has no 'learning_rate'"):
        _ = args.learning_rate
