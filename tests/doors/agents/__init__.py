"""Agents on the SDKs and frameworks of the field."""
