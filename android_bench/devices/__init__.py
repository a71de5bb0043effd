"""Runs a plan on this machine, on a device over adb, or in that device's browser."""
