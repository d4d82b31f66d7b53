"""Units of `extproc/engine/`."""
