"""The command, and the demos, as users run them."""
