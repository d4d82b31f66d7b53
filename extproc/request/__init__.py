"""One HTTP request as Envoy sends it: its parts, its body, its caller and its fingerprint."""
