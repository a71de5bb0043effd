"""Serves the pages that measure a plan or chat in a browser, and takes results that they send."""
