"""Synthetic rosters: against those of real jobs, and by what they must add up to."""
