"""What a version of Envoy may do in its own way.

`make test-envoys` runs this folder on each that is supported.
"""
