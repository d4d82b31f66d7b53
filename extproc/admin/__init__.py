"""What operators ask a running Loopguard over HTTP, and the client of its commands."""
