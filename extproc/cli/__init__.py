"""The `loopguard` command."""
# interpreted, with all below: waits for people, or prints and exits
