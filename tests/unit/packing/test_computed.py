"""What is computed of a pack: everything that the wanted positions look at, once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.packing.computed import computed_row
from vime.packing.pack import PackedBatch, pack
from vime.types import StepPlan, TrainSample


def packed_of(samples: list[tuple[list[int], list[int], list[int]]], multiple_of: int = 1) -> PackedBatch:
    """A pack of (prompt, response, mask)."""
    made = [
        TrainSample(
            tokens=np.array(prompt + response), response_length=len(response), loss_mask=np.array(mask, dtype=np.float32), reward=0.0,
            raw_reward=0.0, sample_id=i, group_id=0, rollout_id=i, rollout_mask_sum=float(sum(mask)),
        )
        for i, (prompt, response, mask) in enumerate(samples)
    ]  # fmt: skip
    plan = StepPlan(micro_batches=(tuple(range(len(made))),), num_rollouts=len(made), num_tokens=1.0)
    return pack(made, plan, aggregation="token", multiple_of=multiple_of)


def test_the_example_of_the_module() -> None:
    packed = packed_of([([5, 9], [2, 17, 1], [1, 1, 1]), ([5, 9], [3, 1], [1, 1])])
    row = computed_row(packed, packed.scored_rows)
    assert row.tokens.tolist() == [5, 9, 2, 17, 3]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert row.rows.tolist() == [1, 2, 3, 1, 4]
    assert row.cu_seqlens.tolist() == [0, 4, 7]
    assert row.source.tolist() == [0, 1, 2, 3, 0, 1, 4]


def test_samples_without_a_trained_token_and_padding_are_left_out() -> None:
    packed = packed_of([([5, 9], [2], [0]), ([5, 9], [3, 1], [1, 0])], multiple_of=16)
    row = computed_row(packed, packed.scored_rows)
    assert (row.tokens.tolist(), row.rows.tolist(), row.source.tolist()) == ([5, 9], [1], [0, 1])


def test_a_pack_of_which_nothing_is_trained_still_has_a_position() -> None:
    packed = packed_of([([5], [2], [0])])
    row = computed_row(packed, packed.scored_rows)
    assert (row.tokens.tolist(), row.rows.tolist()) == ([5], [0])


SAMPLE = st.tuples(st.sampled_from([[1], [2], [1, 2], [1, 2, 3]]), st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=4))


@settings(max_examples=80, deadline=None)
@given(st.lists(SAMPLE, min_size=1, max_size=9), st.integers(1, 3))
def test_each_wanted_position_sees_its_own_past(samples: list[tuple[list[int], list[tuple[int, bool]]]], multiple_of: int) -> None:
    packed = packed_of([(p, [token for token, _ in r], [int(m) for _, m in r]) for p, r in samples], multiple_of)
    wanted = packed.scored_rows
    row = computed_row(packed, wanted)
    pasts: dict[int, list[int]] = {}  # of each computed position: the tokens up to it
    for begin, end in zip(row.cu_seqlens[:-1].tolist(), row.cu_seqlens[1:].tolist(), strict=True):
        tokens = row.tokens[row.source[begin:end]].tolist()
        assert row.position_ids[row.source[begin:end]].tolist() == list(range(end - begin))
        for at, index in enumerate(row.source[begin:end].tolist()):
            assert pasts.setdefault(index, tokens[: at + 1]) == tokens[: at + 1]
    assert sorted(pasts) == list(range(len(row.tokens)))
    starts = packed.cu_seqlens.tolist()
    for position, index in zip(wanted.tolist(), row.rows[: len(wanted)].tolist(), strict=True):
        start = max(s for s in starts if s <= position)
        assert pasts[index] == packed.tokens[start : position + 1].tolist()


def test_sizes_are_rounded_by_a_sixteenth_at_most() -> None:
    packed = packed_of([([i % 7, i], [1, 2, 3], [1, 1, 1]) for i in range(41)])
    row = computed_row(packed, packed.scored_rows)
    assert (len(row.tokens), len(row.rows)) == (168, 124)  # of 164 and 123
    assert row.rows[123:].tolist() == row.rows[:1].tolist()
    assert row.position_ids[164:].tolist() == row.source[-4:].sub(164).tolist() == [0, 1, 2, 3]
    assert row.cu_seqlens[-2:].diff().tolist() == [4]
