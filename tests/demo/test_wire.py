"""What the demo's parts share on the wire."""

from __future__ import annotations

import socket

from plimsoll.demo.balancer import HOST, free_port


def test_no_port_is_given_twice() -> None:
    """Whoever got one may not listen there yet; a second one who gets it would answer in its place."""
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300
    assert all(22_000 <= port < 32_000 for port in ports)


def test_a_port_that_is_taken_is_not_given() -> None:
    """It was tried."""
    with socket.socket() as found:
        found.bind((HOST, free_port()))
        taken = found.getsockname()[1]
        assert taken not in [free_port() for _ in range(50)]
