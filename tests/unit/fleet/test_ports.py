"""Ports of servers: out of reach of connections, and of other fleets."""

import socket
from pathlib import Path

import pytest

from scripts.lib.fleet import ports
from scripts.lib.fleet.ports import Ports, is_free


def kernels_first() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_no_connection_gets_a_port_that_a_server_binds_later(tmp_path: Path) -> None:
    taken = {Ports(tmp_path).take() for _ in range(20)}
    assert all(1024 < port < kernels_first() for port in taken)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32768\t60999\n", range(20_000, 22_000)),
        ("21000 65535", range(19_000, 21_000)),
        ("1024 65535", range(20_000, 22_000)),  # the kernel takes all of them: there is nothing better
        ("nonsense", range(20_000, 22_000)),
    ],
)
def test_the_kernels_own_range_is_left_alone(
    text: str, expected: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    assert ports._window() == expected


def test_a_port_has_one_owner_among_fleets_until_it_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens yet: a model that loads for minutes binds its port at the end."""
    free = next(port for port in range(20_000, 22_000) if is_free(port) and is_free(port + 1))
    monkeypatch.setattr(ports, "_window", lambda: range(free, free + 2))
    first, second = Ports(tmp_path), Ports(tmp_path)
    mine, theirs = first.take(), second.take()
    assert {mine, theirs} == {free, free + 1}
    with pytest.raises(OSError, match="no port of 127.0.0.1 is free"):
        first.take()
    first.give_back(mine)
    assert second.take() == mine


def test_a_server_that_starts_again_has_its_port_again(tmp_path: Path) -> None:
    mine = Ports(tmp_path)
    port = mine.take()
    assert mine.take(port) == port
    other = mine.take()
    assert other != port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert mine.take(port) not in (port, other)


def test_a_folder_that_takes_no_locks_keeps_no_server_from_starting(tmp_path: Path) -> None:
    assert is_free(Ports(tmp_path / "missing").take())
