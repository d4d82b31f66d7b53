"""Units of `extproc/store/`."""
