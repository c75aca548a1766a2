"""Which addresses servers may bind to."""

from __future__ import annotations

import ipaddress


def private_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address of this machine that a server with weights may bind to.

    Raises:
      ValueError: it is no address, or one that more than a private network may reach.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ValueError(f"host must be an IP address of this machine, got {host!r}") from None
    address = getattr(address, "ipv4_mapped", None) or address
    private = address.is_private and not (address.is_unspecified or address.is_reserved)
    if not (address.is_loopback or private):
        raise ValueError(f"host must be a loopback or private address, got {host}: weights are not for everybody")
    return address
