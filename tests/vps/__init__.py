"""Geometry: regions, flat ranges and rosters against brute force, without ranks."""
