"""Edits of a request body: a note for the model, tools taken out."""
