"""Measurements to run on the device itself; nothing here is needed to use the package."""
