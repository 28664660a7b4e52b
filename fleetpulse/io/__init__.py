"""Adapters: one thin file for each third party, and nothing that decides."""
