"""Tests that call the code in their own process, in the folders of the package; no server, no Envoy."""
