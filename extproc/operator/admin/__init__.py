"""The admin endpoints, with which operators query a running Loopguard over HTTP, and the client of its commands."""
# interpreted, with all below: answers operators, not requests
