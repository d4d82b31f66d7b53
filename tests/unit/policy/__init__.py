"""Units of `extproc/policy/`."""
