"""Units of `extproc/apis/`."""
