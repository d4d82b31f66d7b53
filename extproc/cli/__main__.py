"""Runs the command with `python -m extproc.cli`."""

import sys

from extproc.cli.main import main

sys.exit(main())
