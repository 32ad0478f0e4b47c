"""Hundreds of mixed requests to a real server: right answers, nothing kept (`benchmarks.servers.soak` asks more)."""

import pytest

from benchmarks.servers.soak import KINDS, soak

GROWTH = 32 << 20  # bytes of memory that code and buffers in use for the first time may take behind the first requests


@pytest.mark.sweep
def test_a_server_answers_right_and_keeps_nothing():
    found = soak(300, 150, problems=8)
    assert not found.wrong, found.wrong[0]
    assert all(found.kinds[kind] for kind in KINDS)
    assert found.statuses["400"] == found.kinds["refused"]
    assert set(found.statuses) <= {"200", "400", "499"}
    unseen = 300 - sum(found.statuses.values())  # left ahead of their request
    assert 0 <= unseen <= found.kinds["left while waiting"]
    first, last = found.held
    assert (first.requests, last.requests) == (150, 300)
    assert (last.open_files, last.threads) == (first.open_files, first.threads)
    assert last.resident_bytes - first.resident_bytes < GROWTH
