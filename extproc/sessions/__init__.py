"""Sessions: their names, their histories, what they cost and what limits them."""
