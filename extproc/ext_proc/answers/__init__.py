"""ProcessingResponses: what Envoy is told, one file for each kind of answer."""
