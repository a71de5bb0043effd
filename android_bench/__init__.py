"""On-device latency of the policies. Nothing is measured yet."""
