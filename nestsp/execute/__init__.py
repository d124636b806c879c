"""Runs a plan on a model."""
