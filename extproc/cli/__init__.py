"""The `loopguard` command."""
# interpreted, with all below: prints and exits, or waits for input
