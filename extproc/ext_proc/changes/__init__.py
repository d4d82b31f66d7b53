"""Edits of a request's body: adding a note for the model, and removing tools."""
