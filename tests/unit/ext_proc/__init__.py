"""Units of `extproc/ext_proc/`."""
