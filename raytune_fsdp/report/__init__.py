"""Where the report was until it moved to record/report. difference.py keeps the address that docs/observing.md named."""
