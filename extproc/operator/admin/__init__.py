"""The admin endpoints, HTTP reports and orders for operators, and their client for commands."""
# interpreted, with all below: answers operators, not requests
