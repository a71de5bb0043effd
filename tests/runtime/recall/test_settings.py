"""Settings of recall as commands take them, and what is refused."""

from __future__ import annotations

import pytest

from kvcap.runtime.recall.settings import RecallSettings, index_bytes


def test_how_many_tokens_are_read_again():
    budgets = (16, 64, 128, 256, 512, 1024)
    assert [RecallSettings().limit(budget) for budget in budgets] == [8, 32, 64, 128, 170, 341]
    assert RecallSettings.parse("96").limit(4096) == 96
    assert RecallSettings.parse("5000").limit(256) == 256  # more would be evicted as it is read
    assert RecallSettings.parse(" OFF ").nbytes == 0
    assert RecallSettings.parse("auto", "1MiB").nbytes == 1 << 20


@pytest.mark.parametrize("tokens", ["on", "-1", "1.5", "", "٣", "128 tokens"])
def test_what_is_no_number_of_tokens_is_refused(tokens):
    with pytest.raises(ValueError, match="use auto, off, or"):
        RecallSettings.parse(tokens)


@pytest.mark.parametrize("store", ["1KiB", "0", "100000"])
def test_an_index_without_room_is_refused(store):
    with pytest.raises(ValueError, match=r"use 256\.0 KiB or more"):
        RecallSettings.parse("auto", store)


def test_where_nobody_says_a_small_cap_has_a_small_index():
    mib = 1 << 20
    caps = (None, 4096 * mib, 256 * mib, 128 * mib, 16 * mib, mib)
    assert [index_bytes(cap=cap) for cap in caps] == [
        8 * mib,
        8 * mib,
        8 * mib,
        4 * mib,
        mib // 2,
        mib // 4,
    ]
    assert RecallSettings.parse(cap=128 * mib).nbytes == 4 * mib
    assert RecallSettings.parse(store="8MiB", cap=128 * mib).nbytes == 8 * mib
    assert RecallSettings.parse("off", cap=128 * mib).nbytes == 0
    assert RecallSettings.parse(served=True, cap=8 * mib).nbytes == mib
    assert RecallSettings.parse(store="2MiB", served=True).nbytes == 2 * mib
    assert [index_bytes(size, 128 * mib) for size in (None, 0, "1MiB")] == [4 * mib, 0, mib]
    with pytest.raises(ValueError, match="will not work"):
        index_bytes(4096)
