"""Whatever a flag is given: a value of its type within its bounds is taken, any other is refused by flag, bound and value."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.config import SECTIONS, RunConfig
from vime.config.fields import FlagSpec, flag_specs
from vime.config.parse import OwnValues, parse_own
from vime.config.rules import check_rules
from vime.errors import ConfigError

SPECS = [spec for section in SECTIONS.values() for spec in flag_specs(section)]
NUMBERS = [spec for spec in SPECS if spec.type in (int, float)]
BOUNDED = [spec for spec in NUMBERS if (spec.ge, spec.gt, spec.le) != (None, None, None)]
CHOSEN = [spec for spec in SPECS if spec.choices]
REQUIRED = [(spec.flag, ["1"]) for spec in SPECS if spec.required]
FEW = {"max_value": 10**9, "min_value": -(10**9)}


def parsed(spec: FlagSpec, text: str) -> OwnValues:
    return parse_own([*(pair for pair in REQUIRED if pair[0] != spec.flag), (spec.flag, [text])])


def value_of(spec: FlagSpec, found: OwnValues) -> object:
    (value,) = [getattr(section, spec.name) for section in found.sections.values() if hasattr(section, spec.name)]
    return value


def numbers(spec: FlagSpec) -> st.SearchStrategy[int] | st.SearchStrategy[float]:
    return st.integers(**FEW) if spec.type is int else st.floats(allow_nan=False, allow_infinity=False, width=32)


def outside(spec: FlagSpec, value: float) -> str | None:
    """The bound that `value` breaks, as a message says it."""
    if spec.ge is not None and value < spec.ge:
        return f">= {spec.ge:g}"
    if spec.gt is not None and value <= spec.gt:
        return f"> {spec.gt:g}"
    if spec.le is not None and value > spec.le:
        return f"<= {spec.le:g}"
    return None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NUMBERS).flatmap(lambda spec: st.tuples(st.just(spec), numbers(spec))))
def test_a_number_is_taken_or_refused_by_its_bounds(case):
    check_number(*case)


def test_the_numbers_next_to_each_bound_are_told_apart():
    for spec in BOUNDED:
        for bound in {spec.ge, spec.gt, spec.le} - {None}:
            near = (bound - 1, bound, bound + 1)
            tight = () if spec.type is int else (math.nextafter(bound, -math.inf), math.nextafter(bound, math.inf))
            for value in near + tight:
                check_number(spec, spec.type(value))


def check_number(spec, value):
    text = repr(value)
    found = parsed(spec, text)
    if (bound := outside(spec, value)) is None:
        assert found.problems == []
        assert value_of(spec, found) == ([value] if spec.many else value)
    else:
        assert found.problems == [f"{spec.flag} must be {bound}, got {text}."]
        assert found.unsure == {spec.flag}
        assert value_of(spec, found) == spec.default


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NUMBERS), st.text(alphabet="abcxyz.-+ ", max_size=6))
def test_what_is_no_number_is_refused(spec, text):
    (problem,) = parsed(spec, text).problems
    assert problem in (f"{spec.flag} takes {kind}, got '{text}'." for kind in ("a number", "a whole number"))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CHOSEN), st.text(max_size=12))
def test_what_is_no_choice_is_refused_with_the_choices(spec, text):
    found = parsed(spec, text)
    if text in spec.choices:
        assert found.problems == []
    else:
        (problem,) = found.problems
        assert problem.startswith(f"{spec.flag} takes one of {', '.join(spec.choices)}; got '{text}'.")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([spec for spec in SPECS if spec.type is dict]), st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_a_json_object_comes_back_as_it_was(spec, value):
    assert value_of(spec, parsed(spec, json.dumps(value))) == value


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(BOUNDED), min_size=2, max_size=6, unique_by=lambda spec: spec.flag))
def test_every_value_out_of_bounds_is_reported_at_once(specs):
    low = {spec.flag: str(-(10**6)) for spec in specs if (spec.ge, spec.gt) != (None, None)}
    problems = parse_own([*((flag, [text]) for flag, text in low.items()), *(pair for pair in REQUIRED if pair[0] not in low)]).problems
    assert [problem.split()[0] for problem in problems] == list(low)


def test_an_empty_text_is_refused():
    for spec in SPECS:
        if spec.type is str and not spec.choices:
            (problem,) = parsed(spec, "").problems
            assert problem.startswith(f"{spec.flag} takes a text, got an empty one: is a variable not set?")


@pytest.mark.parametrize("text", ["6_4", "\u0661", " 6", "0x4", "1e3", ""])
def test_what_only_python_reads_as_a_number_is_refused(text):
    for spec in SPECS:
        if spec.type is int:
            (problem,) = parsed(spec, text).problems
            assert problem == f"{spec.flag} takes a whole number, got '{text}'."


@pytest.mark.parametrize(
    ("text", "why"), [('{"a": "1", "a": "2"}', "'a' stands in it twice: keep one"), ('{"a": NaN}', "NaN is no number")]
)
def test_a_json_object_that_says_two_things_or_none_is_refused(text, why):
    for spec in SPECS:
        if spec.type is dict:
            assert parsed(spec, text).problems == [f"{spec.flag} takes a JSON object, got '{text}' ({why})."]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Flags of a valid run, as (flag, values) pairs."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "p.jsonl").write_text('{"input": "1"}\n')
    text = f"--hf-checkpoint {folder} --prompt-data {folder}/p.jsonl --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2"
    words = text.split()
    return list(zip(words[::2], ([word] for word in words[1::2]), strict=True))


def rule_problems(pairs, planned=False):
    """(problems of the values, problems of the rules)."""
    own = parse_own(pairs)
    try:
        check_rules(RunConfig(**own.sections, given=own.given), planned=planned, unsure=own.unsure)
    except ConfigError as error:
        return own.problems, error.problems
    return own.problems, []


def test_a_wrong_value_has_no_consequences_that_are_none(base):
    assert rule_problems(base) == ([], [])
    for spec in NUMBERS + CHOSEN:
        pairs = [pair for pair in base if pair[0] != spec.flag]
        (own,), rules = rule_problems([*pairs, (spec.flag, ["?"])])
        assert own.startswith(f"{spec.flag} takes ")
        assert all(problem.startswith(f"{spec.flag} has no effect") for problem in rules), rules


def test_a_wrong_value_hides_no_other_mistake(base):
    _, rules = rule_problems([*base, ("--rollout-top-p", ["?"]), ("--eval-top-p", ["?"]), ("--eval-top-k", ["5"]), ("--save-hf", ["x"])])
    assert [problem.partition(" ha")[0] for problem in rules] == ["--save-hf", "--eval-top-p, --eval-top-k"]


def any_value(spec):
    """Texts that a flag may be given: valid ones, for whatever its type is."""
    if spec.type is bool:
        return st.just([])
    if spec.type in (int, float):
        low = spec.ge if spec.ge is not None else (spec.gt + 1 if spec.gt is not None else -9)
        return st.integers(int(low), int(min(spec.le, low + 9) if spec.le is not None else low + 9)).map(lambda n: [str(n)])
    if spec.type is dict:
        return st.sampled_from([["{}"], ['{"a": "b"}'], ['{"a": 1}']])
    one = st.sampled_from(spec.choices) if spec.choices else st.sampled_from(["x", "a.b", "/nowhere", "{rollout_id}", "{"])
    return st.lists(one, min_size=1, max_size=3 if spec.many else 1)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.sampled_from(SPECS), min_size=1, max_size=10, unique_by=lambda spec: spec.name), st.booleans())
def test_the_rules_answer_to_whatever_is_given(data, specs, planned):
    pairs = [(spec.flag, data.draw(any_value(spec), label=spec.flag)) for spec in specs]
    own, rules = rule_problems([*pairs, *(pair for pair in REQUIRED if pair[0] not in dict(pairs))], planned)
    assert own == []
    assert all("--" in problem or problem.startswith("prompt file") for problem in rules)
    assert len(set(rules)) == len(rules)
