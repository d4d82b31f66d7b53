"""Envoy's external processing protocol: phases, messages and answers."""
