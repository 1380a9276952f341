"""The configuration behind --dynatrain, without ranks."""
