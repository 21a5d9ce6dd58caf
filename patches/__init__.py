"""The patch queue over the pinned upstream wheel; `python -m patches --help` lists the commands."""
