"""`python -m extproc.cli` is the command."""

import sys

from extproc.cli.main import main

sys.exit(main())
