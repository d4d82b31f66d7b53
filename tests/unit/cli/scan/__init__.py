"""Units of `loopguard scan`."""
