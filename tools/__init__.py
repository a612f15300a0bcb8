"""Programs for developers of this package: what checks it, what its wheels and pages are made by.

Run from a checkout; not part of the installed package.
"""
