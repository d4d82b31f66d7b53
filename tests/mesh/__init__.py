"""Istio's and Envoy Gateway's own control planes: `make test-mesh`."""
