"""Sessions: names, histories, costs and limits."""
