"""Commands that look at a run or a machine from outside.

audit/    trains a segment of a run again, and compares
doctor/   checks machine, cluster, storage and services before a run
dry_run/  a run without its effects
"""
