"""Memory, traffic and time, before anything is started. So far: floating-point operations."""
