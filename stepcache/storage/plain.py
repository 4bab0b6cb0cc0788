"""Plain data as bytes, as in `stepcache/link/plain.py`, where it also is what processes send."""

from stepcache.link.plain import fields_of, fits, pack, record_of, unpack

__all__ = ["fields_of", "fits", "pack", "record_of", "unpack"]
