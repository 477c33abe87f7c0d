"""The command line: split by owner, typed, bounded, and every mistake reported at once."""

import pytest

from vime.config import RunConfig
from vime.config.names import NameIndex
from vime.config.parse import own_flags, parse_own
from vime.config.split import OwnedTokens, by_owner, owner_of, read_tokens

REQUIRED = [("--rollout-batch-size", ["4"])]


def split(*argv: str) -> OwnedTokens:
    given, problems = read_tokens(argv, NameIndex(own_flags()))
    assert problems == []
    return by_owner(given, own_flags())


def problems_of(*argv: str) -> list[str]:
    return read_tokens(argv, NameIndex(own_flags()))[1]


def test_each_token_goes_to_its_owner():
    argv = (
        "--lr 1e-3 --vllm-max-num-seqs 8 --no-vllm-enable-prefix-caching --router-policy random --num-layers 4 --rollout-stop a b".split()
    )
    tokens = split(*argv)
    assert tokens.own == [("--lr", ["1e-3"]), ("--rollout-stop", ["a", "b"])]
    assert tokens.vllm == ["--max-num-seqs", "8", "--no-enable-prefix-caching"]
    assert tokens.router == ["--policy", "random"]
    assert tokens.megatron == ["--num-layers", "4"]


def test_our_own_flags_with_a_foreign_prefix_stay_ours():
    tokens = split("--vllm-router-ip", "127.0.0.1", "--vllm-server-concurrency=7")
    assert tokens.own == [("--vllm-router-ip", ["127.0.0.1"]), ("--vllm-server-concurrency", ["7"])]
    assert tokens.vllm == []


def test_a_negative_number_is_a_value():
    assert split("--rollout-top-k", "-1").own == [("--rollout-top-k", ["-1"])]


def test_a_value_without_a_flag_is_refused():
    (problem,) = problems_of("7", "--lr", "1")
    assert problem.startswith("'7' belongs to no flag")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-lr", "1"], "'-lr' has one dash; flags have two: --lr."),
        (
            ["--rollout-stop", "a", "-tp", "2"],
            "'-tp' has one dash; flags have two: --tp. If it is a value, join it to its flag: --flag=-tp",
        ),
        (["\u2014lr", "1"], "'\u2014lr' begins with a dash that is none of the keyboard's (copied from a document?): write --lr."),
        (["-\u2013lr", "1"], "'-\u2013lr' begins with a dash that is none"),
        (["--lr", "1", "--"], "'--' alone is no flag"),
        (["--rollout-stop", "a", "x--lr", "2"], "'x--lr' looks like --lr, and stands as a value of --rollout-stop."),
    ],
)
def test_a_flag_behind_a_wrong_dash_is_no_value(argv, said):
    assert any(problem.startswith(said) for problem in problems_of(*argv))


def test_a_value_that_looks_like_a_flag_is_joined_to_its_flag():
    assert split("--rollout-stop=-lr").own == [("--rollout-stop", ["-lr"])]


def test_equals_sign_and_space_mean_the_same():
    one = parse_own([*REQUIRED, *split("--lr=0.5").own]).sections
    two = parse_own([*REQUIRED, *split("--lr", "0.5").own]).sections
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
    own = parse_own([*([] if flag == "--rollout-batch-size" else REQUIRED), (flag, values)])
    (problem,) = own.problems
    assert message in problem
    assert own.unsure == {flag}


def test_all_mistakes_are_reported_at_once():
    own = parse_own([("--lr", ["x"]), ("--num-rollout", ["-3"])])
    assert len(own.problems) == 3  # and the required --rollout-batch-size is missing
    assert own.unsure == {"--lr", "--num-rollout", "--rollout-batch-size"}


def test_the_same_flag_twice_with_two_values_is_refused():
    (problem,) = parse_own([*REQUIRED, ("--lr", ["1"]), ("--lr", ["2"])]).problems
    assert problem == "--lr is given twice, as '--lr 1' and '--lr 2': keep one."


def test_a_switch_can_be_taken_back_and_counts_as_not_given_then():
    own = parse_own([*REQUIRED, ("--no-use-kl-loss", []), ("--no-disable-rewards-normalization", [])])
    assert own.problems == []
    assert (own.sections["algorithm"].use_kl_loss, own.sections["algorithm"].rewards_normalization) == (False, True)
    assert own.given == {"rollout_batch_size"}
    (problem,) = parse_own([*REQUIRED, ("--use-kl-loss", []), ("--no-use-kl-loss", [])]).problems
    assert problem.startswith("--use-kl-loss is given twice")


def test_a_negated_flag_switches_its_field_off():
    assert parse_own([*REQUIRED, ("--disable-grpo-std-normalization", [])]).sections["algorithm"].grpo_std_normalization is False


def test_args_view_is_flat_and_read_only():
    args = RunConfig().runtime_args(vllm_router_port=1234)
    assert args.rollout_temperature == 1.0
    assert args.vllm_router_port == 1234
    with pytest.raises(AttributeError, match="read-only"):
        args.lr = 3
    with pytest.raises(AttributeError, match="args has no 'learning_rate'"):
        _ = args.learning_rate


def test_a_prefix_alone_is_no_flag_of_its_owner() -> None:
    assert [owner_of(flag, ()) for flag in ("--vllm-", "--router-", "--vllm-x", "--router-x")] == ["megatron", "megatron", "vllm", "router"]
