"""Units of `extproc/request/`."""
