"""On-device latency of the policies: a plan, runners that measure it, a report."""
