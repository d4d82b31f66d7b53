"""Units of `extproc/transport/`."""
