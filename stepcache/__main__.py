"""`python -m stepcache`."""

from stepcache.cli import main

main()
