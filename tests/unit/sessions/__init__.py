"""Units of `extproc/sessions/`."""
