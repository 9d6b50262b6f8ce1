"""Where record/report was before. difference.py keeps the address that docs/observing.md named."""
