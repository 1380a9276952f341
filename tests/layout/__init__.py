"""Layouts, without ranks."""
