"""What people see of a running Loopguard, and the orders that they give."""
