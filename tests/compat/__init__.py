"""Our exports as older software reads them, in environments of their own: `make compat`."""
