"""The `loopguard` command."""
# interpreted, as all of this package: it prints and exits, or waits for input
