"""Tokens on disk and the resumable order in which they are taken. No torch here."""
