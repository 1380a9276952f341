"""Plans over random rosters against brute force, without ranks."""
