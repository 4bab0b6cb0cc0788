"""Steps that take modules as they are: what `stepcache.nnx` and `stepcache.equinox` are made of."""
