"""One HTTP request as Envoy shows it: its parts, its body, its caller and its fingerprint."""
