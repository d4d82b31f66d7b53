"""One request through the policies that it meets."""
