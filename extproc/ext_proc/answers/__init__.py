"""ProcessingResponses: one file for each kind of answer."""
