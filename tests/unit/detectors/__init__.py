"""Units of `extproc/detectors/`."""
