"""What people see of a running Loopguard, and what they order."""
