"""What a host of ``network.py`` is told about its network: lines of JSON, each a call of pyroute2 with its arguments by name.

``dev`` and ``master`` are names of links that are there.
"""

from __future__ import annotations

import json
import sys

from pyroute2 import IPRoute


def main() -> None:
    """Make the calls."""
    with IPRoute() as netlink:
        for line in sys.stdin:
            about, verb, given = json.loads(line)
            for name, argument in (("dev", "index"), ("master", "master")):
                if name in given:
                    given[argument] = netlink.link_lookup(ifname=given.pop(name))[0]
            getattr(netlink, about)(verb, **given)


if __name__ == "__main__":
    main()
