"""The counters of network interfaces, read from a directory as the kernel's."""

from __future__ import annotations

import pytest

from hpcaccum.bench.links import Interfaces, network

ETHERNET, LOOPBACK = 1, 772


@pytest.fixture
def interface(tmp_path):
    """Add an interface."""

    def make(name, sent, received, kind=ETHERNET, lower=()):
        counters = tmp_path / name / "statistics"
        counters.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "type").write_text(f"{kind}\n")
        (counters / "tx_bytes").write_text(f"{sent}\n")
        (counters / "rx_bytes").write_text(f"{received}\n")
        for each in lower:
            (tmp_path / name / f"lower_{each}").symlink_to(tmp_path / each)

    return make


def test_all_interfaces_but_loopback_are_added(tmp_path, interface):
    interface("lo", 10**15, 10**15, LOOPBACK)
    interface("eth0", 100, 20)
    interface("ib0", 3, 4, 32)
    found = Interfaces(tmp_path)

    assert found.names == ["eth0", "ib0"]
    assert found.read() == (103, 24)


def test_counters_are_read_anew(tmp_path, interface):
    interface("eth0", 100, 20)
    found = Interfaces(tmp_path)
    interface("eth0", 2**40, 21)

    assert found.read() == (2**40, 21)


def test_what_passes_its_bytes_on_is_not_counted_twice(tmp_path, interface):
    interface("eth0", 1, 2)
    interface("eth1", 10, 20)
    interface("bond0", 11, 22, lower=("eth0", "eth1"))

    assert Interfaces(tmp_path).read() == (11, 22)


def test_what_has_no_counters_is_left_out(tmp_path, interface):
    (tmp_path / "bonding_masters").write_text("bond0\n")
    (tmp_path / "odd").mkdir()
    interface("eth1", 10, 20)

    assert Interfaces(tmp_path).names == ["eth1"]


def test_a_system_without_counters_has_no_interface(tmp_path):
    found = Interfaces(tmp_path / "net")

    assert found.names == []
    assert found.read() == (0, 0)


def test_the_network_has_a_name():
    assert network() == network() != ""
