"""Units of `extproc/cli/`."""
