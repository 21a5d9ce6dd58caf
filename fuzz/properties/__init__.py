"""The properties, by what they are about."""
