"""`python -m stepcache.cli`."""

from stepcache.cli import main

main()
