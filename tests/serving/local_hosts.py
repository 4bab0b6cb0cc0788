"""Hosts that share one set of variables: `tests/serving/local_hosts.py DIRECTORY [OPTION]`.

The local engine has no command for it. The option is that of `stepcache serve`.
"""

import signal
import sys
import threading
from pathlib import Path

from stepcache.serving.local_server import LocalServer
from stepcache.serving.transport import place_of
from tests.serving.servers import LocalHosts


def main():
    directory, *rest = sys.argv[1:]
    options = (
        {"snapshot_seconds": float(rest[0].removeprefix("--snapshot-every=").removesuffix("s"))}
        if rest
        else {}
    )
    servers = [
        LocalServer(Path(place_of(directory, host)), hosts=LocalHosts.hosts, **options)
        for host in reversed(range(LocalHosts.hosts))
    ]
    signal.signal(signal.SIGTERM, lambda *_: [each.stop() for each in servers])
    threads = [threading.Thread(target=each.run) for each in servers]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    print(f"{sum(each.host.moment for each in servers)} writes")


if __name__ == "__main__":
    main()
