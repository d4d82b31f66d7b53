"""Units of `extproc/operator/`."""
