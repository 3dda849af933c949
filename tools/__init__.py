"""Measuring tools, run from a checkout."""
