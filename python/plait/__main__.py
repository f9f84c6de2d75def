"""python -m plait: the command line."""

from plait.cli import main

main()
