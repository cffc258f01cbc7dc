"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.fake_rdma import FakeRDMA, kernel_with


@pytest.fixture
def rdma() -> Iterator[FakeRDMA]:
    """A kernel with two RDMA devices; at the end of the test no identifier and no queue pair may be left."""
    driver = FakeRDMA()
    with kernel_with(driver):
        yield driver
    assert driver.nothing_left(), (driver.ids, driver.opened)
