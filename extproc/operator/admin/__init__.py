"""What operators ask a running Loopguard over HTTP, and the client of its commands."""
# interpreted, with all below: answers operators, not requests
