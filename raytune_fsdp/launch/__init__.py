"""The outer shell: from a prepared config to ranks that train. `local.py` needs no Ray."""
