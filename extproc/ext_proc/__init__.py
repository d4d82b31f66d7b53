"""Envoy's external processing: phases, messages and answers."""
