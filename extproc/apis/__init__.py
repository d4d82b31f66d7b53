"""The APIs that agents call: one file each."""
