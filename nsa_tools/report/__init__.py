"""Results as tables, charts and JSON files."""
