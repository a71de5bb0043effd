"""Serves the page that measures a plan in a browser, and takes the results that it sends."""
