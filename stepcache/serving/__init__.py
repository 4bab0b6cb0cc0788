"""Variables that another process holds: a client, a host, and engines that connect them."""
